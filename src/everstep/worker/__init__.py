"""In the process that trains: the step transaction, the communicators around gloo, the state it
protects.

The only room, with data.loader, that imports torch.
"""
