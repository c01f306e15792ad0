"""The control plane between hosts: `Hub` with the coordinator, `Link` with each agent.

One connection carries the messages of one agent, encrypted and authenticated (CURVE) with keys from
the job's secret, in order, each exactly once, until it ends. It ends for both sides, and both are
told; a link then makes another, which begins anew. How each part does it: `hub`, `link`; what goes
over the wire: `frames`; the secret: `secret`.

Importing this module imports ZeroMQ, which commands that speak with nobody should not pay for.
"""

from everstep.wire.frames import Limits
from everstep.wire.hub import Hub
from everstep.wire.link import Link

__all__ = ["Hub", "Limits", "Link"]
