"""How many descriptors this process may have.

Theory of operation: the system's soft limit is 1,024 for the sake of programs that use select(2) on
higher numbers; the hard limit is what an administrator has decided. Agents and coordinators hold a
descriptor for each connection and several for each worker, so they raise their soft limit to the
hard one, and refuse to start where that is too low, instead of failing in the middle of a recovery.
What they start inherits it.
"""

from __future__ import annotations

import resource
from typing import Final

from everstep.errors import UserError

PER_WORKER: Final = 16
"""Channel, pipes, pidfd, files in memory, and as much again while one is replaced."""
OF_AN_AGENT: Final = 512
"""What an agent may need beside its workers: 160 connections of the bulk plane, its peers'."""
OF_A_COORDINATOR: Final = 128
"""What a coordinator may need beside the connections of its agents."""


def raise_limit(needed: int) -> int:
    """Raise the soft limit to the hard one and return it. Main thread, before others begin.

    Raises UserError when it stays below `needed`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"this process may open {hard} files, and may need {needed}: raise the hard limit "
            "(ulimit -Hn, nofile in /etc/security/limits.conf, LimitNOFILE= of a systemd unit)"
        )
    return hard
