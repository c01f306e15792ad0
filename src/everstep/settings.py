"""Every setting of a run: its unit, its default and why, and where its value came from.

A value is taken from the first place that gives one: an argument on the command line, the
environment (`EVERSTEP_<NAME>`), the `[run]` table of `everstep.toml`, the default. This is the only
module that is handed the environment. Every value is checked here, and a refusal says which of the
places it came from.

It does not know whether the script exists or a port is free; `launch/preflight.py` asks the
machine."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import itertools
import re
import secrets
import time
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import chaos as faults
from everstep.errors import UserError
from everstep.quantities import bytes_per_s
from everstep.spelling import nearest
from everstep.wire.messages import ChaosSpec, ScriptSpec
from everstep.wire.ports import ports_of, without
from everstep.wire.secret import Secret

DEFAULT_FILE = "everstep.toml"
ENVIRONMENT_PREFIX = "EVERSTEP_"
RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
COLORS = ("auto", "always", "never")
COPIES = ("off", "sync", "async")
DEVICES = ("auto", "cpu", "cuda")
OF_AGENTS = (
    "coordinator",
    "coordinator_lease",
    "run_id",
    "lease_s",
    "domain",
    "interface",
    "ports",
    "recovery_bandwidth",
    "memory_share",
    "log_dir",
    "shm_dir",
    "grace_s",
    "join_nodes_timeout_s",
    "coordinator_timeout_s",
    "rejoin_timeout_s",
    "quiet",
)
"""The settings that an agent has of its own; all others are the job's."""
_SECRETS = ("EVERSTEP_SECRET", "EVERSTEP_SECRET_FILE")
_NO_SETTINGS = (
    "EVERSTEP_INCARNATION",
    "EVERSTEP_JOB",
    "EVERSTEP_NODE",
    "EVERSTEP_TIER_SOCKET",
    *_SECRETS,
)
_SURE = 0.75  # how alike a variable must be to a setting's to have been meant for it


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All settings of one job. Made by `resolve`."""

    script: ScriptSpec = ScriptSpec(target="", module=False, args=())
    """What every rank runs. From the command line only: it names the job, it does not tune it."""

    nproc_per_node: int = 1
    """Workers on this machine, one rank each. 1, as torchrun has it."""

    local_nodes: int = 0
    """Nodes to start on this machine, each an agent process with nproc_per_node ranks and its own
    memory. 0: this process is the only node, which costs least."""

    nnodes: int = 1
    """Nodes that the job needs, on hosts of their own that meet at the coordinator. 1, as torchrun
    has it."""

    coordinator: str = ""
    """HOST:PORT at which the nodes of a job on several hosts meet; the host that has the address
    coordinates. Empty: this machine alone."""

    coordinator_lease: str = ""
    """What decides which process coordinates, and says where it is: etcd://HOST:2379. Empty: a lock
    in the run's directory, and the address that the agents are given; enough where the coordinator
    comes back in place."""

    domain: str = ""
    """What fails together with this host, like rack=r1; state is not kept twice in one such domain.
    Empty: the host alone."""

    interface: str = ""
    """Network interface at which this host's workers listen. Empty: that which leads to the
    coordinator."""

    ports: str = ""
    """FIRST-LAST, like 29400-29499: TCP ports at which everstep listens on this host, two for each
    agent. Empty: any that are free, since most clusters are open inside."""

    recovery_bandwidth: str = "0"
    """Bytes a second, like 2GiB/s or 10Gbit/s, that all copies together which leave a node may
    take, and likewise those which come to it, in a step as in a recovery; 0: no limit. None, since
    steps wait for their copies."""

    memory_share: float = 0.5
    """The part of a host's memory (of its control group's, where that has a limit) that checkpoints
    kept in it may take. Half: the training needs the rest."""

    transfer_timeout_s: float = 600.0
    """Seconds in which a copy must reach another node. To be raised where recovery_bandwidth is
    small beside a node's share of the state."""

    transfer_stall_s: float = 15.0
    """Seconds in which not a byte of a copy moves, after which its connection is given up for
    another. Above what retransmissions take on a network that loses packets."""

    preflight_timeout_s: float = 5.0
    """Seconds in which the nodes must reach one another before the first worker starts; 0: it is
    not tried. Two lost packets' retries in TCP."""

    spares: int = 0
    """Nodes beyond those that the job needs, each with a warm process, to take a lost one's place.
    0: they are idle, and only you know what that may cost."""

    run_id: str = ""
    """Name of the run and of its directory, up to 64 of A-Z a-z 0-9 . _ -. Made from the date when
    not given."""

    log_dir: str = "everstep-runs"
    """Directory in which each run gets its own. Under the current one, so that it is found again
    without a search."""

    max_restarts: int = 100
    """Incidents after which the job ends. High, because a recovery costs a second and an idle
    machine costs hours."""

    master_port: int = 0
    """TCP port given to the script as MASTER_PORT. 0 takes a free one, so that two jobs do not meet
    on one port."""

    chaos: tuple[ChaosSpec, ...] = ()
    """Faults on purpose. None, of course. In the environment they are separated by semicolons."""

    record: bool = False
    """Write what each step returned and consumed to trace.jsonl. Off: only `everstep prove`
    compares it."""

    lift_budgets: bool = False
    """Let no budget of incidents end the job; only 20 failed attempts in a row without a fault on
    purpose still do. Off: a job that only fails should end. `everstep prove` sets it."""

    own_series: bool = False
    """Keep checkpoints under the run's own name, so that it begins at no other run's. Off: the same
    script goes on where it was. `everstep prove` sets it."""

    shm_dir: str = "/dev/shm"
    """Directory in memory for the files in which workers show where they stand. Where Linux has its
    tmpfs."""

    max_nproc: int = 64
    """Most workers on one machine. A guard against a slip of the finger, not a limit of
    everstep."""

    grace_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL when a person ends the job. What a script needs to close
    its log."""

    setup_timeout_s: float = 600.0
    """Seconds until every rank must have called `protect`. Long: a first start may have to read a
    large model."""

    park_timeout_s: float = 300.0
    """Seconds a worker has to come to its boundary after a stop. Long: it may be deep in a forward
    pass."""

    join_timeout_s: float = 300.0
    """Seconds a replacement has from its start until it is set up, and again for its rehearsal,
    once its peers have parked. As long as their park."""

    regroup_timeout_s: float = 60.0
    """Seconds to rebuild all communicators and move the state. Far above the second it takes."""

    collective_timeout_s: float = 600.0
    """Seconds one collective may take before it counts as broken. torch's own default for gloo is
    half an hour."""

    build_timeout_s: float = 10.0
    """Seconds one attempt to build a communicator may take, from when all its ranks have come to
    where the script makes it. Short: they are known to be alive and waiting."""

    quiesce_timeout_s: float = 5.0
    """Seconds an aborted communicator's work may take to let go of its tensors. Short: its sockets
    are shut by then."""

    copies: str = "off"
    """`sync`: a rank whose shard no other rank holds (on several nodes: none on another node)
    copies it into shared memory in each step, and the step commits when it is kept, on another node
    as well; `async`: it is on its way there while the next step runs, so that a lost node may cost
    a step; `off`: such a shard is lost with its rank. Off, since it costs a copy of the shard in
    time and two or three in memory."""

    replicate_every: int = 1
    """With copies = async: every how many steps a copy is made. 1: a lost node costs a step at
    most; more where copies take longer than a step."""

    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: CUDA where torch has nccl and sees a device for each worker of the
    machine, as `run.device` then says. A script that puts nothing there loses nothing by it."""

    watch: bool = True
    """Look for workers that are stopped or hang. Off for work with a debugger or profiler that
    holds a worker without showing it; one that shows suspends the watch by itself."""

    stopped_timeout_s: float = 1.5
    """Seconds a worker may be stopped by a signal (SIGSTOP) before it is replaced. Short: a stopped
    process is certain, and its peers wait."""

    hang_timeout_s: float = 60.0
    """Seconds a worker in a step may stand still while others wait for it; five times the longest
    pause of late, where that is more. Above a pause for the garbage collector or for data."""

    first_step_timeout_s: float = 1800.0
    """Seconds as hang_timeout_s has them, in the first two steps and while torch compiles.
    Compilation and warm-up of large models take many minutes."""

    section_timeout_s: float = 600.0
    """Seconds as hang_timeout_s has them, between steps and in sections, where a save or an
    evaluation may stand. As long as a collective may take: its peers wait in one meanwhile."""

    join_nodes_timeout_s: float = 600.0
    """Seconds until as many nodes have joined as the job needs. Long: a scheduler may start them
    one after another."""

    spare_wait_s: float = 300.0
    """Seconds the ranks stay parked for a node to come, where one was lost and no spare is there,
    or no other copy of its state; 0: not at all. A machine that reboots is back in five minutes."""

    max_node_failures: int = 3
    """Lost nodes of one host within incident_window_s after which its nodes are taken only if there
    are no others. Twice may be bad luck."""

    coordinator_timeout_s: float = 300.0
    """Seconds that an agent keeps its workers without a coordinator. Their steps go on meanwhile,
    but no recovery does. A machine that reboots is back in five minutes."""

    rejoin_timeout_s: float = 30.0
    """Seconds that a coordinator which takes over a running job waits for the nodes that it had;
    those that have not come are lost then. Long enough for all that they keep to be told over a
    slow network: only a recovery has to wait for it."""

    lease_s: float = 2.0
    """Seconds without a sign of life after which an agent counts as lost. Short, since training
    stands still meanwhile; a closed connection is noticed at once."""

    max_per_cause: int = 20
    """Incidents of one kind of cause within incident_window_s after which the job ends. What fails
    every three minutes for an hour will not pass by itself."""

    incident_window_s: float = 3600.0
    """Seconds over which incidents of one kind are counted. Long enough to tell a fault that stays
    from a bad hour."""

    backoff_s: float = 0.5
    """Seconds before a rank that failed twice within a minute is started again, doubled each time
    more; the first start is at once. About what a start costs."""

    max_backoff_s: float = 30.0
    """Most seconds before a rank is started again. Its peers wait meanwhile."""

    quiet: bool = False
    """Show neither the workers' output nor the live line; incidents and the summary stay. The logs
    have it all."""

    color: str = "auto"
    """`always`, `never`, or `auto`: color on a terminal, unless NO_COLOR is set. Others read what
    we print."""

    @property
    def listening_ports(self) -> Sequence[int]:
        """Ports at which agents listen: those of `ports`, without the coordinator's."""
        ports = ports_of(self.ports)
        return without(ports, endpoint(self.coordinator)[1]) if self.coordinator else ports

    @property
    def preflight_s(self) -> float:
        """Seconds for the preflight; 0 where all nodes are on this machine."""
        return 0.0 if self.local_nodes else self.preflight_timeout_s

    @property
    def recovery_bytes_per_s(self) -> float | None:
        """The limit of `recovery_bandwidth`; None where there is none."""
        return bytes_per_s(self.recovery_bandwidth) or None

    @property
    def slots(self) -> int:
        """Nodes that the job needs."""
        return self.local_nodes or self.nnodes

    @property
    def on_nodes(self) -> bool:
        """The nodes are processes of their own, here or elsewhere."""
        return bool(self.local_nodes or self.coordinator)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nproc_per_node * self.slots


