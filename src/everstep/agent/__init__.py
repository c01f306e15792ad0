"""A node's agent: processes, their channels, their output and the shared memory they show
themselves in. No torch."""
