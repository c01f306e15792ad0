"""`everstep ckpt`: looking into checkpoints from the command line. Thin; imports when it must.

Exit codes: 0; 1 when what was looked at is damaged, or differs; 2 when refused; 3 when nothing is
there, or it can't be reached."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from everstep.observe.screen import Screen
    from everstep.tiers.foreign_task import Done, Task
    from everstep.tiers.places import Places

Command = TypeVar("Command", bound=Callable[..., Any])
NOT_THERE = 3

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_signature_option = click.option(
    "--require-signature",
    is_flag=True,
    help="Refuse what is not signed with the secret of the environment.",
)
_addresses = click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS...")


@click.group()
def ckpt() -> None:
    """Look into checkpoints, move and remove them.

    ADDRESS is a directory, a URL (s3://, gs://, az://), or `memory`: that of the hosts, by the
    agent that runs on this one. Behind it stand, where they are meant, a series and a step:
    s3://bucket/prefix#run/42. Several addresses are several tiers, the nearest first. Signatures
    are checked by the secret in EVERSTEP_SECRET, or in the file that EVERSTEP_SECRET_FILE names."""


@ckpt.command("ls")
@_signature_option
@_json_option
@_addresses
def list_(addresses: tuple[str, ...], require_signature: bool, as_json: bool) -> None:
    """List the checkpoints of all tiers, and attempts that are none.

    Goes by records and listings; no part is read."""
    import time

    from everstep.observe.checkpoints import show_list
    from everstep.tiers.look import survey

    with _opened(addresses, require_signature) as places:
        listed, torn = survey(places)
        if as_json:
            _print_json({"checkpoints": listed, "attempts": torn})
        else:
            show_list(listed, torn, time.time(), _screen())
        if not listed:
            _leave(f"no checkpoint is in {' or '.join(addresses)}", NOT_THERE)


@ckpt.command()
@_signature_option
@_json_option
@click.option("--all", "everything", is_flag=True, help="All tensors, values and packages.")
@_addresses
def show(
    addresses: tuple[str, ...], require_signature: bool, as_json: bool, everything: bool
) -> None:
    """Print what a checkpoint is made of, and where it comes from: of the step in the address, or
    the newest whole one."""
    from everstep.observe.checkpoints import show_checkpoint
    from everstep.tiers.find import decide

    with _opened(addresses, require_signature) as places:
        found = decide(places.tiers(places.one_series()), step=places.step)
        sources = {source.tier.name for some in found.sources.values() for source in some}
        if as_json:
            _print_json(
                {
                    "tiers": sorted(sources),
                    "signature": found.standing,
                    "checkpoint": found.checkpoint,
                }
            )
        else:
            show_checkpoint(
                found.checkpoint,
                found.standing,
                ", ".join(sorted(sources)),
                _screen(),
                everything=everything,
            )


@ckpt.command()
@_signature_option
@_json_option
@_addresses
def verify(addresses: tuple[str, ...], require_signature: bool, as_json: bool) -> None:
    """Read every byte of a checkpoint, or of all, in each tier by itself, and say what is wrong.

    Finds a flipped bit, a missing or short part, a wrong signature. Attempts that never became a
    checkpoint are named, and are nothing wrong. Exits with 1 if anything is."""
    import time

    from everstep.observe.checkpoints import show_list, show_verdicts
    from everstep.tiers.look import survey
    from everstep.tiers.look import verify as verify_one

    with _opened(addresses, require_signature) as places:
        listed, torn = survey(places)
        wanted = [one for one in listed if places.step in (None, one.step)]
        if not wanted:
            _leave(f"no such checkpoint is in {' or '.join(addresses)}", NOT_THERE)
        where = {place.store.where: place for place in places.places}
        verdicts = []
        for one in wanted:
            for kept in one.kept:
                place = where[kept.where]
                verdict = verify_one(place, places.reader(place, one.series), one.step)
                verdicts.append(verdict)
                if not as_json:
                    show_verdicts([verdict], _screen())
        if as_json:
            _print_json({"verdicts": verdicts, "attempts": torn})
        else:
            show_list([], torn, time.time(), _screen())
        kinds = {finding.kind for verdict in verdicts for finding in verdict.findings}
        if kinds:
            sys.exit(NOT_THERE if kinds == {"unreachable"} else 1)


@ckpt.command()
@_signature_option
@_json_option
@click.argument("first")
@click.argument("second")
def diff(first: str, second: str, require_signature: bool, as_json: bool) -> None:
    """Compare the checkpoints at two addresses, however each is sharded: bit for bit.

    Exits with 1 if they differ."""
    from everstep.observe.checkpoints import show_difference
    from everstep.tiers.diff import compare
    from everstep.tiers.load import open_newest
    from everstep.tiers.slabs import Reading

    with contextlib.ExitStack() as stack:
        readings = []
        for address in (first, second):
            places = stack.enter_context(_opened((address,), require_signature))
            tiers = places.tiers(places.one_series())
            readings.append(Reading(stack.enter_context(open_newest(tiers, step=places.step))))
        compared = compare(*readings)
        if as_json:
            _print_json(compared)
        else:
            show_difference(compared, _screen())
        if compared.differences:
            sys.exit(1)


@ckpt.command()
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    required=True,
    metavar="N",
    help="Checkpoints that stay, the newest whole ones; 0: all.",
)
@click.option(
    "--older-than-s",
    type=click.FloatRange(min=0),
    default=86400.0,
    metavar="S",
    help="Attempts that never became a checkpoint go when they have not changed for S seconds. "
    "[86400]",
)
@_json_option
@click.argument("address")
def prune(address: str, keep: int, older_than_s: float, as_json: bool) -> None:
    """Remove old checkpoints, and what failed saves have left. The newest whole one stays."""
    import time

    from everstep.observe.narrate import counted
    from everstep.shm.budget import size

    with _opened((address,), False) as places:
        pruned = {}
        for series in places.all_series():
            reader = places.reader(places.places[0], series)
            done = reader.prune(keep=keep, older_than_s=older_than_s, now=time.time())
            pruned[series] = done
            if not as_json:
                _say(
                    f"{series}: removed {counted(len(done.steps), 'checkpoint')}"
                    f"{_steps(done.steps)} and {counted(len(done.leftovers), 'attempt')}, "
                    f"{size(done.nbytes)}"
                )
        if as_json:
            _print_json(pruned)
        if not pruned:
            _leave(f"no checkpoint is in {address}", NOT_THERE)


@ckpt.command("export")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "dcp"]),
    default="safetensors",
    help="safetensors: as Hugging Face keeps models; dcp: as torch's FileSystemWriter writes, with "
    "a pickle. [safetensors]",
)
@click.option(
    "--prefix",
    default="",
    metavar="KEY",
    help="safetensors: only tensors whose keys begin so, without it, as `model.`.",
)
@click.option(
    "--shard-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    metavar="GB",
    help="safetensors: most of one file. [5]",
)
@_signature_option
@_json_option
@click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS...")
@click.argument("folder", type=click.Path(path_type=Path))
def export(
    addresses: tuple[str, ...],
    folder: Path,
    kind: str,
    prefix: str,
    shard_gb: float,
    require_signature: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint to FOLDER for others to read: that of the step in the address, or the
    newest whole one. Nothing is overwritten."""
    from everstep.errors import UserError
    from everstep.tiers import huggingface
    from everstep.tiers.foreign_task import Task
    from everstep.tiers.load import open_newest
    from everstep.tiers.slabs import Reading

    if kind == "dcp":
        if prefix:
            raise UserError("--prefix goes with --format safetensors: dcp keeps the whole state")
        with _opened(addresses, require_signature) as places:
            series = places.one_series()
            step = places.step
        done = _elsewhere(
            Task(
                do="export",
                addresses=addresses,
                folder=str(folder),
                series=series,
                step=step,
                require_signature=require_signature,
            )
        )
        _exported(done.step, [str(folder)], as_json)
        return
    with _opened(addresses, require_signature) as places:
        tiers = places.tiers(places.one_series())
        with open_newest(tiers, step=places.step) as opened:
            files = huggingface.write(
                Reading(opened),
                folder,
                prefix=prefix,
                shard_bytes=int(shard_gb * 10**9),
                say=_say,
            )
            _exported(opened.told.step, [str(path) for path in files], as_json)


@ckpt.command("import")
@click.option(
    "--trust-pickle",
    is_flag=True,
    help="SOURCE may run programs as you: its metadata is a pickle. Only for what you trust like "
    "code.",
)
@click.option(
    "--prefix", default="", metavar="KEY", help="Begins the keys of all tensors, as `model.`."
)
@_json_option
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("address")
def import_(source: Path, address: str, trust_pickle: bool, prefix: str, as_json: bool) -> None:
    """Make a checkpoint, at ADDRESS#SERIES/STEP, of SOURCE: a safetensors file, a folder of such
    (Hugging Face), or a folder of torch's distributed checkpoint."""
    from everstep.errors import UserError
    from everstep.tiers import huggingface, places
    from everstep.tiers.foreign_task import Task
    from everstep.tiers.incoming import bring_in, under
    from everstep.tiers.origin import origin

    meant = places.parse(address)
    if meant.series is None or meant.step is None:
        raise UserError(f"which checkpoint is it to be? say it as {meant.place}#SERIES/STEP")
    if (source / ".metadata").exists():
        if not trust_pickle:
            raise UserError(
                f"{source}/.metadata is a pickle, which runs whatever its writer put into it: give "
                "--trust-pickle if you trust the writer like code"
            )
        if prefix:
            raise UserError("--prefix goes with safetensors: this has the whole state's keys")
        done = _elsewhere(
            Task(
                do="import",
                addresses=(address,),
                folder=str(source),
                series=meant.series,
                step=meant.step,
            )
        )
        found, left = done.tensors, done.values
    else:
        incoming = under(prefix, huggingface.read(source))
        with _opened((address,), False) as opened:
            series = opened.reader(opened.places[0], meant.series)
            about = origin(world=1, config={"imported": str(source)})
            bring_in(series, meant.step, incoming, {}, origin=about)
        found, left = len(incoming), 0
    if as_json:
        _print_json({"address": address, "tensors": found, "values": left})
    else:
        _say(f"{address}: made of {found} tensors and {left} values from {source}")


def _exported(step: int, files: list[str], as_json: bool) -> None:
    if as_json:
        _print_json({"step": step, "files": files})
    else:
        _say(f"step {step} written to {', '.join(files)}")


def _elsewhere(task: Task) -> Done:
    """Have a process that knows torch do it."""
    import subprocess

    import msgspec

    from everstep.tiers.foreign_task import Done

    ran = subprocess.run(
        [sys.executable, "-m", "everstep.tiers.foreign"],
        input=msgspec.json.encode(task),
        stdout=subprocess.PIPE,
        check=False,
    )
    if ran.returncode:
        sys.exit(ran.returncode)  # it has said why
    return msgspec.json.decode(ran.stdout, type=Done)


@contextlib.contextmanager
def _opened(addresses: tuple[str, ...], require_signature: bool) -> Iterator[Places]:
    """The places at these addresses; what they answer as exit codes."""
    from everstep.settings import has_secret, secret_of
    from everstep.tiers import places
    from everstep.tiers.find import NoneThere
    from everstep.tiers.store import Refused, StoreError

    key = secret_of(os.environ).checkpoint_key() if has_secret(os.environ) else None
    try:
        with places.opened(addresses, key=key, require_signature=require_signature) as found:
            yield found
    except Refused:
        raise
    except (NoneThere, StoreError) as error:
        _leave(f"error: {error}", NOT_THERE)


def _leave(text: str, code: int) -> None:
    _say(text)
    sys.exit(code)


def _say(text: str) -> None:
    click.echo(f"everstep: {text}", err=True)


def _steps(steps: tuple[int, ...]) -> str:
    return f" ({', '.join(map(str, steps))})" if steps else ""


def _print_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.encode(value).decode())


def _screen() -> Screen:
    from everstep.observe.screen import Screen
    from everstep.settings import resolve

    return Screen(sys.stdout, resolve({}, os.environ, only=["color"])[0].color)