_NAMES = tuple(field.name for field in dataclasses.fields(RunSettings) if field.name != "script")


class SourceKind(enum.StrEnum):
    """Where a value can come from; the first that gives one wins."""

    ARGUMENT = "argument"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a setting's value came from. `where`: the option, the variable, or the file and key;
    may be empty."""

    kind: SourceKind
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """What a value must satisfy beyond its type, and the words for it."""

    passes: Callable[[Any], bool]
    must: str


_POSITIVE = _Check(passes=lambda value: 0 < value < float("inf"), must="must be above 0 (seconds)")
_NOT_NEGATIVE = _Check(passes=lambda value: value >= 0, must="must not be negative")
_NOT_EMPTY = _Check(passes=bool, must="must not be empty")
_CHECKS: dict[str, _Check] = {
    "run_id": _Check(
        passes=lambda value: RUN_ID.fullmatch(value) is not None and value not in (".", ".."),
        must="must be 1 to 64 letters, digits, dots, underscores or dashes",
    ),
    "nproc_per_node": _Check(passes=lambda value: value >= 1, must="must be at least 1"),
    "max_nproc": _Check(passes=lambda value: value >= 1, must="must be at least 1"),
    "local_nodes": _NOT_NEGATIVE,
    "nnodes": _Check(passes=lambda value: value >= 1, must="must be at least 1"),
    "coordinator": _Check(
        passes=lambda value: not value or _is_endpoint(value), must="must be HOST:PORT"
    ),
    "ports": _Check(
        passes=lambda value: _is_made_by(ports_of, value),
        must="must be FIRST-LAST, like 29400-29499",
    ),
    "recovery_bandwidth": _Check(
        passes=lambda value: _is_made_by(bytes_per_s, value),
        must="must be a rate like 2GiB/s, 800MB/s or 10Gbit/s, or 0 for no limit",
    ),
    "memory_share": _Check(passes=lambda value: 0 < value <= 1, must="must be above 0, at most 1"),
    "preflight_timeout_s": _Check(
        passes=lambda value: 0 <= value < float("inf"), must="must be 0 or more (seconds)"
    ),
    "spares": _NOT_NEGATIVE,
    "spare_wait_s": _Check(
        passes=lambda value: 0 <= value < float("inf"), must="must be 0 or more (seconds)"
    ),
    "replicate_every": _Check(passes=lambda value: value >= 1, must="must be at least 1"),
    "max_node_failures": _Check(passes=lambda value: value >= 1, must="must be at least 1"),
    "max_restarts": _NOT_NEGATIVE,
    "max_per_cause": _NOT_NEGATIVE,
    "master_port": _Check(
        passes=lambda value: 0 <= value <= 65535, must="must be 0 (a free one) to 65535"
    ),
    "log_dir": _NOT_EMPTY,
    "shm_dir": _NOT_EMPTY,
    "copies": _Check(
        passes=lambda value: value in COPIES, must=f"must be one of {', '.join(COPIES)}"
    ),
    "device": _Check(
        passes=lambda value: value in DEVICES, must=f"must be one of {', '.join(DEVICES)}"
    ),
    "color": _Check(
        passes=lambda value: value in COLORS, must=f"must be one of {', '.join(COLORS)}"
    ),
}


def resolve(
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    toml_path: Path | None = None,
    only: Collection[str] | None = None,
) -> tuple[RunSettings, dict[str, Source]]:
    """All settings, and for each where its value came from.

    `arguments`: from the command line by setting's name; None means not given; `chaos` is a
    sequence of texts, `script` a ScriptSpec. `environ`: the process's environment. `toml_path`: a
    file that must exist; None takes `everstep.toml` of the current directory if there is one.
    `only`: the settings that are looked for; the others keep their defaults, and are not checked.

    Raises UserError for a value of a wrong type or out of range, with the place it came from, and
    for a key of the file that is no setting. Reads at most one file."""
    path, table = _read_file(toml_path)
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name, declared in _types().items():
        if only is not None and name not in only:
            continue
        raw, source = _first_given(name, arguments, environ, table, path)
        if raw is None:
            continue
        values[name] = raw if name == "script" else _convert(name, declared, raw, source)
        sources[name] = source
    if "color" not in values and environ.get("NO_COLOR"):
        values["color"] = "never"
        sources["color"] = Source(kind=SourceKind.ENVIRONMENT, where="NO_COLOR")
    if "run_id" not in values:
        values["run_id"] = new_run_id()
        sources["run_id"] = Source(kind=SourceKind.DEFAULT, where="(made from the date)")
    texts = values.pop("chaos", ())
    settings = RunSettings(**values)
    settings = dataclasses.replace(settings, chaos=faults_of(settings, texts))
    for name in _types():
        sources.setdefault(name, Source(kind=SourceKind.DEFAULT))
    _check_together(settings, sources)
    return settings, sources


def faults_of(settings: RunSettings, texts: Iterable[str]) -> tuple[ChaosSpec, ...]:
    """The faults that `texts` describe, in the job of `settings`. Raises UserError as
    `chaos.parse_all` does."""
    nproc_per_node = settings.nproc_per_node if settings.on_nodes else None
    hosts = bool(settings.coordinator)
    return faults.parse_all(texts, settings.world_size, nproc_per_node, hosts=hosts)


def new_run_id() -> str:
    """A name no other run on this machine has: local date and time, and four random hexadecimal
    digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def protection_is_off(environ: Mapping[str, str]) -> bool:
    """Whether `EVERSTEP=off` asks for the script to be run unprotected.

    Raises UserError on any other value than `off`, `on` and the empty one: a guess would be wrong
    for somebody."""
    value = environ.get("EVERSTEP", "")
    if value not in ("", "on", "off"):
        raise UserError(
            f"EVERSTEP={value} in the environment is not understood; EVERSTEP=off runs the script "
            "unprotected, EVERSTEP=on (or unset) protects it"
        )
    return value == "off"


