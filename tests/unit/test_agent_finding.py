"""An agent that asks where its coordinator is: who may not ask ends, and says why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.netcases import ANY_PORT, LOCAL, PATIENCE_S, SECRET

from everstep.agent.agent import run_agent
from everstep.agent.terms import AgentSettings, Where
from everstep.errors import UserError
from everstep.wire import nodes
from everstep.wire.network import Hub

WORDS = "etcd refuses kv/range (permission denied)"


def agent(where: Where, folder: Path) -> int:
    settings = AgentSettings(
        coordinator=("", 0),
        where=where,
        name="ada",
        host="ada",
        domain="",
        interface="",
        ports=ANY_PORT,
        log_dir=folder,
        shm_dir=folder,
        join_timeout_s=PATIENCE_S,
        coordinator_timeout_s=PATIENCE_S,
        grace_s=1.0,
    )
    return run_agent(settings, SECRET, {})


def test_who_may_not_ask_at_first_ends(tmp_path: Path) -> None:
    async def where() -> tuple[str, int, int] | None:
        raise UserError(WORDS)

    with pytest.raises(UserError) as ended:
        agent(where, tmp_path)
    assert str(ended.value) == WORDS


def test_who_may_not_ask_after_a_loss_ends(tmp_path: Path) -> None:
    registered: list[nodes.FromNode] = []
    hubs: list[Hub[nodes.FromNode]] = []

    def take(_: int, message: nodes.FromNode) -> None:
        registered.append(message)
        asyncio.get_running_loop().call_soon(hubs[0].close)

    async def where() -> tuple[str, int, int] | None:
        if hubs:
            raise UserError(WORDS)
        hub: Hub[nodes.FromNode] = Hub(
            host=LOCAL,
            ports=ANY_PORT,
            secret=SECRET,
            receives=nodes.FromNode,
            on_joined=lambda *_: None,
            on_message=take,
            on_lost=lambda *_: None,
            on_refused=lambda *_: None,
        )
        hubs.append(hub)
        return LOCAL, hub.port, 0

    with pytest.raises(UserError) as ended:
        agent(where, tmp_path)
    assert str(ended.value) == WORDS
    assert isinstance(registered[0], nodes.Register)
