"""The command line: reads arguments, refuses what can not run, and hands over. Thin.

Everything but click is imported inside the commands, so that `everstep --help` answers before a
heavy import would have begun; torch is imported by no command at all, only by the processes they
start."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from everstep import __version__
from everstep.cli_ckpt import ckpt
from everstep.cli_doctor import doctor
from everstep.errors import EverstepError, UserError

if TYPE_CHECKING:
    from everstep.agent.terms import Where
    from everstep.launch.client import Contact
    from everstep.launch.job import JobResult
    from everstep.launch.lease import Finder
    from everstep.observe.view import View
    from everstep.settings import RunSettings, Source
    from everstep.wire.messages import ScriptSpec
    from everstep.wire.secret import Secret

Command = TypeVar("Command", bound=Callable[..., Any])

# Options end at the script: what follows is the script's own. Underscores are as good as dashes, as
# with torchrun.
_SCRIPT_LAST = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


class _Group(click.Group):
    """A group whose commands may raise everstep's errors: one line for the person, the error's exit
    code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EverstepError as error:
            click.echo(f"everstep: error: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="everstep", message="%(prog)s %(version)s")
def main() -> None:
    """Training that goes on when a rank dies: no restart, no checkpoint read, no step lost."""


main.add_command(ckpt)
main.add_command(doctor)


def _run_options(command: Command) -> Command:
    """The options of `run`, `prove` and `coordinator`, and the script behind them."""
    decorators = [
        click.option(
            "--nproc-per-node", type=int, metavar="N", help="Workers to start, one rank each. [1]"
        ),
        click.option(
            "--nnodes", type=int, metavar="N", help="Hosts that the job needs, one node each. [1]"
        ),
        click.option(
            "--coordinator",
            metavar="HOST:PORT",
            help="Where the hosts meet, the same on each; HOST coordinates.",
        ),
        click.option(
            "--node-rank",
            type=click.Choice(["auto"]),
            expose_value=False,
            help="Which node this host is; found out by itself.",
        ),
        click.option("--domain", metavar="WHAT", help="What fails with this host, like rack=r1."),
        click.option(
            "--interface",
            metavar="IF",
            help="Network interface of this host's workers. [that which leads to HOST]",
        ),
        click.option(
            "--ports",
            metavar="FIRST-LAST",
            help="TCP ports at which everstep listens on this host. [any free ones]",
        ),
        click.option(
            "--recovery-bandwidth",
            metavar="RATE",
            help="Most that copies may take of a node's network, like 2GiB/s. [0: no limit]",
        ),
        click.option(
            "--spares", type=int, metavar="N", help="Nodes beyond those, to replace lost ones. [0]"
        ),
        click.option(
            "--spare-wait",
            "spare_wait_s",
            type=float,
            metavar="S",
            help="Seconds to wait for a node where one was lost and no spare is left. [300]",
        ),
        click.option(
            "--grace-s",
            type=float,
            metavar="S",
            help="Seconds from SIGTERM to SIGKILL when somebody ends the job, or a node of it. [5]",
        ),
        click.option(
            "--copies",
            type=click.Choice(["off", "sync", "async"]),
            help="Copy shards that have no replica, in each step, into memory. [off]",
        ),
        click.option(
            "--replicate-every",
            type=int,
            metavar="N",
            help="With --copies async: every how many steps. [1]",
        ),
        click.option(
            "-m", "--module", is_flag=True, help="SCRIPT is a module's name, as for python -m."
        ),
        click.option("--log-dir", metavar="DIR", help="Where runs are kept. [everstep-runs]"),
        click.option("--run-id", metavar="NAME", help="Name of this run. [made from the date]"),
        click.option(
            "--max-restarts", type=int, metavar="N", help="Incidents that end the job. [100]"
        ),
        click.option(
            "--master-port",
            type=int,
            metavar="PORT",
            help="MASTER_PORT of the script. [a free one]",
        ),
        click.option("--config", metavar="FILE", help="Settings file. [everstep.toml, if there]"),
        click.option(
            "--quiet", is_flag=True, default=None, help="No output of workers, no live line."
        ),
        click.argument("script"),
        click.argument("args", nargs=-1, type=click.UNPROCESSED),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


_local_nodes_option = click.option(
    "--local-nodes",
    type=int,
    metavar="N",
    help="Nodes to start here, each a process tree of its own with --nproc-per-node ranks. "
    "[0: none but this]",
)
_chaos_option = click.option(
    "--chaos",
    multiple=True,
    metavar="SPEC",
    help="A fault on purpose: KIND:rank=R,step=S[,at=PLACE], or random:count=N,seed=K,steps=A-B.",
)


@main.command(context_settings=_SCRIPT_LAST)
@click.option(
    "--dry-run", is_flag=True, help="Check everything, print what would be run, start nothing."
)
@_chaos_option
@_local_nodes_option
@_run_options
def run(dry_run: bool, **options: Any) -> None:
    """Run SCRIPT on every rank, and go on when one of them fails.

    Options after SCRIPT are the script's. The exit code is the script's, or 128 plus the signal
    that ended it."""
    from everstep.launch import preflight
    from everstep.settings import protection_is_off

    settings, sources = _resolve(options)
    _warn_of_slips(settings)
    off = protection_is_off(os.environ)
    if off and settings.chaos:
        raise UserError(
            "EVERSTEP=off: no fault on purpose can fire in an unprotected run; unset it, "
            "or leave out --chaos"
        )
    if off and settings.coordinator:
        raise UserError(
            "EVERSTEP=off: an unprotected run has nodes on this machine only; start it on several "
            "hosts with torchrun, or unset it"
        )
    preflight.check(settings)
    if dry_run:
        _print_dry_run(settings, sources, off)
        return
    if settings.coordinator and not _coordinates(settings):
        sys.exit(_be_agent(settings, None, None, None))
    sys.exit(_run(settings, off))


@main.command(context_settings=_SCRIPT_LAST)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    required=True,
    metavar="SPEC",
    help="KIND:rank=R,step=S[,at=PLACE], or random:count=N,seed=K,steps=A-B.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Write the verdict and the incidents' times to FILE.",
)
@_local_nodes_option
@_run_options
def prove(faults: tuple[str, ...], json_path: str | None, **options: Any) -> None:
    """Prove that SCRIPT recovers to the same bits.

    Runs SCRIPT clean twice and with the faults once, and compares what every rank returned and
    consumed in every step, and the state at the end. Exits with 0 only when all are equal and every
    fault was injected and survived."""
    from everstep.launch.prove import prove as run_proof
    from everstep.settings import faults_of, protection_is_off

    settings, _ = _resolve(options)
    _warn_of_slips(settings)
    if protection_is_off(os.environ):
        raise UserError(
            "EVERSTEP=off: there is nothing to prove about an unprotected run; unset it"
        )
    if settings.coordinator:
        raise UserError(
            "a proof runs its three jobs on one machine; give --local-nodes, which starts its "
            "nodes here, and leave out --coordinator"
        )
    specs = faults_of(settings, faults)
    sys.exit(run_proof(settings, specs, Path(json_path) if json_path else None, sys.stdout))


@main.command(context_settings=_SCRIPT_LAST)
@_chaos_option
@_run_options
def coordinator(**options: Any) -> None:
    """Coordinate a job on several hosts from here, without being one of its nodes.

    It is started like `run`, and takes the job over if the directory of --run-id says that it runs.
    Ctrl-C ends the job. SIGTERM ends the coordinator alone: the steps go on, and the next one takes
    the job over."""
    from everstep.launch import preflight
    from everstep.launch.coordinating import run_coordinator

    settings, _ = _resolve(options)
    _warn_of_slips(settings)
    if not settings.coordinator:
        raise UserError(
            "a coordinator on its own needs an address at which the nodes find it; give "
            "--coordinator HOST:PORT, and the same to the nodes"
        )
    preflight.check(settings, resume=True)
    sys.exit(_show(settings, run_coordinator))


@main.command()
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    help="Where the job's coordinator listens; [::1]:PORT for IPv6.",
)
@click.option(
    "--run-id",
    metavar="NAME",
    help="Name of the run, where the setting coordinator_lease names what finds it.",
)
@click.option("--name", metavar="NAME", help="Of this agent, no other's. [host and process id]")
@click.option("--host", metavar="NAME", help="Of this machine, as the job names it. [its own]")
@click.option("--domain", metavar="WHAT", help="What fails with it, like rack=r1. [the host]")
@click.option(
    "--interface",
    metavar="IF",
    help="Network interface of its workers. [that which leads to the coordinator]",
)
@click.option(
    "--ports", metavar="FIRST-LAST", help="TCP ports at which it listens. [any free ones]"
)
@click.option(
    "--grace-s",
    type=float,
    metavar="S",
    help="Seconds from SIGTERM to SIGKILL of its workers when it is asked to end. [5]",
)
@click.option(
    "--memory-share",
    type=float,
    metavar="PART",
    help="Of the host's memory, for checkpoints kept in it. [0.5]",
)
@click.option(
    "--recovery-bandwidth", metavar="RATE", help="For copies between hosts, like 2GiB/s. [no limit]"
)
@click.option(
    "--secret-file", metavar="FILE", help="With the secret. [EVERSTEP_SECRET or ..._FILE]"
)
@click.option(
    "--peers",
    metavar="HOST:PORT,...",
    help="Without a coordinator: agents of other hosts. [those of the ranks that save]",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Without a coordinator: leave checkpoints for the next agent when asked to end.",
)
@click.option("--config", metavar="FILE", help="Settings file. [everstep.toml, if there]")
@click.option("--quiet", is_flag=True, default=None, help="Say nothing but errors.")
def agent(
    coordinator: str | None,
    run_id: str | None,
    name: str | None,
    host: str | None,
    domain: str | None,
    interface: str | None,
    ports: str | None,
    grace_s: float | None,
    memory_share: float | None,
    recovery_bandwidth: str | None,
    secret_file: str | None,
    peers: str | None,
    keep: bool,
    config: str | None,
    quiet: bool | None,
) -> None:
    """Be a node of a job: run the workers that its coordinator asks for. Without a coordinator:
    keep checkpoints in this host's memory, for jobs under any launcher.

    The secret is in EVERSTEP_SECRET, or in the file that EVERSTEP_SECRET_FILE or --secret-file
    names. Start a node in the directory in which the script's path leads to the script."""
    from everstep.settings import OF_AGENTS, resolve

    options = {
        "coordinator": coordinator,
        "run_id": run_id,
        "domain": domain,
        "interface": interface,
        "ports": ports,
        "grace_s": grace_s,
        "memory_share": memory_share,
        "recovery_bandwidth": recovery_bandwidth,
        "quiet": quiet,
    }
    file = Path(config) if config else None
    settings, _ = resolve(options, os.environ, file, only=OF_AGENTS)
    secret = _secret_from(secret_file)
    if not settings.coordinator and not settings.coordinator_lease:
        sys.exit(_keep_checkpoints(settings, name, host, secret, peers or "", keep))
    if keep or peers:
        raise UserError("--keep and --peers are for an agent without a coordinator: leave them out")
    sys.exit(_be_agent(settings, name, host, secret))


