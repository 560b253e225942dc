"""Orders to serve other layers: who must obey, and what a flood or a false answer gets."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import ModelId, NodeAddr, NodeId, Precision, Span
from manyhands.errors import BadRequest, Conflict, ManyhandsError, ShardUnavailable, WeightsMismatch
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Link
from manyhands.origin.node import FullNode
from manyhands.place import orders
from manyhands.place.orders import MAX_ASKERS, MAX_HASTY, PAUSE_S, Standing, judge
from manyhands.testing.clock import run_virtual
from manyhands.testing.swarm import memory_node
from manyhands.wire.control import TEXT_LIMITS
from manyhands.wire.message import Reassign, Reassigned

MODEL, OTHER = ModelId("aa" * 32), ModelId("bb" * 32)
ORDER = Reassign(1, MODEL, "bf16", Span(3, 6), is_forced=False)
STANDING = Standing(
    name="n1",
    is_owner=False,
    knows_asker=True,
    obeys=True,
    pinned=None,
    model=MODEL,
    precision="bf16",
    num_layers=6,
    held=(Span(0, 3),),
    is_moving=False,
    rests_s=-1.0,
    has_room=True,
    is_needed=False,
)


# -- who obeys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"pinned": Span(0, 3)}, Conflict, "started with --layers 0-2"),
        ({"obeys": False}, Conflict, "obey = false"),
        ({"knows_asker": False}, Conflict, "does not share"),
        ({"model": OTHER}, WeightsMismatch, "hosts bbbbbbbbbbbb in bf16, not aaaaaaaaaaaa"),
        ({"precision": "w8"}, WeightsMismatch, "in w8, not"),
        ({"num_layers": 5}, BadRequest, "layers 3-5 do not exist"),
        ({"is_moving": True}, Conflict, "moving already"),
        ({"rests_s": 12.3}, Conflict, "again in 12 s"),
        ({"has_room": False}, Conflict, "no room for layers 3-5"),
        ({"is_needed": True}, Conflict, "no other node serves all of layers 0-2"),
    ],
)
def test_every_no_has_its_reason(change: dict[str, Any], error: type[ManyhandsError], why: str) -> None:
    assert judge(ORDER, STANDING)
    with pytest.raises(error, match=why):
        judge(ORDER, replace(STANDING, **change))


def test_force_overrules_need_and_nothing_else() -> None:
    forced = replace(ORDER, is_forced=True)
    assert judge(forced, replace(STANDING, is_needed=True))
    for change in ({"pinned": Span(0, 3)}, {"has_room": False}, {"rests_s": 1.0}, {"model": OTHER}):
        with pytest.raises(ManyhandsError):
            judge(forced, replace(STANDING, **change))


def test_the_owner_is_obeyed_whatever_others_are_told() -> None:
    mine = replace(STANDING, is_owner=True, pinned=Span(0, 3), obeys=False, knows_asker=False)
    assert judge(ORDER, mine)
    with pytest.raises(Conflict, match="no other node"):
        judge(ORDER, replace(mine, is_needed=True))


def test_who_is_there_already_does_not_move() -> None:
    assert not judge(ORDER, replace(STANDING, held=(Span(0, 3), Span(3, 6)), is_moving=True, has_room=False))


# -- on the wire ------------------------------------------------------------------------------------------------------


async def _pair(network: MemoryNetwork) -> tuple[FullNode, FullNode, NodeAddr]:
    asker, asked = memory_node(network, "asker"), memory_node(network, "asked")
    await asker.__aenter__()
    await asked.__aenter__()
    return asker, asked, await asked.listen(NodeAddr("mem", 0))


def _play(scene: Any) -> None:
    async def main() -> None:
        asker, asked, addr = await _pair(MemoryNetwork())
        try:
            await scene(asker, asked, addr)
        finally:
            await asker.__aexit__(None, None, None)
            await asked.__aexit__(None, None, None)

    run_virtual(main())


async def _ask(asker: FullNode, addr: NodeAddr, model: ModelId = MODEL, precision: Precision = "bf16") -> str:
    link = await asker.pool.get(addr, "control")
    return await asker.orders.ask(link, model, precision, Span(3, 6), is_forced=False)


def test_a_node_that_is_no_member_keeps_its_layers() -> None:
    async def scene(asker: FullNode, asked: FullNode, addr: NodeAddr) -> None:
        with pytest.raises(Conflict, match="restart it with --layers 3-5"):
            await _ask(asker, addr)

    _play(scene)


def test_what_the_node_says_comes_back_without_control_characters() -> None:
    async def scene(asker: FullNode, asked: FullNode, addr: NodeAddr) -> None:
        asked.orders.decide_by(lambda node, order: f"\x1b[2J{'x' * 1000}\n")
        said = await _ask(asker, addr)
        assert said.startswith("?[2Jxxx") and len(said) == TEXT_LIMITS["detail"]

    _play(scene)


def test_a_code_that_means_nothing_here_is_a_refusal() -> None:
    def obey(_: NodeId, __: Reassign) -> str:
        raise ShardUnavailable("odd")

    async def scene(asker: FullNode, asked: FullNode, addr: NodeAddr) -> None:
        asked.orders.decide_by(obey)
        with pytest.raises(Conflict, match="odd"):
            await _ask(asker, addr)

    _play(scene)


def test_a_flood_is_one_decision_and_a_few_short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(asker: FullNode, asked: FullNode, addr: NodeAddr) -> None:
        seen: list[Reassign] = []

        def obey(_: NodeId, order: Reassign) -> str:
            seen.append(order)
            return "moves"

        asked.orders.decide_by(obey)
        link = await asker.pool.get(addr, "control")
        answers: list[Reassigned] = []

        def note(answer: Reassigned, _: Link) -> bool:
            answers.append(answer)
            return True

        monkeypatch.setitem(asker._handlers, Reassigned, [note])
        for number in range(1000):
            link.send(replace(ORDER, request=number))
        await asyncio.sleep(PAUSE_S / 2)
        assert len(seen) == 1 and len(answers) == 1 + MAX_HASTY
        assert {answer.code for answer in answers[1:]} == {"conflict"}
        await asyncio.sleep(PAUSE_S)
        link.send(ORDER)
        await asyncio.sleep(0.1)
        assert len(seen) == 2 and answers[-1].code is None

    _play(scene)


def test_who_floods_keeps_out_neither_the_owner_nor_another_member() -> None:
    """One member's orders were every member's pause: an operator's, and the owner's own, were told to wait, or nothing."""
    seen, told = list[NodeId](), list[Reassigned]()
    me, flooder, member, *more = [NodeId(f"{number:064x}") for number in range(40)]

    class Line:
        def __init__(self, peer: NodeId) -> None:
            self.peer = peer

        def send(self, answer: Reassigned) -> None:
            told.append(answer)

    async def main() -> None:
        asked = orders.Orders()
        asked._me = me
        asked.decide_by(lambda node, order: seen.append(node) or "moves")  # type: ignore[func-returns-value]

        def ask(peer: NodeId, times: int = 1) -> None:
            for _ in range(times):
                asked.on_asked(ORDER, Line(peer))  # type: ignore[arg-type]

        ask(flooder, 1000)
        for node in (member, me):
            ask(node)
        assert seen == [flooder, member, me] and len(told) == 1 + MAX_HASTY + 2
        await asyncio.sleep(PAUSE_S)
        seen.clear()
        told.clear()
        for _ in range(100):
            for node in more:
                ask(node)
        ask(me)
        assert len(seen) == MAX_ASKERS + 1 and seen[-1] == me
        assert len(told) <= (MAX_ASKERS + 1) * (1 + MAX_HASTY) + 1 and len(asked._pauses) <= MAX_ASKERS + 2
        await asyncio.sleep(PAUSE_S)
        ask(more[-1])
        assert seen[-1] == more[-1]

    run_virtual(main())


def test_who_does_not_answer_is_told_from_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(asker: FullNode, asked: FullNode, addr: NodeAddr) -> None:
        monkeypatch.setitem(asked._handlers, Reassign, [lambda order, link: True])
        with pytest.raises(ShardUnavailable, match="no answer within 5 s"):
            await _ask(asker, addr)
        monkeypatch.setitem(asked._handlers, Reassign, [lambda order, link: link.abort("bye") or True])
        with pytest.raises(ShardUnavailable, match="no answer"):
            await _ask(asker, addr)
        assert "asked=0" in repr(asker.orders)

    _play(scene)


@given(st.integers(0, (1 << 32) - 1), st.none() | st.text(max_size=20), st.text(max_size=400))
def test_answers_without_a_question_change_nothing(request: int, code: str | None, detail: str) -> None:
    async def main() -> None:
        mine = orders.Orders()
        link, other = object(), object()
        future: asyncio.Future[Reassigned | str] = asyncio.get_running_loop().create_future()
        mine._asked[7] = (link, future)  # type: ignore[assignment]
        mine.on_answer(Reassigned(request, code, detail), other)  # type: ignore[arg-type]
        mine.on_lost(other, "gone")  # type: ignore[arg-type]
        assert not future.done()
        mine.on_answer(Reassigned(7, code, detail), link)  # type: ignore[arg-type]
        mine.on_answer(Reassigned(7, "conflict", "again"), link)  # type: ignore[arg-type]
        assert future.result() == Reassigned(7, code, detail)

    asyncio.run(main())
