"""`everstep doctor`: what will cost something, said before it does. Thin; imports when it must."""

from __future__ import annotations

import os
import sys

import click


@click.command()
@click.option("--tiers", is_flag=True, help="Look at the tiers of checkpoints.")
@click.option(
    "--loss-budget",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Steps that may be lost when the memory of all hosts is lost.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("addresses", nargs=-1, metavar="[ADDRESS]...")
def doctor(tiers: bool, loss_budget: int | None, as_json: bool, addresses: tuple[str, ...]) -> None:
    """Say what is wrong with how everstep is used here.

    With --tiers: whether an agent runs that nobody saves to, or saves go to one that does not run;
    whether checkpoints become durable often enough; who else can get at the destination. ADDRESS is
    as for `everstep ckpt`; the memory of the hosts is looked at if an agent runs here. Exits with 1
    if there is a problem."""
    import time

    import msgspec

    from everstep.errors import UserError
    from everstep.observe.screen import Screen
    from everstep.settings import has_secret, resolve, secret_of
    from everstep.tiers import places
    from everstep.tiers.doctor import examine

    if not tiers:
        raise UserError("what is to be looked at? give --tiers")
    key = secret_of(os.environ).checkpoint_key() if has_secret(os.environ) else None
    memory_error = places.memory_error()
    named = any(places.parse(address).place == places.MEMORY for address in addresses)
    if not memory_error and not named:
        addresses = (places.MEMORY, *addresses)
    with places.opened(addresses, key=key) as found:
        remarks = examine(
            found, memory_error=memory_error, loss_budget=loss_budget, now_s=time.time()
        )
    if as_json:
        click.echo(msgspec.json.encode({"remarks": remarks}).decode())
    else:
        screen = Screen(sys.stdout, resolve({}, os.environ, only=["color"])[0].color)
        styles = {"problem": "red", "note": "yellow", "unseen": ""}
        for remark in remarks:
            screen.say(f"{remark.kind}: {remark.what}", styles[remark.kind])
        if not remarks:
            screen.say("nothing to remark", "green")
    if any(remark.kind == "problem" for remark in remarks):
        sys.exit(1)