def _secret_from(path: str | None) -> Secret | None:
    """The secret in the file, or that of the environment, if there is one."""
    from everstep.settings import has_secret, secret_of
    from everstep.wire.secret import Secret

    if path:
        return Secret.from_file(path)
    return secret_of(os.environ) if has_secret(os.environ) else None


def _keep_checkpoints(
    settings: RunSettings,
    name: str | None,
    host: str | None,
    secret: Secret | None,
    peers: str,
    keep: bool,
) -> int:
    import socket

    from everstep.agent.memory_agent import MemoryAgentSettings, run_memory_agent
    from everstep.settings import endpoint

    machine = host or socket.gethostname()
    wanted = MemoryAgentSettings(
        name=name or machine,
        host=machine,
        domain=settings.domain,
        interface=settings.interface,
        ports=settings.listening_ports,
        peers=[endpoint(peer.strip()) for peer in peers.split(",") if peer.strip()],
        secret=secret,
        share=settings.memory_share,
        bytes_per_s=settings.recovery_bytes_per_s,
        shm_dir=Path(settings.shm_dir),
        keep=keep,
    )
    return run_memory_agent(wanted, _say)


def _where(finder: Finder) -> Where:
    """What an agent asks of it."""

    async def where() -> tuple[str, int, int] | None:
        place = await finder.where()
        return None if place is None else (place.host, place.port, place.term)

    return where


