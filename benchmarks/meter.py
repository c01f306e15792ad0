"""Where the time of a protected step goes: functions of everstep, wrapped from outside.

Each part counts its own time only, without that of the parts that it calls. Thread CPU time leaves
out what a part waits for; wall time has it. Wrapping costs about a microsecond a call, which falls
to the caller.

Does not know steps: divide by their number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class Meter:
    """Totals by part; `count`, `cpu_ns`, `wall_ns`, for the thread that made it and for others."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self._stack = threading.local()
        self._undo: list[Callable[[], None]] = []
        self.totals: dict[str, list[int]] = {}

    def wrap(self, part: str, owner: Any, name: str) -> None:
        """Count the calls of `owner.name` as `part`, until `unwrap`."""
        self.replace(owner, name, lambda function: self.measured(part, function))

    def wrap_made(self, part: str, owner: Any, name: str) -> None:
        """Count as `part` the calls of the functions that `owner.name` returns, until `unwrap`."""

        def replacement(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self.measured(part, function(*args, **kwargs))

        self.replace(owner, name, replacement)

    def replace(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Put `make(owner.name)` in the place of `owner.name`, until `unwrap`."""
        function = getattr(owner, name)
        setattr(owner, name, make(function))
        self._undo.append(lambda: setattr(owner, name, function))

    def measured(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its calls counted as `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            stack = self._stack.__dict__.setdefault("inner", [])
            stack.append([0, 0])
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
                inner_cpu, inner_wall = stack.pop()
                if stack:
                    stack[-1][0] += cpu
                    stack[-1][1] += wall
                self._add(part, cpu - inner_cpu, wall - inner_wall)

        return call

    def _add(self, part: str, cpu_ns: int, wall_ns: int) -> None:
        key = part if threading.get_ident() == self._home else f"{part} (other thread)"
        total = self.totals.setdefault(key, [0, 0, 0])
        for index, value in enumerate((1, cpu_ns, wall_ns)):
            total[index] += value

    def unwrap(self) -> None:
        """Put the functions back."""
        while self._undo:
            self._undo.pop()()

    def per_step(self, steps: int) -> dict[str, dict[str, float]]:
        """Calls, microseconds of CPU and of wall time a step, by part."""
        return {
            part: {
                "calls": count / steps,
                "cpu_us": cpu / 1e3 / steps,
                "wall_us": wall / 1e3 / steps,
            }
            for part, (count, cpu, wall) in self.totals.items()
        }