def secret_of(environ: Mapping[str, str]) -> Secret:
    """The job's secret, from EVERSTEP_SECRET or the file that EVERSTEP_SECRET_FILE names. Reads at
    most one file.

    Raises UserError without one, with both, or as `Secret` does."""
    text, path = (environ.get(name, "") for name in _SECRETS)
    if bool(text) == bool(path):
        given = "are both set; keep one" if text else "are both missing: set one of them"
        raise UserError(f"the job's secret: {' and '.join(_SECRETS)} {given}")
    return Secret(text, _SECRETS[0]) if text else Secret.from_file(path)


def has_secret(environ: Mapping[str, str]) -> bool:
    """Whether the environment has a secret, or names its file."""
    return any(environ.get(name) for name in _SECRETS)


def without_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for the script's processes, which have no use for the secret."""
    return {name: value for name, value in environ.items() if name not in _SECRETS}


def endpoint(text: str) -> tuple[str, int]:
    """HOST:PORT as its parts; [ADDRESS]:PORT for IPv6. Raises UserError."""
    if not _is_endpoint(text):
        raise UserError(f"{text!r} is not HOST:PORT, with a port from 1 to 65535")
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    digits = port.isascii() and port.isdigit()
    return bool(host.strip("[]")) and digits and 0 < int(port) < 65536


