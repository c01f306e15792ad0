"""How a job is started: on this machine, unprotected, or three times to prove that a recovery is
exact. No torch."""
