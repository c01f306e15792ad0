"""Jobs on hosts between which the network fails: dead hosts, pulled cables, one-way drops, halves,
losses, names and ports that are wrong. What each cell gives is written in docs/design/nodes.md.

Three nodes and a spare, each on a host of its own, and the coordinator on another (netlab.py). Each
rank writes on its own host what every step returned (scripts/witness.py), so all sides of a cut can
be heard afterwards: no step was committed on a side that the others know nothing of, and every
value is that of a run in which nothing failed."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import SCRIPTS, run_script
from tests.integration.netlab import NET, Lab, Rules, apart
from tests.integration.test_agent import ROOT, read_lines

from everstep.agent import processes
from everstep.wire.secret import make_secret

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.apt("ip", "unshare"),
    pytest.mark.timeout(240),  # half a minute each, where nothing else runs
]
HEAD = "head"
OTHERS = ("ada", "bob", "cyd", "dan")
NODES = 3
PORT = 29400
STEPS = 150
PATIENCE_S = 60.0
Values = dict[tuple[int, int], str]  # by rank and step
PACE_S = 0.15
SETTINGS: dict[str, object] = {
    "lease_s": 1.0,
    "build_timeout_s": 1,
    "collective_timeout_s": 2,
    "spare_wait_s": 40,
    "coordinator_timeout_s": 40,
    "grace_s": 1,
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Values:
    """What each rank's steps return where nothing fails."""
    return values_of_a_clean_run(tmp_path_factory.mktemp("clean"), ranks_per_node=1)


def values_of_a_clean_run(folder: Path, *, ranks_per_node: int) -> Values:
    """A run of all ranks on one node, without a network."""
    args = ("--steps", str(STEPS), "--shards", str(ranks_per_node))
    ranks = NODES * ranks_per_node
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WITNESS", str(folder))
        result = run_script(folder / "runs", *args, script=SCRIPTS / "witness.py", nproc=ranks)
    assert (result.exit_code, result.of("incident_opened")) == (0, []), result.text
    values: Values = {}
    for path in folder.glob("*.*[0-9]"):
        values |= told_in(path)[1]
    assert len(values) == ranks * STEPS
    return values


def told_in(path: Path) -> tuple[int, Values]:
    """What an incarnation wrote down: its number, and the values."""
    rank, incarnation = map(int, path.name.split("."))
    values: Values = {}
    for line in path.read_text().splitlines():
        step, _, value = line.partition(" ")
        values[rank, int(step)] = value
    return incarnation, values