def _be_agent(
    settings: RunSettings, name: str | None, host: str | None, secret: Secret | None
) -> int:
    import socket

    from everstep.agent.agent import run_agent
    from everstep.agent.terms import AgentSettings
    from everstep.launch.lease import make_finder
    from everstep.settings import endpoint, secret_of, without_secret

    finder = make_finder(settings.coordinator_lease, settings.run_id, settings.lease_s)
    if finder is None and not settings.coordinator:
        raise UserError(
            "an agent must know where its coordinator is: give --coordinator HOST:PORT, or "
            "--run-id where the setting coordinator_lease names what finds it"
        )
    machine = host or socket.gethostname()
    wanted = AgentSettings(
        coordinator=endpoint(settings.coordinator) if settings.coordinator else ("", 0),
        where=None if finder is None else _where(finder),
        say=_say_nothing if settings.quiet else _say_if_heard,
        name=name or f"{machine}-{os.getpid()}",
        host=machine,
        domain=settings.domain,
        interface=settings.interface,
        ports=settings.listening_ports,
        log_dir=Path(settings.log_dir),
        shm_dir=Path(settings.shm_dir),
        join_timeout_s=settings.join_nodes_timeout_s,
        coordinator_timeout_s=settings.coordinator_timeout_s,
        grace_s=settings.grace_s,
        memory_share=settings.memory_share,
        bytes_per_s=settings.recovery_bytes_per_s,
    )
    return run_agent(wanted, secret or secret_of(os.environ), without_secret(os.environ))


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
def secret(file: Path) -> None:
    """Make a job's secret and write it to FILE, which only you can read.

    Give it to every host of the job in EVERSTEP_SECRET_FILE. Who has it can join the job, read what
    it sends, and run programs as you."""
    from everstep.wire.secret import make_secret

    make_secret().write(file)


