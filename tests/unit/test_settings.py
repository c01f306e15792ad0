"""Settings: precedence, where each value came from, and refusals that say so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from everstep import settings as module
from everstep.errors import UserError
from everstep.settings import RunSettings, SourceKind, resolve
from everstep.wire.messages import ScriptSpec
from everstep.wire.secret import make_secret


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory without an everstep.toml."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_toml(text: str, name: str = "everstep.toml") -> Path:
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_dataclass_s() -> None:
    settings, sources = resolve({}, {})
    assert settings == dataclasses.replace(RunSettings(), run_id=settings.run_id)
    assert {source.kind for source in sources.values()} == {SourceKind.DEFAULT}
    assert set(sources) == {field.name for field in dataclasses.fields(RunSettings)}


def test_argument_beats_environment_beats_file_beats_default() -> None:
    write_toml("[run]\nnproc_per_node = 2\n")
    environ = {"EVERSTEP_NPROC_PER_NODE": "3"}
    arguments = {"nproc_per_node": 4}
    steps = [({}, {}), ({}, environ), (arguments, environ)]
    found = [resolve(*step) for step in steps]
    assert [settings.nproc_per_node for settings, _ in found] == [2, 3, 4]
    assert [str(sources["nproc_per_node"]) for _, sources in found] == [
        "file everstep.toml [run] nproc_per_node",
        "environment EVERSTEP_NPROC_PER_NODE",
        "argument --nproc-per-node",
    ]


def test_what_is_not_given_does_not_count() -> None:
    settings, sources = resolve({"log_dir": None, "chaos": ()}, {"EVERSTEP_LOG_DIR": ""})
    assert settings.log_dir == "everstep-runs"
    assert sources["log_dir"].kind is SourceKind.DEFAULT


def test_false_is_given() -> None:
    write_toml("[run]\nrecord = true\n")
    settings, sources = resolve({"record": False}, {})
    assert settings.record is False
    assert sources["record"].kind is SourceKind.ARGUMENT


def test_a_named_file_is_read_instead_of_the_one_here() -> None:
    write_toml("[run]\nmax_restarts = 1\n")
    other = write_toml("[run]\nmax_restarts = 2\n", "other.toml")
    assert resolve({}, {}, other)[0].max_restarts == 2


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_restarts", "7", 7),
        ("grace_s", "2.5", 2.5),
        ("record", "yes", True),
        ("quiet", "OFF", False),
        ("log_dir", "runs", "runs"),
    ],
)
def test_the_environment_s_text_becomes_the_setting_s_type(
    name: str, text: str, value: Any
) -> None:
    settings, _ = resolve({}, {module.environment_name(name): text})
    assert getattr(settings, name) == value
    assert type(getattr(settings, name)) is type(value)


def test_a_whole_number_in_the_file_is_a_number_of_seconds() -> None:
    write_toml("[run]\ngrace_s = 3\n")
    grace_s = resolve({}, {})[0].grace_s
    assert grace_s == 3.0
    assert isinstance(grace_s, float)


@pytest.mark.parametrize("where", ["argument", "environment", "file"])
def test_chaos_from_everywhere(where: str) -> None:
    texts = ["kill:rank=1,step=5", "raise:rank=0,step=9,at=forward"]
    arguments: dict[str, Any] = {"nproc_per_node": 2}
    environ = {}
    if where == "argument":
        arguments["chaos"] = tuple(texts)
    elif where == "environment":
        environ["EVERSTEP_CHAOS"] = "; ".join(texts)
    else:
        write_toml(f"[run]\nchaos = {texts}\n")
    settings, _ = resolve(arguments, environ)
    assert [(spec.index, spec.text) for spec in settings.chaos] == list(enumerate(texts))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("nproc_per_node", "four", "must be a whole number"),
        ("nproc_per_node", "0", "must be at least 1"),
        ("nproc_per_node", "-2", "must be at least 1"),
        ("max_restarts", "1.5", "must be a whole number"),
        ("max_restarts", "-1", "must not be negative"),
        ("master_port", "65536", "0 (a free one) to 65535"),
        ("grace_s", "soon", "must be a number"),
        ("grace_s", "0", "must be above 0"),
        ("grace_s", "nan", "must be above 0"),
        ("grace_s", "inf", "must be above 0"),
        ("record", "perhaps", "must be true or false"),
        ("color", "blue", "must be one of auto, always, never"),
        ("device", "tpu", "must be one of auto, cpu, cuda"),
        ("ports", "29499-29400", "must be FIRST-LAST"),
        ("ports", "0-10", "must be FIRST-LAST"),
        ("ports", "29400-65536", "must be FIRST-LAST"),
        ("ports", "29400,29401", "must be FIRST-LAST"),
        ("recovery_bandwidth", "fast", "must be a rate like 2GiB/s"),
        ("recovery_bandwidth", "-1", "must be a rate like 2GiB/s"),
        ("preflight_timeout_s", "-1", "must be 0 or more"),
        ("transfer_timeout_s", "0", "must be above 0"),
        ("run_id", "a/b", "1 to 64 letters"),
        ("run_id", "..", "1 to 64 letters"),
        ("run_id", "x" * 65, "1 to 64 letters"),
        ("chaos", "kill:rank=0", "step is missing"),
    ],
)
def test_a_wrong_value_is_refused_with_where_it_came_from(name: str, text: str, says: str) -> None:
    variable = module.environment_name(name)
    with pytest.raises(UserError) as caught:
        resolve({}, {variable: text})
    assert says in str(caught.value)
    assert f"(from environment {variable})" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nproc_per_node = true", "must be a whole number"),
        ("nproc_per_node = '4'", "must be a whole number"),
        ("record = 1", "must be true or false"),
        ("grace_s = false", "must be a number"),
        ("grace_s = []", "must be a number"),
        ("log_dir = 4", "must be text"),
        ("log_dir = ''", "must not be empty"),
        ("chaos = 'kill:rank=0,step=1'", "must be a list of faults"),
        ("chaos = 4", "must be a list of faults"),
        ("chaos = [4]", "must be a list of faults"),
    ],
)
def test_types_of_the_file(line: str, says: str) -> None:
    write_toml(f"[run]\n{line}\n")
    with pytest.raises(UserError) as caught:
        resolve({}, {})
    assert says in str(caught.value)
    assert "(from file everstep.toml [run] " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[run]\nnproc_per_nod = 4\n",
            "'nproc_per_nod' is not a setting; did you mean 'nproc_per_node'",
        ),
        ("[run]\nzzz = 4\n", "'zzz' is not a setting; known are"),
        ("[run]\nscript = 'train.py'\n", "'script' is not a setting"),
        ("[rum]\nx = 4\n", "'rum' is not a table; did you mean 'run'"),
        ("[zzz]\nx = 4\n", "'zzz' is not a table; the only one is 'run'"),
        ("[run]\nnproc = 4\n", "'nproc' is not a setting; did you mean 'nproc_per_node'?"),
        ("nproc_per_node = 4\n", "'nproc_per_node' stands outside of a table; put it under [run]"),
        ("nproc = 4\n", "'nproc' is not a setting; did you mean 'nproc_per_node', under [run]?"),
        ("zzz = 4\n", "'zzz' is not a setting; settings stand under [run]"),
        ("run = 4\n", "run must be a table"),
        ("[run\n", "is not TOML"),
    ],
)
def test_what_the_file_must_not_say(text: str, says: str) -> None:
    write_toml(text)
    with pytest.raises(UserError) as caught:
        resolve({}, {})
    assert says in str(caught.value)
    assert "everstep.toml" in str(caught.value)


def test_a_named_file_must_exist_and_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        resolve({}, {}, Path("missing.toml"))
    with pytest.raises(UserError, match="can not be read"):
        resolve({}, {}, tmp_path)


def test_more_workers_than_the_limit_says_how_to_raise_it() -> None:
    with pytest.raises(UserError, match="EVERSTEP_MAX_NPROC=65"):
        resolve({"nproc_per_node": 65}, {})
    assert resolve({"nproc_per_node": 65}, {"EVERSTEP_MAX_NPROC": "65"})[0].nproc_per_node == 65


def test_the_world_is_all_nodes() -> None:
    here = resolve({"nproc_per_node": 2, "local_nodes": 3, "spares": 1}, {})[0]
    assert (here.slots, here.world_size, here.on_nodes) == (3, 6, True)
    hosts = resolve({"nproc_per_node": 2, "nnodes": 4, "coordinator": "head:29400"}, {})[0]
    assert (hosts.slots, hosts.world_size, hosts.on_nodes) == (4, 8, True)
    alone = resolve({"nproc_per_node": 2}, {})[0]
    assert (alone.slots, alone.world_size, alone.on_nodes) == (1, 2, False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"spares": 1}, "give --local-nodes too"),
        ({"nnodes": 2}, "give --coordinator HOST:PORT too"),
        ({"local_nodes": 2, "coordinator": "head:1"}, "give one of them"),
        ({"coordinator": "head"}, "must be HOST:PORT"),
        ({"coordinator": "head:0"}, "must be HOST:PORT"),
        ({"local_nodes": -1}, "must not be negative"),
        ({"chaos": ("node:index=0,step=1",)}, "give it nodes with --local-nodes"),
    ],
)
def test_what_makes_no_job_of_several_nodes(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        resolve(arguments, {})


def test_agents_leave_the_coordinator_s_port_to_it() -> None:
    settings, _ = resolve({"coordinator": "node0:29402", "ports": "29400-29404"}, {})
    assert list(settings.listening_ports) == [29400, 29401, 29403, 29404]
    settings, _ = resolve({"coordinator": "node0:29400"}, {})
    assert list(settings.listening_ports) == [0]


def test_a_range_that_is_too_small_for_the_nodes_here_is_refused() -> None:
    nodes = {"local_nodes": 3, "spares": 1}
    assert resolve({**nodes, "ports": "29400-29408"}, {})[0].ports == "29400-29408"
    with pytest.raises(UserError, match="are 8, and the nodes on this machine need 9"):
        resolve({**nodes, "ports": "29400-29407"}, {})


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("0", None),
        ("1000", 1000.0),
        ("2GiB/s", 2.0 * (1 << 30)),
        ("1.5 MB/s", 1.5e6),
        ("10Gbit/s", 1.25e9),
        ("8kb", 1000.0),
    ],
)
def test_a_rate_is_bytes_a_second(text: str, rate: float | None) -> None:
    assert resolve({"recovery_bandwidth": text}, {})[0].recovery_bytes_per_s == rate


def test_an_endpoint_is_host_and_port() -> None:
    assert module.endpoint("head:29400") == ("head", 29400)
    assert module.endpoint("[fd00::1]:29400") == ("fd00::1", 29400)
    for text in ("head", ":1", "[]:1", "head:x", "head:65536"):
        with pytest.raises(UserError, match="is not HOST:PORT"):
            module.endpoint(text)


def test_a_secret_comes_from_one_place_and_workers_are_not_given_it(tmp_path: Path) -> None:
    secret = make_secret()
    file = tmp_path / "secret"
    secret.write(file)
    text, path = {"EVERSTEP_SECRET": secret.reveal()}, {"EVERSTEP_SECRET_FILE": str(file)}
    assert module.secret_of(text) == module.secret_of(path) == secret
    assert module.without_secret(text | path | {"A": "1"}) == {"A": "1"}
    assert not module.strangers(text | path)
    with pytest.raises(UserError, match="are both missing"):
        module.secret_of({})
    with pytest.raises(UserError, match="are both set"):
        module.secret_of(text | path)


def test_a_fault_on_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="ranks 0 to 1"):
        resolve({"nproc_per_node": 2, "chaos": ("kill:rank=2,step=1",)}, {})


def test_run_ids_are_valid_and_differ() -> None:
    made = {module.new_run_id() for _ in range(20)}
    assert len(made) > 1
    assert all(module.RUN_ID.fullmatch(run_id) for run_id in made)


@pytest.mark.parametrize(
    ("environ", "color"), [({"NO_COLOR": "1"}, "never"), ({"NO_COLOR": ""}, "auto")]
)
def test_no_color_is_heeded_unless_color_is_set(environ: dict[str, str], color: str) -> None:
    assert resolve({}, environ)[0].color == color
    assert resolve({"color": "always"}, environ)[0].color == "always"


@pytest.mark.parametrize(("value", "off"), [("off", True), ("on", False), ("", False)])
def test_everstep_off(value: str, off: bool) -> None:
    assert module.protection_is_off({"EVERSTEP": value}) is off


def test_a_half_understood_everstep_is_refused() -> None:
    with pytest.raises(UserError, match="EVERSTEP=off"):
        module.protection_is_off({"EVERSTEP": "0"})


def test_strangers_in_the_environment_are_named_with_the_nearest() -> None:
    environ = {
        "EVERSTEP_NPROC_PER_NOD": "4",
        "EVERSTEP_LOG_DIR": "x",
        "EVERSTEP": "on",
        "PATH": "/",
    }
    assert module.strangers(environ) == {"EVERSTEP_NPROC_PER_NOD": "EVERSTEP_NPROC_PER_NODE"}


def test_every_setting_is_described() -> None:
    described = module.descriptions()
    assert list(described) == [field.name for field in dataclasses.fields(RunSettings)]
    assert all(len(text) > 20 for text in described.values())
    assert all("seconds" in described[name].lower() for name in described if name.endswith("_s"))


def test_values_as_they_are_written() -> None:
    settings, _ = resolve(
        {
            "chaos": ("kill:rank=0,step=1",),
            "script": ScriptSpec(target="t.py", module=False, args=()),
        },
        {},
    )
    assert module.written(settings.chaos) == "kill:rank=0,step=1"
    assert module.written(()) == "(none)"
    assert module.written(600.0) == "600"
    assert module.written(True) == "true"


def test_the_reference_has_every_setting_with_its_default_and_text() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
    rows = page.read_text(encoding="utf-8").splitlines()
    for name, text in module.descriptions().items():
        value = getattr(RunSettings(), name)
        default = "-" if value in ("", ()) else f"`{module.written(value)}`"
        row = f"| `{name}` | {default} | {' '.join(text.split())} |"
        assert name == "script" or row in rows


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("EVERSTEP_NPROC", "EVERSTEP_NPROC_PER_NODE"),
        ("EVERSTEP_GRACE", "EVERSTEP_GRACE_S"),
        ("EVERSTEP_LOGDIR", "EVERSTEP_LOG_DIR"),
        ("EVERSTEP_HOME", None),
        ("EVERSTEP_LOG_DIR", None),
        ("EVERSTEP_JOB", None),
        ("EVERSTEP_INCARNATION", None),
        ("OTHER_NPROC", None),
    ],
)
def test_a_variable_that_is_almost_a_setting_is_warned_of(variable: str, meant: str | None) -> None:
    warnings = module.slips({variable: "x"})
    assert len(warnings) == (meant is not None)
    assert all(variable in one and f"did you mean {meant}?" in one for one in warnings)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Up to 64 of a-z . _ -. Made from\nthe date.", "Up to 64 of a-z . _ -."),
        (
            "Shows neither the one\nnor the other. torch too.",
            "Shows neither the one nor the other.",
        ),
        ("One only.", "One only."),
    ],
)
def test_the_first_sentence_is_whole(text: str, first: str) -> None:
    assert module.first_sentence(text) == first
