"""The memory tier: each host's agent keeps objects in shared memory, its own ranks' and copies for
other hosts. See docs/design/tiers.md."""
