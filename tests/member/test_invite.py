"""The code that a member shows: one at a time, told on the network while it lives, gone without a trace."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from fastapi import FastAPI, Request

from manyhands.api.native.invite import invite_router
from manyhands.api.run import Caller
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, Forbidden, LinkClosed, WrongCode
from manyhands.member.invite import Invitations
from manyhands.net.pairing.code import read_code
from manyhands.net.pairing.dial import ask_ticket
from manyhands.swarm.lan import Advertised
from manyhands.swarm.ticket import Ticket
from tests.waiting import GUARD_S

TICKET = Ticket.new("home").with_address(NodeAddr("127.0.0.1", 7700))


class Air:
    """The announcements of a node on the network."""

    is_sent = True

    def __init__(self) -> None:
        self.ports: list[int | None] = []
        self.news = asyncio.Event()

    async def show_code(self, port: int | None) -> None:
        self.ports.append(port)
        self.news.set()

    async def until(self, is_so: Callable[[list[int | None]], bool]) -> None:
        async with asyncio.timeout(GUARD_S):
            while not is_so(self.ports):
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def inviting(port: int = 0) -> AsyncIterator[tuple[Invitations, Air, list[str]]]:
    """A member's invitations, the announcements, and the lines for people."""
    air, lines = Air(), list[str]()
    tasks: set[asyncio.Task[None]] = set()

    def start(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        tasks.add(task := asyncio.ensure_future(work))
        return task

    member = SimpleNamespace(
        ticket=TICKET,
        config=SimpleNamespace(listen=NodeAddr("127.0.0.1", 0)),
        addresses=[NodeAddr("127.0.0.1", port or 65535)],
        invitation=lambda: TICKET,
        node=SimpleNamespace(start=start),
    )
    made = Invitations(cast(Any, member), cast(Advertised, air), lines.append)
    try:
        yield made, air, lines
    finally:
        await made.withdraw()
        await asyncio.gather(*tasks)


def code_of(made: Invitations) -> str:
    told = made.told()
    assert told is not None
    return read_code(told["code"])


async def ask(air: Air, code: str) -> str:
    port = air.ports[-1]
    assert port is not None
    return await ask_ticket([NodeAddr("127.0.0.1", port)], TICKET.fingerprint, code)


def test_a_code_is_announced_opens_and_is_taken_back() -> None:
    async def scene() -> None:
        async with inviting() as (made, air, lines):
            assert made.told() is None
            await made.show()
            assert await ask(air, code_of(made)) == TICKET.encode()
            assert lines == ["the machine at 127.0.0.1 typed the code and has the ticket"]
            await made.withdraw()
            assert made.told() is None and air.ports[-1] is None and len(lines) == 1
            await made.withdraw()

    asyncio.run(scene())


def test_a_new_code_ends_the_one_before() -> None:
    async def scene() -> None:
        async with inviting() as (made, air, _):
            await made.show()
            old, port = code_of(made), air.ports[-1]
            await made.show()
            assert code_of(made) != old and air.ports[1] is None
            with pytest.raises((WrongCode, LinkClosed)):
                await ask(air, old)
            assert port is not None
            assert await ask(air, code_of(made)) == TICKET.encode()

    asyncio.run(scene())


def test_three_wrong_codes_are_told_and_end_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def scene() -> None:
        async with inviting() as (made, air, lines):
            await made.show()
            code = code_of(made)
            for _ in range(3):
                with pytest.raises(WrongCode):
                    await ask(air, "".join(reversed(code)) if code != code[::-1] else "ABCDEF")
            await air.until(lambda ports: ports[-1] is None)
            assert made.told() is None
            assert lines == [
                "a wrong code was typed at 127.0.0.1: 2 tries left",
                "a wrong code was typed at 127.0.0.1: 1 try left",
                "a wrong code was typed at 127.0.0.1: 0 tries left",
                "the code opens nothing any more (3 wrong codes were tried): manyhands code shows a new one",
            ]
            assert not any(form in text for text in (caplog.text, *lines) for form in (code, f"{code[:3]}-{code[3:]}"))

    asyncio.run(scene())


def test_an_expired_code_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.member.invite.CODE_S", 0.1)

    async def scene() -> None:
        async with inviting() as (made, air, lines):
            await made.show()
            await air.until(lambda ports: ports[-1] is None)
            assert made.told() is None and "10 minutes have passed" in lines[0]

    asyncio.run(scene())


def test_the_listener_is_at_the_port_after_the_nodes_if_that_is_free() -> None:
    """Who opened a firewall for a fixed port can open the next one too."""

    async def scene() -> None:
        free = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = free.sockets[0].getsockname()[1]
        async with inviting(port - 1) as (made, air, _):
            await made.show()
            assert air.ports[-1] not in (None, port)  # it is taken
            free.close()
            await free.wait_closed()
            await made.show()
            assert air.ports[-1] == port

    asyncio.run(scene())


def test_a_node_that_cannot_be_found_shows_none() -> None:
    async def scene() -> None:
        async with inviting() as (made, air, _):
            made._advertised = None
            with pytest.raises(BadRequest, match="use the ticket"):
                await made.show()
            air.is_sent = False
            made._advertised = cast(Advertised, air)
            with pytest.raises(BadRequest, match="--scope off"):
                await made.show()
            assert made.told() is None

    asyncio.run(scene())


def test_only_admins_are_told_of_codes_and_tickets() -> None:
    async def told(is_admin: bool) -> tuple[Any, ...]:
        app = FastAPI()

        @app.middleware("http")
        async def who(request: Request, go_on: Any) -> Any:
            request.state.caller = Caller(is_admin=is_admin)
            return await go_on(request)

        async with inviting() as (made, air, _):
            app.include_router(invite_router(made))
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
                if not is_admin:
                    for method, path in (("GET", ""), ("POST", "/code"), ("DELETE", "/code")):
                        with pytest.raises(Forbidden):
                            await client.request(method, f"/api/invite{path}")
                    assert not air.ports
                    return ()
                before = await client.get("/api/invite")
                new = (await client.post("/api/invite/code")).json()
                after = (await client.get("/api/invite")).json()
                none = (await client.delete("/api/invite/code")).json()
        assert before.headers["cache-control"] == "no-store"
        return before.json(), new, after, none

    assert asyncio.run(told(False)) == ()
    before, new, after, none = asyncio.run(told(True))
    assert before["ticket"] == TICKET.encode() and before["swarm"] == "home" and before["code"] is None
    assert {len(row) for row in before["qr"]} == {len(before["qr"])} and set("".join(before["qr"])) == {"0", "1"}
    assert new["code"]["tries_left"] == 3 and read_code(new["code"]["code"])
    assert after["code"]["code"] == new["code"]["code"] and none == {"swarm": "home", "code": None}
