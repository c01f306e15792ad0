"""Many simulated schedules, or one of them with all that happened in it.

    python -m tests.simulation.soak                      100,000 schedules, on all processors
    python -m tests.simulation.soak --schedules 5000 --first 200000
    python -m tests.simulation.soak --seed 1234          one, told event by event

Ends with code 1 when a schedule broke an invariant; its seed, and how to run it again, are printed
at once. The same seed gives the same run on every machine. It takes no lock and writes no file.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from tests.simulation.coverage import Coverage

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.ladder import Policy
from everstep.core.simschedule import draw_schedule
from everstep.core.simulate import Simulation, simulate

_PIECE = 500
_SHOWN_FAILURES = 5
_WIDTH = 240

Piece = tuple[Coverage, int, list[tuple[int, str]]]  # events, and what failed by seed


class Told(Simulation):
    """A simulation that prints what the coordinator is told and what it asks for."""

    def _tell(self, event: ev.Event) -> None:
        if self._end is None:
            phase = f"[{self.phase}]"
            print(f"{self.now_s:10.4f} s {self._events:>6} {phase:<13} {event}"[:_WIDTH])
        super()._tell(event)

    def _carry_out(self, action: do.Action) -> None:
        print(f"{'':>35}-> {action}"[:_WIDTH])
        super()._carry_out(action)


def run_piece(seeds: range) -> Piece:
    """Run the schedules of `seeds`."""
    coverage, events, failures = Coverage(), 0, []
    for seed in seeds:
        try:
            outcome = simulate(draw_schedule(seed))
        except Exception as error:  # noqa: BLE001  whatever it is, the seed must be known
            failures.append((seed, f"{type(error).__name__}: {error}"))
        else:
            coverage.add(outcome)
            events += outcome.events
    return coverage, events, failures


def run_many(first: int, schedules: int, processes: int) -> int:
    """Run them, showing how far it is. Returns the number that failed."""
    last = first + schedules
    pieces = [range(at, min(at + _PIECE, last)) for at in range(first, last, _PIECE)]
    coverage, events, failed, began_s = Coverage(), 0, 0, time.monotonic()
    for found, more, failures in _in_turn(pieces, processes):
        coverage.merge(found)
        events += more
        for seed, text in failures:
            failed += 1
            if failed <= _SHOWN_FAILURES:
                print(f"\nseed {seed} failed: {text}", flush=True)
                print(f"  again: {_again(seed)}", flush=True)
        spent_s = time.monotonic() - began_s
        done = coverage.schedules + failed
        print(
            f"{done:,} of {schedules:,} schedules, {events:,} events, {failed} failed, "
            f"{spent_s:.0f} s, about {spent_s / done * (schedules - done):.0f} s to go",
            end="\r" if sys.stdout.isatty() else "\n",
            flush=True,
        )
    print(f"\n{coverage.table()}")
    spent_s = time.monotonic() - began_s
    print(f"\n{schedules:,} schedules, {events:,} events, {failed} failed, {spent_s:.0f} s")
    return failed


def _in_turn(pieces: Sequence[range], processes: int) -> Iterator[Piece]:
    if processes == 1:
        yield from map(run_piece, pieces)
        return
    with ProcessPoolExecutor(processes) as pool:
        left = iter(pieces)
        waiting = [pool.submit(run_piece, piece) for piece in islice(left, 2 * processes)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(run_piece, piece) for piece in islice(left, 1)]


def _again(seed: int) -> str:
    return f"{os.path.relpath(sys.executable)} -m tests.simulation.soak --seed {seed}"


def run_one(seed: int) -> int:
    """Run one schedule and tell all of it. Returns 1 when an invariant does not hold, else 0."""
    schedule = draw_schedule(seed)
    print(schedule)
    try:
        outcome = Told(schedule, Policy(unlimited=True)).run()
    except AssertionError as error:
        print(f"\nfailed: {error}")
        return 1
    print(f"\nended: {outcome.end}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one only, and tell all of it")
    processors = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=processors, help="how many at a time")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return run_one(options.seed)
    if options.schedules < 1 or options.processes < 1:
        parser.error("at least one schedule and one process")
    return 1 if run_many(options.first, options.schedules, options.processes) else 0


if __name__ == "__main__":
    sys.exit(main())