class Job:
    """One job in the laboratory."""

    def __init__(self, lab: Lab, ranks_per_node: int = 1) -> None:
        self.lab = lab
        self.ranks_per_node = ranks_per_node
        self._secret = make_secret().reveal()
        self._hurry = lab.folder / "hurry"

    def start(
        self,
        *hosts: str,
        steps: int = STEPS,
        pace_s: float = PACE_S,
        at: str = "",
        faults: Sequence[str] = (),
        **settings: object,
    ) -> None:
        """Start the job on hosts: the coordinator on the head, a node on each other. `at`: how they
        call the head. `faults`: on purpose. `settings`: where they differ from SETTINGS."""
        given = {**SETTINGS, **settings}
        for host in hosts:
            witness, memory = (self.lab.folder / f"{kind}-{host}" for kind in ("witness", "shm"))
            for folder in (witness, memory):
                folder.mkdir(exist_ok=True)
            what = "coordinator" if host == HEAD else "run"
            command = [sys.executable, "-m", "everstep.cli", what, "--nnodes", str(NODES)]
            command += ["--coordinator", f"{at or self.lab.address(HEAD)}:{PORT}"]
            command += ["--run-id", "job", "--log-dir", str(self.lab.folder / f"runs-{host}")]
            command += ["--nproc-per-node", str(self.ranks_per_node)]
            command += [part for fault in faults for part in ("--chaos", fault)]
            command += [str(SCRIPTS / "witness.py"), "--steps", str(steps)]
            command += ["--shards", str(self.ranks_per_node)]
            command += ["--pace", str(pace_s), "--hurry", str(self._hurry)]
            environ = {
                **os.environ,
                **{f"EVERSTEP_{name.upper()}": str(value) for name, value in given.items()},
                "PYTHONPATH": str(ROOT / "src"),
                "EVERSTEP_SECRET": self._secret,
                "WITNESS": str(witness),
                "EVERSTEP_SHM_DIR": str(memory),  # of the host alone, and lost with it
            }
            self.lab.start(host, command, environ)

    def of(self, event: str) -> list[dict[str, Any]]:
        """The records of one event in the coordinator's journal."""
        path = self.lab.folder / f"runs-{HEAD}" / "job" / "journal.jsonl"
        records = read_lines(path) if path.exists() else []
        return [record for record in records if record["event"] == event]

    def until(self, true: Callable[[], Any], what: str) -> None:
        """Look until it is true. Fails after a minute, with what the hosts said."""
        end_s = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < end_s, f"never came: {what}\n{self.story()}"
            time.sleep(0.05)

    def story(self) -> str:
        """What every host printed."""
        logs = (self.lab.log(host) for host in self.lab.hosts)
        return "\n".join(
            f"== {log.stem}\n{log.read_text()[-3000:]}" for log in logs if log.exists()
        )

    def wait(self, host: str) -> int:
        """The exit code of a host's command."""
        try:
            return self.lab.processes[host].wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{host} does not end\n{self.story()}", pytrace=False)

    def hurry(self) -> None:
        """Steps take no longer than they must, from now on."""
        self._hurry.touch()

    # ------------------------------------------------------------ who is where

    def host_of(self, node: int) -> str:
        (address,) = (r["address"] for r in self.of("node_registered") if r["node"] == node)
        return next(host for host in self.lab.hosts if self.lab.address(host) == address)

    def trains(self, nodes: int = NODES + 1) -> None:
        """Wait until some steps are done and `nodes` nodes are there."""
        self.until(lambda: len(self.living()) == nodes, f"{nodes} nodes")
        self.until(lambda: len(self.of("step")) > 3, "steps")

    def living(self) -> set[int]:
        """The nodes that have joined and are not lost."""
        lost = {record["node"] for record in self.of("node_lost")}
        return {record["node"] for record in self.of("node_joined")} - lost

    def places(self) -> tuple[list[str], list[str]]:
        """The hosts of the slots, in order, and those of the spares."""
        holders = dict(enumerate(self.of("gathered")[0]["nodes"]))
        for record in self.of("node_replaced"):
            holders[record["slot"]] = record["node"]
        slots = [self.host_of(node) for node in holders.values()]
        spares = [self.host_of(node) for node in self.living() - set(holders.values())]
        return slots, spares

    def workers_on(self, host: str) -> list[int]:
        """Process ids of the workers that were started on a host."""
        nodes = {r["node"] for r in self.of("node_registered") if self.host_of(r["node"]) == host}
        born = {(r["rank"], r["incarnation"]) for r in self.of("spawned") if r["node"] in nodes}
        return [r["pid"] for r in self.of("started") if (r["rank"], r["incarnation"]) in born]

    def reached(self) -> int:
        """The newest step that somebody has committed, by the hosts' own word."""
        told = (told_in(path)[1] for path in self.lab.folder.glob("witness-*/*"))
        return max((step for values in told for _, step in values), default=0)

    # ------------------------------------------------------------ what came out

    def assert_one_history(self, clean: Values, steps: int = STEPS) -> None:
        """All that any process on any host has committed is of the one clean run, and no process
        that was replaced went beyond where its successor began."""
        ranks = range(NODES * self.ranks_per_node)
        by_rank: dict[int, list[tuple[int, Values]]] = {rank: [] for rank in ranks}
        for path in self.lab.folder.glob("witness-*/*"):
            incarnation, values = told_in(path)
            for key, value in values.items():
                assert clean[key] == value, f"rank {key[0]}, step {key[1]} in {path}"
            if values:
                by_rank[next(iter(values))[0]].append((incarnation, values))
        for rank, tenures in by_rank.items():
            tenures.sort(key=lambda tenure: tenure[0])
            for (_, before), (_, after) in itertools.pairwise(tenures):
                last, first = max(step for _, step in before), min(step for _, step in after)
                assert last <= first <= last + 1, f"rank {rank} committed {last}, then {first}"
            reached = {step for _, values in tenures for _, step in values}
            assert reached == set(range(1, steps + 1)), f"rank {rank}"

    def incidents(self) -> list[tuple[str, int]]:
        return [(r["rung"], r["steps_lost"]) for r in self.of("incident_closed")]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Lab(tmp_path, (HEAD, *OTHERS)) as lab:
        yield Job(lab)


