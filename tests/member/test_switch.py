"""A member that is switched off is inert, and is back at once when it is switched on; its weights stay loaded."""

import asyncio
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request

from manyhands.api.native.switch import switch_router
from manyhands.api.run import Caller
from manyhands.cli.reporter import missing_of
from manyhands.core import SamplingParams, Span
from manyhands.errors import Draining, ExperimentalDisabled, Forbidden, ShardUnavailable
from manyhands.route.offer import Rules
from tests.member.members import Play, Town
from tests.member.requests import PROMPT, ask, level, place_records, settled, shown, until


def test_a_node_that_is_switched_off_offers_and_takes_nothing(play: Play) -> None:
    """HN-08, HN-19: a running request moves to another node with the same text; on again, the node serves again."""

    async def scene(place: Town) -> None:
        origin, (_, *others) = await settled(place, "", "0-3", "0-3")
        level(origin)
        request = origin.request_ids(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
        wanted = (await origin.complete(request)).token_ids
        running = origin.answer(request)
        async for _ in origin.stream(running):
            if len(running.token_ids) == 8:
                [switched] = [member for member in others if member.config.name == running.route[0].name]
                switched.switch(on=False)
        assert running.token_ids == wanted
        assert running.session is not None
        assert [hop.offer.node for hop in running.session.route.hops] != [switched.id]
        await until(lambda: switched.id not in {record.node for record in place_records(origin)})
        assert switched.node.worker.spans == ()
        [rest] = [member.config.name for member in others if member is not switched]
        assert {shown(await ask(origin, Rules())) for _ in range(6)} == {f"{rest}:0-3"}
        assert switched.node.hosts[0].is_loaded
        switched.switch(on=True)
        await until(lambda: switched.id in {record.node for record in place_records(origin)})
        assert f"{switched.config.name}:0-3" in {shown(await ask(origin, Rules())) for _ in range(24)}

    play(scene)


def test_a_node_that_is_switched_off_asks_nothing(play: Play) -> None:
    """HN-39, HN-43: its own requests are refused by name; those of others find no route."""

    async def scene(place: Town) -> None:
        origin, (_, one) = await settled(place, "", "0-3")
        one.switch(on=False)
        await until(lambda: not place_records(origin))
        with pytest.raises(ShardUnavailable, match="no node holds layers 0-3"):
            await ask(origin, Rules())
        own = place.origin(one)
        with pytest.raises(ExperimentalDisabled, match="n1 is switched off: `manyhands switch on`"):
            await ask(own, Rules())
        one.switch(on=True)
        assert shown(await ask(own, Rules())) == "n1:0-3"

    play(scene)


def test_a_node_that_leaves_takes_no_request_of_its_own(play: Play) -> None:
    """It waits until its own have ended: a gateway that was asked again and again never left."""

    async def scene(place: Town) -> None:
        _, (_, one, _) = await settled(place, "", "0-3", "0-3")
        own = place.origin(one)
        assert shown(await ask(own, Rules()))
        await one.leave()
        with pytest.raises(Draining, match="n1 is leaving: ask another member"):
            await ask(own, Rules())
        assert await one.idle(asyncio.get_running_loop().time())

    play(scene)


def test_a_node_that_leaves_waits_for_its_own_answers_until_a_deadline(play: Play) -> None:
    """It waited as long as they took: systemd killed it with them, after `drain_s` and 20 s."""

    async def scene(place: Town) -> None:
        _, (_, one, _) = await settled(place, "", "0-3", "0-3")
        origin, now = place.origin(one), asyncio.get_running_loop().time
        running = origin.answer(origin.request_ids(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True)))
        stream = origin.stream(running)
        await anext(stream)
        await one.leave()
        began = now()
        assert not await one.idle(began + 5.0)
        assert 5.0 <= now() - began < 6.0
        waiting = asyncio.ensure_future(one.idle(now() + 300.0))
        assert len([token async for token in stream]) >= 50
        assert await waiting and now() - began < 300.0

    play(scene)


def test_the_last_node_that_is_switched_off_leaves_its_layers_missing(play: Play) -> None:
    """Its log said that every layer is held: no record named the model any more."""

    async def scene(place: Town) -> None:
        hosting = await place.host(0)
        assert missing_of(hosting) == []
        hosting.member.switch(on=False)
        await until(lambda: not hosting.records())
        assert missing_of(hosting) == [Span(0, hosting.weights.shape.num_layers)]
        hosting.member.switch(on=True)
        await until(lambda: bool(hosting.records()))
        assert missing_of(hosting) == []

    play(scene)


def test_only_admins_turn_it() -> None:
    async def turn(is_admin: bool) -> tuple[int, list[bool]]:
        turned: list[bool] = []
        app = FastAPI()

        @app.middleware("http")
        async def caller(request: Request, go_on: Any) -> Any:
            request.state.caller = Caller(is_admin=is_admin)
            return await go_on(request)

        app.include_router(switch_router(turned.append, lambda: not turned or turned[-1]))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
            assert (await client.get("/api/switch")).json() == {"on": True}
            odd: list[Any] = [{"on": 0}, {"on": "no"}, {"on": False, "force": True}, {}, []]
            for sent in odd:
                assert (await client.post("/api/switch", json=sent)).status_code in (403, 422), (
                    "FastAPI's 422 is our 400"
                )
                assert not turned
            told = await client.post("/api/switch", json={"on": False})
        return told.status_code, turned

    assert asyncio.run(turn(True)) == (200, [False])
    with pytest.raises(Forbidden):
        asyncio.run(turn(False))


def test_a_session_is_not_handed_to_a_node_that_its_request_does_not_admit(play: Play) -> None:
    """Repairs and hand-overs keep to the request's scope: with no other trusted node the session stays where it is."""

    async def scene(place: Town) -> None:
        origin, (me, one, _) = await settled(place, "", "0-3", "0-3")
        me.directory.members = type(me.directory.members)("lan", frozenset({one.id}), frozenset(), "127.0.0.1")
        running = origin.answer(origin.request_ids(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True)))
        async for _ in origin.stream(running, rules=Rules(scope="trusted")):
            if len(running.token_ids) == 8:
                one.switch(on=False)
        assert running.session is not None
        assert {hop.offer.node for hop in running.session.route.hops} == {one.id}
        assert not running.repairs

    play(scene)