def _is_made_by(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def strangers(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the environment that begin like a setting's but are none, with the variable that
    may have been meant, or nothing. Those that everstep itself sets in its workers are left out."""
    found = {}
    for key in environ:
        name = key.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name == key.lower() or key in _NO_SETTINGS or name in _NAMES:
            continue
        meant = nearest(name, _NAMES, _SURE)
        found[key] = environment_name(meant) if meant else ""
    return found


def slips(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable of the environment that is no setting, but so close to one that
    it must have been meant."""
    return [
        f"{key} in the environment is not a setting and has no effect; did you mean {meant}?"
        for key, meant in strangers(environ).items()
        if meant
    ]


def environment_name(name: str) -> str:
    """The environment variable of a setting."""
    return ENVIRONMENT_PREFIX + name.upper()


@functools.cache
def descriptions() -> dict[str, str]:
    """Every setting's docstring, by name, in the order they are declared."""
    tree = ast.parse(inspect.getsource(RunSettings))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found = {}
    for field, text in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def first_sentence(text: str) -> str:
    """A description's first sentence, in one line."""
    return re.split(r"(?<=\S\.)\s", text, maxsplit=1)[0].replace("\n", " ")


def written(value: Any) -> str:
    """A setting's value as a person would write it."""
    if isinstance(value, tuple):
        return "; ".join(spec.text for spec in value) or "(none)"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def _types() -> dict[str, Any]:
    hints = typing.get_type_hints(RunSettings)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunSettings)}