# -------------------------------------------------------------------- cuts under a running job

Cut = Callable[[Lab, list[str], list[str]], Rules]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the matrix. `cut(lab, slots, spares)`: does what happens, and returns the rules
    from then on. `lost`: how many nodes that hold slots are replaced; 0: the job goes on with all.
    `waits`: there is nobody for that before the network is well again. `for_s`: how long it lasts
    at least; else until the job goes on, or waits. `heals`: the network is well again afterwards.
    `rung`: of the incident, "": there is none."""

    cut: Cut
    lost: int = 1
    waits: bool = False
    for_s: float = 0.0
    heals: bool = True
    rung: str = "replace"


def power_cut(lab: Lab, slots: list[str], spares: list[str]) -> Rules:
    """Nothing of its end reaches anybody."""
    lab.rules(rules := no_cable(lab, slots, spares))
    lab.power_off(slots[-1])
    return rules


def no_cable(lab: Lab, slots: list[str], spares: list[str]) -> Rules:
    return Rules(unplugged=lab.numbers(slots[-1]))


def deaf(lab: Lab, slots: list[str], spares: list[str]) -> Rules:
    """A host hears nothing of the coordinator, which hears it."""
    return Rules(dropped=[(lab.number(HEAD), lab.number(slots[-1]))])


def mute(lab: Lab, slots: list[str], spares: list[str]) -> Rules:
    """The coordinator hears nothing of a host, which hears it."""
    return Rules(dropped=[(lab.number(slots[-1]), lab.number(HEAD))])


def pair(lab: Lab, slots: list[str], spares: list[str]) -> Rules:
    """Two nodes do not reach each other; all else is well."""
    one, other = lab.numbers(*slots[-2:])
    return Rules(dropped=[(one, other), (other, one)])


def half_pair(lab: Lab, slots: list[str], spares: list[str]) -> Rules:
    """A node does not hear another; all else is well."""
    one, other = lab.numbers(*slots[-2:])
    return Rules(dropped=[(one, other)])


def majority_with_head(lab: Lab, slots: list[str], spares: list[str]) -> Rules:
    return apart(lab.numbers(HEAD, slots[0], *spares), lab.numbers(*slots[1:]))


def minority_with_head(lab: Lab, slots: list[str], spares: list[str]) -> Rules:
    return apart(lab.numbers(HEAD, slots[0]), lab.numbers(*slots[1:], *spares))


def half_without_the_spare(lab: Lab, slots: list[str], spares: list[str]) -> Rules:
    return apart(lab.numbers(HEAD, *slots[:2]), lab.numbers(slots[2], *spares))


TOURS = {
    "one-host": {
        "mute": Cell(cut=mute),
        "deaf": Cell(cut=deaf),
        "no cable": Cell(cut=no_cable),
        "power cut": Cell(cut=power_cut, heals=False),
    },
    "between-two": {
        "a moment": Cell(cut=pair, lost=0, for_s=0.7, rung=""),
        "a while": Cell(cut=pair, lost=0, for_s=4.0, rung="retry"),
        "a while, one way": Cell(cut=half_pair, lost=0, for_s=4.0, rung="retry"),
    },
    "sides": {
        "majority with head": Cell(cut=majority_with_head, lost=2, waits=True),
        "minority with head": Cell(cut=minority_with_head, lost=2, waits=True),
        "halves": Cell(cut=half_without_the_spare, waits=True),
    },
}


@pytest.mark.parametrize("tour", TOURS)
def test_cuts(job: Job, clean: Values, tour: str) -> None:
    """The cells of a tour fall on one job, one after the other: after each it has all its nodes."""
    job.start(HEAD, *OTHERS)
    job.trains()
    for name, cell in TOURS[tour].items():
        fall(job, name, cell)
    job.hurry()
    assert job.wait(HEAD) == 0, job.story()
    job.assert_one_history(clean)


def test_hsdp_and_a_power_cut(tmp_path: Path) -> None:
    """Each host has all shards, half a model on each of its two ranks."""
    clean = values_of_a_clean_run(tmp_path / "clean", ranks_per_node=2)
    with Lab(tmp_path, (HEAD, *OTHERS)) as lab:
        job = Job(lab, ranks_per_node=2)
        job.start(HEAD, *OTHERS)
        job.trains()
        fall(job, "power cut", Cell(cut=power_cut, heals=False))
        job.hurry()
        assert job.wait(HEAD) == 0, job.story()
        job.assert_one_history(clean)


def fall(job: Job, name: str, cell: Cell) -> None:
    """One cell, on a job that is well."""
    slots, spares = job.places()
    before = {host: job.workers_on(host) for host in slots}
    closed, lost = job.incidents(), len(job.of("node_lost"))
    awaited, steps = len(job.of("node_awaited")), len(job.of("step"))
    job.lab.rules(cell.cut(job.lab, slots, spares))
    if cell.for_s:
        time.sleep(cell.for_s)  # how long the fault lasts, not what is waited for
        job.lab.rules()
    if cell.waits:
        job.until(lambda: len(job.of("node_awaited")) > awaited, f"{name}: the wait for a node")
        job.lab.rules()
    expected = closed + ([(cell.rung, 0)] if cell.rung else [])
    job.until(lambda: len(job.incidents()) == len(expected), f"{name}: the incident's end")
    job.until(lambda: len(job.of("step")) > steps + 2, f"{name}: steps")
    assert job.incidents() == expected, name
    gone = {job.host_of(record["node"]) for record in job.of("node_lost")[lost:]}
    assert len(gone.intersection(slots)) == cell.lost, name
    if cell.heals:
        job.lab.rules()
        job.until(lambda: len(job.living()) == NODES + 1, f"{name}: all nodes")
        pids = [pid for host in gone for pid in before.get(host, ())]
        assert not any(processes.is_there(pid) for pid in pids), name


def test_two_that_do_not_reach_each_other_any_more(job: Job, clean: Values) -> None:
    """The coordinator hears both. A spare takes the place of one, and the pair is named."""
    job.start(HEAD, *OTHERS)
    job.trains()
    slots, spares = job.places()
    job.lab.rules(pair(job.lab, slots, spares))
    job.until(job.incidents, "the incident's end")
    assert job.incidents() == [("replace", 0)]
    (lost,) = job.of("node_lost")
    assert job.host_of(lost["node"]) in slots[-2:]
    one, other = slots[-2:]  # by number, as the slots were dealt
    between = rf"node \d+ \(host {one}\) and node \d+ \(host {other}\)"
    way = rf"\({NET}\.\d+ -> {NET}\.\d+:\d+: no connection \([^)]+\)\)"
    assert re.search(rf"{between} do not reach each other {way}", lost["text"]), lost["text"]
    job.hurry()
    assert job.wait(HEAD) == 0, job.story()
    job.assert_one_history(clean)


def test_two_that_do_not_reach_each_other_and_no_spare(job: Job, clean: Values) -> None:
    """Nobody is given up: they are waited for, and go on as they are."""
    job.start(HEAD, *OTHERS[:NODES])
    job.trains(NODES)
    slots, spares = job.places()
    job.lab.rules(pair(job.lab, slots, spares))
    job.until(lambda: job.of("node_awaited"), "the wait")
    job.lab.rules()
    job.until(job.incidents, "the incident's end")
    job.hurry()
    assert job.wait(HEAD) == 0, job.story()
    assert (job.incidents(), job.of("node_lost")) == ([("retry", 0)], [])
    job.assert_one_history(clean)


# -------------------------------------------------------------------- the coordinator's host


def test_the_head_is_cut_off(job: Job, clean: Values) -> None:
    """Steps go on without it, and nobody has to be replaced."""
    job.start(HEAD, *OTHERS)
    job.trains()
    job.lab.rules(apart(job.lab.numbers(HEAD), job.lab.numbers(*OTHERS)))
    time.sleep(2.5)  # for how long it is cut off: more than two leases
    reached = job.reached()
    job.until(lambda: job.reached() > reached + 3, "steps without a coordinator")
    job.lab.rules()
    job.until(lambda: len(job.of("step")) > job.reached() - 3, "a coordinator that has caught up")
    job.hurry()
    assert job.wait(HEAD) == 0, job.story()
    assert (job.of("incident_opened"), job.of("node_lost")) == ([], [])
    job.assert_one_history(clean)


def test_the_head_loses_its_power(job: Job, clean: Values) -> None:
    """It is started again by hand, with the same command."""
    job.start(HEAD, *OTHERS)
    job.trains()
    job.lab.rules(Rules(unplugged=job.lab.numbers(HEAD)))
    job.lab.power_off(HEAD)
    job.wait(HEAD)
    reached = job.reached()
    job.until(lambda: job.reached() > reached + 3, "steps without a coordinator")
    job.lab.rules()
    job.start(HEAD)
    job.until(lambda: job.of("coordinator_resumed"), "a coordinator")
    job.hurry()
    assert job.wait(HEAD) == 0, job.story()
    assert (job.of("incident_opened"), job.of("node_lost")) == ([], [])
    job.assert_one_history(clean)


# -------------------------------------------------------------------- a network that is never well


def test_a_poor_line_is_only_slow(job: Job, clean: Values) -> None:
    """One packet of twenty is lost, and each takes 50 ms."""
    job.lab.rules(Rules(loss=0.05, delay_s=0.05, seed=7))
    job.start(HEAD, *OTHERS, steps=12, pace_s=0, lease_s=2.0)
    assert job.wait(HEAD) == 0, job.story()
    assert job.of("incident_opened") == []
    job.assert_one_history(clean, steps=12)


def test_names_that_come_late_and_are_wrong(job: Job, clean: Values) -> None:
    """Nobody knows the head at first, and some hosts are wrong about themselves: their own name
    leads to the host itself, as Debian has it, to nowhere, or to another."""
    wrong = {"ada": "127.0.1.1", "bob": f"{NET}.99", "cyd": job.lab.address("dan")}
    for host, address in wrong.items():
        job.lab.know(host, {host: address})
    job.start(*OTHERS, steps=12, pace_s=0, at=HEAD)
    job.start(HEAD, steps=12, pace_s=0, at=HEAD)
    job.until(lambda: job.of("listening"), "a coordinator")
    assert not job.of("node_registered")
    for host in OTHERS:
        own = {host: wrong[host]} if host in wrong else {}
        job.lab.know(host, {HEAD: job.lab.address(HEAD), **own})
    assert job.wait(HEAD) == 0, job.story()
    assert job.of("incident_opened") == []
    for record in job.of("node_registered"):
        assert record["address"] == job.lab.address(record["host"])
    job.assert_one_history(clean, steps=12)


def test_a_name_that_leads_to_the_host_itself_is_refused(job: Job) -> None:
    """The coordinator would listen where nobody can come, and wait for all."""
    job.lab.know(HEAD, {HEAD: "127.0.1.1"})
    job.start(HEAD, at=HEAD)
    assert job.wait(HEAD) == 2, job.story()
    assert "127.0.1.1" in job.lab.log(HEAD).read_text()


def test_a_closed_way_to_the_coordinator(job: Job, clean: Values) -> None:
    """The host is not part of the job, and says why."""
    job.lab.rules(Rules(closed=[(job.lab.number("bob"), job.lab.number(HEAD), PORT, PORT)]))
    job.start("bob", steps=12, pace_s=0, join_nodes_timeout_s=7)
    job.start(HEAD, "ada", "cyd", "dan", steps=12, pace_s=0)
    assert job.wait(HEAD) == 0, job.story()
    job.assert_one_history(clean, steps=12)
    assert job.wait("bob") == 1
    assert "no answer within 5 s" in job.lab.log("bob").read_text()


@pytest.mark.parametrize("first_port", [29_000, 30_000], ids=["agents", "workers"])
def test_ways_between_nodes_that_are_closed(job: Job, first_port: int) -> None:
    """Found before the first worker is started, with both ends' names."""
    one, other = job.lab.numbers("ada", "bob")
    closed = [(one, other, first_port, 65_535), (other, one, first_port, 65_535)]
    job.lab.rules(Rules(closed=closed))
    job.start(HEAD, "ada", "bob", "cyd", steps=12, pace_s=0, ports="29400-29499")
    assert job.wait(HEAD) == 2, job.story()
    said = job.lab.log(HEAD).read_text()
    assert re.search(r"\(host ada, [\d.]+\) can't reach node \d+ \(host bob\) at [\d.]+:\d+", said)
