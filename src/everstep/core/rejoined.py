"""Who has come back to a coordinator that takes over a job, and what they say.

What is gathered while nodes reconvene: `core.reconvene` fills it and decides by it. Pure state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.events import MemberBack, NodeBack, Resumed, StopAsked
from everstep.types import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that must be answered by a recovery. `ours`: it may have been brought about by the
    coordinator that is gone."""

    rank: int
    incarnation: int
    cause: Cause
    ours: bool = False


@dataclass(slots=True, kw_only=True)
class Rejoined:
    """`told`: what the journal knew. `reports`: of all nodes that came, by number, also of those
    that are gone again. `members`: by rank, who lives. `ended`: by rank, who is dead, where nobody
    lives. `failures`: what was said by those that live. `lost`: by slot, how its node was lost that
    had come back. `stop_asked`: the first wish meanwhile that the job end."""

    told: Resumed
    reports: dict[int, NodeBack] = field(default_factory=dict)
    members: dict[int, MemberBack] = field(default_factory=dict)
    ended: dict[int, Failure] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    lost: dict[int, Cause] = field(default_factory=dict)
    stop_asked: StopAsked | None = None

    @property
    def newest(self) -> int:
        """The newest world that anybody was in; 0 where nobody was in one."""
        worlds = (
            member.generation
            for report in self.reports.values()
            for member in report.members
            if not member.joining
        )
        return max(worlds, default=0)
