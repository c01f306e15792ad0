"""Where the script stands between two steps.

Theory of operation: a rank's position is (steps committed, sections done after the last of them).
In a rank that goes on undisturbed the script has called as many sections as are done. A replacement
begins at the call of the last committed step with the state of its peers, which may be some
sections further on: its script then has those sections still to call, and each such call returns
what its predecessor kept of it. So two numbers are counted: what the state here is of (`sections`),
and how far the script has come (`called`). What was kept of a section is found by a name that says
which it is since the step's commit, or since the next batch was drawn: there, too, a replacement's
script may begin.

Does not know: what a section is, where what was kept comes from.
"""

from __future__ import annotations

from everstep.errors import UserError


class Place:
    """Counts since the last committed step. Main thread; the exchange of a recovery sets `sections`
    while the main thread waits for it."""

    def __init__(self) -> None:
        self.sections = 0
        """Sections done after the last committed step: what the state here is of."""
        self.called = 0
        """Of those, how many the script has called."""
        self.inside = ""
        """The name of the section that is under way."""
        self.kept: dict[str, bytes] = {}
        """What an earlier process of this rank kept of the sections after this step, by name."""
        self.kept_bytes = 0
        """What this process has kept of the sections after this step."""
        self._alone = 0  # sections without a fence that were called
        self._drawn = False  # whether the batch of the next step has been drawn
        self._before = 0, 0  # `called` and `_alone` at the last commit, or draw
        self._once: dict[str, int] = {}
        self._once_at = ""

    def next_step(self) -> None:
        """A step has been committed, or has been done by peers: no section after it is called."""
        self.sections = self.called = self._alone = self.kept_bytes = 0
        self._drawn, self._before = False, (0, 0)
        self.kept = {}

    def draw(self) -> None:
        """The batch of the next step is handed out. A replacement's script may begin here."""
        self._drawn, self._before = True, (self.called, self._alone)

    def name(self) -> str:
        """What tells the section that is called next from the others after the same step."""
        return f"section {self._number(self.called - self._before[0] + 1)}"

    def name_alone(self) -> str:
        """The same for a section without a fence, which counts as called now."""
        self._alone += 1
        return f"alone {self._number(self._alone - self._before[1])}"

    def _number(self, number: int) -> str:
        return f"{number} of the {'next' if self._drawn else 'last'} step"

    def check_all_called(self, step: int) -> None:
        """Step `step` is about to begin. Raises UserError if the script has left out a section that
        its predecessor made."""
        if self.called < self.sections:
            raise UserError(
                f"this replacement's script came to step {step} after {self.called} of the "
                f"{self.sections} sections that its peers made before it; whether a section is "
                "called must follow from run.committed, run.state, and what steps and sections "
                "returned, and be alike on all ranks"
            )

    def once_key(self, name: str, step: int, *, inside: bool) -> str:
        """The key of a call of `run.once` with a function called `name`: the same for each attempt
        and each process that comes by here. `inside`: in a step or a section."""
        number = self._number(self.called - self._before[0])
        at = f"{step}, {number}{', inside' if inside else ''}"
        if at != self._once_at:
            self._once_at, self._once = at, {}
        count = self._once[name] = self._once.get(name, 0) + 1
        return f"{name} after {at}, #{count}"

    def new_attempt(self) -> None:
        """A step or a section is about to be tried: what it does once, it has not done yet."""
        self._once_at = ""


_BEFORE_STEPS = "section/"


def key_before_steps(section: str) -> str:
    """Under which name what is kept of a section before the first step is given to the rank's next
    process, which has to know it before it has joined."""
    return _BEFORE_STEPS + section


def kept_before_steps(recorded: dict[str, bytes]) -> dict[str, bytes]:
    """Of all that was recorded for the rank, what was kept of sections before the first step."""
    return {
        key.removeprefix(_BEFORE_STEPS): value
        for key, value in recorded.items()
        if key.startswith(_BEFORE_STEPS)
    }