def _read_file(toml_path: Path | None) -> tuple[Path, dict[str, Any]]:
    """The file's path and its [run] table, empty where there is no file to read."""
    path = toml_path if toml_path is not None else Path(DEFAULT_FILE)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if toml_path is None:
            return path, {}
        raise UserError(f"{path}: no such file; --config must name a settings file") from error
    except OSError as error:
        raise UserError(f"{path} can not be read: {error.strerror}; make it readable") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}; correct it there") from error
    _refuse_outside(path, document)
    table = document.get("run", {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: run must be a table; write [run] on a line of its own")
    for key in table:
        if key not in _NAMES:
            meant = nearest(key, _NAMES)
            advice = f"did you mean {meant!r}?" if meant else f"known are {', '.join(_NAMES)}"
            raise UserError(f"{path}: {key!r} is not a setting; {advice}")
    return path, table


def _refuse_outside(path: Path, document: Mapping[str, Any]) -> None:
    """Refuse whatever stands outside of [run]."""
    for key, value in document.items():
        if key == "run":
            continue
        if isinstance(value, dict):
            meant = "did you mean 'run'?" if nearest(key, ["run"]) else "the only one is 'run'"
            raise UserError(f"{path}: {key!r} is not a table; {meant}")
        if key in _NAMES:
            raise UserError(
                f"{path}: {key!r} stands outside of a table; put it under [run], a line of its own"
            )
        meant = nearest(key, _NAMES)
        advice = f"did you mean {meant!r}, under [run]?" if meant else "settings stand under [run]"
        raise UserError(f"{path}: {key!r} is not a setting; {advice}")


def _first_given(
    name: str,
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    table: Mapping[str, Any],
    path: Path,
) -> tuple[Any, Source]:
    """The raw value from the first place that gives one, or None, and that place."""
    given = arguments.get(name)
    if given is not None and given != ():
        return given, Source(kind=SourceKind.ARGUMENT, where="--" + name.replace("_", "-"))
    variable = environment_name(name)
    if name != "script" and environ.get(variable):
        return environ[variable], Source(kind=SourceKind.ENVIRONMENT, where=variable)
    if name in table:
        return table[name], Source(kind=SourceKind.FILE, where=f"{path} [run] {name}")
    return None, Source(kind=SourceKind.DEFAULT)


def _convert(name: str, declared: Any, raw: Any, source: Source) -> Any:
    """`raw` as the declared type, checked. Raises UserError with the place it came from."""
    try:
        value = _from_text(declared, raw) if source.kind is SourceKind.ENVIRONMENT else raw
        value = _typed(declared, value)
    except _WrongTypeError as error:
        raise UserError(f"{name} = {raw!r} (from {source}) {error}; correct it there") from error
    except UserError as error:
        raise UserError(f"{error} (from {source})") from error
    check = _CHECKS.get(name, _POSITIVE if name.endswith("_s") else None)
    if check is not None and not check.passes(value):
        raise UserError(f"{name} = {raw!r} (from {source}) {check.must}; correct it there")
    return value


class _WrongTypeError(Exception):
    """The value is not of the setting's type; says what it must be."""


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _from_text(declared: Any, text: str) -> Any:
    """What a text of the environment stands for; the text itself where it stands for nothing."""
    if declared is bool:
        return text.lower() in _TRUE if text.lower() in _TRUE + _FALSE else text
    if declared is int:
        return int(text) if re.fullmatch(r"\s*[+-]?[0-9]+\s*", text) else text
    if declared is float:
        try:
            return float(text)
        except ValueError:
            return text
    return text if declared is str else [part for part in text.split(";") if part.strip()]


def _typed(declared: Any, value: Any) -> Any:
    """`value` as the declared type, if it is of a type that may stand for it."""
    is_bool = isinstance(value, bool)
    if declared is bool:
        if is_bool:
            return value
        raise _WrongTypeError("must be true or false")
    if declared is int:
        if isinstance(value, int) and not is_bool:
            return value
        raise _WrongTypeError("must be a whole number")
    if declared is float:
        if isinstance(value, (int, float)) and not is_bool:
            return float(value)
        raise _WrongTypeError("must be a number")
    if declared is str:
        if isinstance(value, str):
            return value
        raise _WrongTypeError("must be text")
    if isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value):
        for text in value:
            faults.check(text)
        return tuple(value)  # what they stand for depends on the number of ranks
    raise _WrongTypeError(f"must be a list of faults, each {faults.FORM}, or {faults.RANDOM_FORM}")


def _check_together(settings: RunSettings, sources: Mapping[str, Source]) -> None:
    """What one setting says about another."""
    if settings.nproc_per_node > settings.max_nproc:
        raise UserError(
            f"nproc_per_node = {settings.nproc_per_node} (from {sources['nproc_per_node']}) is "
            f"above the limit of {settings.max_nproc}; if you mean it, raise the limit with "
            f"max_nproc in {DEFAULT_FILE} or {environment_name('max_nproc')}="
            f"{settings.nproc_per_node}"
        )
    if settings.spares and not settings.on_nodes:
        raise UserError(
            f"spares = {settings.spares} (from {sources['spares']}): a spare takes the place of a "
            "lost node, and this job has none to lose; give --local-nodes too, or leave it out"
        )
    if settings.replicate_every > 1 and settings.copies != "async":
        raise UserError(
            f"replicate_every = {settings.replicate_every} (from {sources['replicate_every']}) is "
            "for copies that steps don't wait for; give --copies async too, or leave it out"
        )
    listeners = 2 * (settings.local_nodes + settings.spares) + 1
    if settings.ports and settings.local_nodes and len(settings.listening_ports) < listeners:
        raise UserError(
            f"ports = {settings.ports} (from {sources['ports']}) are "
            f"{len(settings.listening_ports)}, and the nodes on this machine need {listeners}: two "
            "each, and the coordinator's; give a wider range"
        )
    if settings.nnodes > 1 and not settings.coordinator:
        raise UserError(
            f"nnodes = {settings.nnodes} (from {sources['nnodes']}): the hosts must know where to "
            "meet; give --coordinator HOST:PORT too, the same on each, or --local-nodes for nodes "
            "on this machine"
        )
    if settings.local_nodes and settings.coordinator:
        raise UserError(
            f"local_nodes = {settings.local_nodes} (from {sources['local_nodes']}) starts all "
            f"nodes here, and coordinator = {settings.coordinator} (from "
            f"{sources['coordinator']}) waits for those of other hosts; give one of them"
        )
