"""Memory of this host that outlives a process: how much there is, and who holds it."""