def _client_options(command: Command) -> Command:
    """The options of those commands that ask a running job."""
    decorators = [
        click.option(
            "--coordinator",
            metavar="HOST:PORT",
            help="Where the job's coordinator listens; [::1]:PORT for IPv6.",
        ),
        click.option(
            "--run-id",
            metavar="NAME",
            help="Name of the run, where the setting coordinator_lease names what finds it.",
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(min=0, min_open=True),
            default=10.0,
            metavar="S",
            help="Seconds to wait for an answer, and for a coordinator that comes back. [10]",
        ),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


@main.command()
@_client_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("run_dir", metavar="[RUN_DIR]", required=False, type=click.Path(path_type=Path))
def status(
    coordinator: str | None,
    run_id: str | None,
    timeout_s: float,
    as_json: bool,
    run_dir: Path | None,
) -> None:
    """Print what a job is doing: asked of its coordinator, or read from the journal in RUN_DIR.

    To ask, the job's secret must be in EVERSTEP_SECRET, or in the file that EVERSTEP_SECRET_FILE
    names. Exits with 3 if there is no such job, or it can't be reached."""
    from everstep.observe.retrace import is_written, status_of_run
    from everstep.observe.screen import Screen
    from everstep.observe.status import as_json as json_of
    from everstep.observe.status import show
    from everstep.settings import resolve

    gone = False
    if run_dir is None:
        from everstep.launch.client import ask_status

        found = ask_status(_contact(coordinator, run_id, timeout_s))
    elif coordinator or run_id:
        raise UserError("a job is asked, or its journal read: give --coordinator or RUN_DIR")
    else:
        found = status_of_run(run_dir)
        gone = found.exit_code is None and not is_written(run_dir)
    if as_json:
        click.echo(json_of(found))
    else:
        show(found, Screen(sys.stdout, resolve({}, os.environ, only=["color"])[0].color))
    if gone:
        _say(
            "its journal has no end, and nobody on this machine writes it: what wrote it was "
            "killed, or is on another host"
        )
        sys.exit(3)


@main.command()
@_client_options
@click.option("--rank", "ranks", type=int, multiple=True, metavar="R", help="Only rank R's lines.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the newest N lines.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is printed from now on.")
def logs(
    coordinator: str | None,
    run_id: str | None,
    timeout_s: float,
    ranks: tuple[int, ...],
    tail: int | None,
    follow: bool,
) -> None:
    """Print what the workers of a running job printed of late, and what happened to it.

    Who reads too slowly misses lines, and is told how many; the job waits for nobody. All lines are
    in the logs of the hosts on which the ranks run."""
    from everstep.launch.client import read_logs
    from everstep.observe.console import LinePrinter
    from everstep.settings import resolve
    from everstep.wire.clients import AskLogs

    contact = _contact(coordinator, run_id, timeout_s)
    printer = LinePrinter(resolve({}, os.environ, only=["color"])[0].color)
    asked = AskLogs(ranks=ranks, follow=follow, tail=-1 if tail is None else tail)
    try:
        read_logs(contact, asked, printer)
    except KeyboardInterrupt:
        # Not by way of the interpreter's end, at which a write that hangs would hold us up.
        os._exit(130)


@main.command()
@_client_options
@click.option("--now", is_flag=True, help="Do not wait for the workers, as a second Ctrl-C.")
def stop(coordinator: str | None, run_id: str | None, timeout_s: float, now: bool) -> None:
    """End a running job, as Ctrl-C would, and wait until it has ended.

    Its workers get SIGTERM, and SIGKILL after the job's grace_s."""
    from everstep.launch.client import stop_job

    stop_job(_contact(coordinator, run_id, timeout_s), now=now)


def _contact(coordinator: str | None, run_id: str | None, timeout_s: float) -> Contact:
    """How a running job is reached."""
    from functools import partial

    from everstep.launch.client import Contact
    from everstep.launch.lease import found, make_finder
    from everstep.settings import SourceKind, endpoint, resolve, secret_of

    options = {"coordinator": coordinator, "run_id": run_id}
    names = ["coordinator", "coordinator_lease", "run_id", "lease_s"]
    given, sources = resolve(options, os.environ, only=names)
    finder = None
    if not coordinator and sources["run_id"].kind is not SourceKind.DEFAULT:
        finder = make_finder(given.coordinator_lease, given.run_id, given.lease_s)
    if finder is None and not given.coordinator:
        raise UserError(
            "which job? give --coordinator HOST:PORT, where its coordinator listens; or --run-id, "
            "where the setting coordinator_lease names what finds it"
        )
    return Contact(
        where=("", 0) if finder is not None else endpoint(given.coordinator),
        secret=secret_of(os.environ),
        timeout_s=timeout_s,
        say=_say,
        find=None if finder is None else partial(found, finder),
    )


def _say(text: str) -> None:
    click.echo(f"everstep: {text}", err=True)


def _say_if_heard(text: str) -> None:
    """For a process that must live on when its terminal is gone."""
    with contextlib.suppress(OSError):
        _say(text)


def _say_nothing(text: str) -> None:
    pass


@main.group()
def config() -> None:
    """What the settings are and where they come from."""


@config.command("show")
@click.option("--config", metavar="FILE", help="Settings file. [everstep.toml, if there]")
def config_show(config: str | None) -> None:
    """Print every setting, its value, where that came from, and what it means."""
    import shutil
    import textwrap

    from everstep import settings as module

    width = min(shutil.get_terminal_size().columns, 100)
    settings, sources = module.resolve({}, os.environ, Path(config) if config else None)
    for name, description in module.descriptions().items():
        if name != "script":
            value = module.written(getattr(settings, name))
            click.echo(f"{name} = {value}  ({sources[name]})")
            meaning = module.first_sentence(description)
            for line in textwrap.wrap(meaning, width - 4, break_on_hyphens=False):
                click.echo(f"    {line}")
    for variable, nearest in module.strangers(os.environ).items():
        hint = f"; did you mean {nearest}?" if nearest else ""
        click.echo(f"note: {variable} in the environment is not a setting{hint}", err=True)


@main.command()
@click.argument("run_dir", metavar="RUN_DIR")
def report(run_dir: str) -> None:
    """Print what happened in the run whose directory (or journal) is RUN_DIR, folded from its
    journal. For a directory of runs: which there are."""
    from everstep.observe.report import JOURNAL_FILE, report_run
    from everstep.observe.runs import list_runs
    from everstep.observe.screen import Screen
    from everstep.settings import resolve

    settings, _ = resolve({}, os.environ)
    path, screen = Path(run_dir), Screen(sys.stdout, settings.color)
    if (path / JOURNAL_FILE).exists() or not list_runs(path, screen):
        report_run(path, screen)


def _resolve(options: Mapping[str, Any]) -> tuple[RunSettings, dict[str, Source]]:
    from everstep.settings import resolve
    from everstep.wire.messages import ScriptSpec

    arguments = dict(options)
    config, module = arguments.pop("config"), arguments.pop("module")
    target, args = arguments.pop("script"), arguments.pop("args")
    arguments["script"] = ScriptSpec(target=target, module=module, args=args)
    return resolve(arguments, os.environ, Path(config) if config else None)


def _warn_of_slips(settings: RunSettings) -> None:
    """Say what was probably meant otherwise: variables that are almost settings, and our options
    behind the script. One that is given on both sides is meant as it stands."""
    from everstep.settings import slips

    for slip in slips(os.environ):
        click.echo(f"everstep: warning: {slip}", err=True)
    context = click.get_current_context()
    ours = {
        option: parameter.name
        for parameter in context.command.params
        if parameter.name is not None and isinstance(parameter, click.Option)
        for option in parameter.opts
        if option.startswith("--")
    }
    given = click.core.ParameterSource.COMMANDLINE
    told = set()
    for argument in settings.script.args:
        option = argument.partition("=")[0].replace("_", "-")
        if option == "--":
            break
        name = ours.get(option)
        if name is None or option in told or context.get_parameter_source(name) is given:
            continue
        told.add(option)
        click.echo(
            f"everstep: warning: {option} stands after the script, so it goes to "
            f"{settings.script.target}; options of everstep {context.info_name} stand before it",
            err=True,
        )


def _coordinates(settings: RunSettings) -> bool:
    """Whether this is the command that coordinates: the first on the host at which all meet."""
    from everstep.agent.identity import can_listen, has_address, numeric
    from everstep.settings import endpoint

    host, port = endpoint(settings.coordinator)
    if not has_address(host):
        return False  # not yet: the agent looks it up at each attempt
    address = numeric(host, alone=settings.nnodes == 1)
    if can_listen(address, port):
        return True
    if can_listen(address, 0) and not settings.quiet:
        _say(
            f"somebody listens at {settings.coordinator} on this host already, so this is a node "
            "of the job there; for a job of its own choose another port in --coordinator"
        )
    return False


def _run(settings: RunSettings, off: bool) -> int:
    if not off:
        from everstep.launch.local import run_job

        return _show(settings, run_job)
    from everstep.launch.plain import run_plain
    from everstep.observe.console import ConsoleView

    view = ConsoleView(settings)
    try:
        click.echo("everstep: EVERSTEP=off: this run is not protected", err=True)
        plain = run_plain(settings, view)
        if plain.text:
            click.echo(f"everstep: {plain.text}", err=True)
        return plain.exit_code
    finally:
        view.close()


def _show(settings: RunSettings, run: Callable[[RunSettings, View], JobResult]) -> int:
    """Run a job, show it, and say at the end how it went. Returns the exit code."""
    from everstep.observe.console import ConsoleView

    view = ConsoleView(settings)
    try:
        result = run(settings, view)
    finally:
        view.close()
    if result.journal.is_file():
        view.summarize(result.run_dir)
    else:
        said = f": {result.text}" if result.text else ""
        _say(
            f"the job has ended with exit code {result.exit_code}{said}; another host coordinated "
            "it to its end, and has its journal and report"
        )
    return result.exit_code


def _print_dry_run(settings: RunSettings, sources: Mapping[str, Source], off: bool) -> None:
    """What would be run, where its output would go, and the settings that are not the default."""
    from everstep.launch.preflight import run_dir
    from everstep.observe.narrate import size_in_words
    from everstep.settings import SourceKind, written

    protection = "unprotected (EVERSTEP=off)" if off else "protected"
    click.echo(f"would run, {protection}, on {size_in_words(settings)}:")
    click.echo(f"    {_command_line(settings.script)}")
    click.echo(f"journal and logs in {run_dir(settings)}")
    for name, source in sources.items():
        if name != "script" and source.kind is not SourceKind.DEFAULT:
            click.echo(f"    {name} = {written(getattr(settings, name))}  ({source})")
    click.echo("nothing was started")


def _command_line(script: ScriptSpec) -> str:
    import shlex

    module = ["-m"] if script.module else []
    return shlex.join([sys.executable, *module, script.target, *script.args])


if __name__ == "__main__":
    main()
