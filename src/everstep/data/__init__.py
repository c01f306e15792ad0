"""Training data: which samples a step gets (`order`), and the batch made of them (`loader`, which
imports torch).

Imports nothing itself, so that `everstep.data.order` stays free of torch.
"""
