"""Members over each back-end of the directory: nothing above swarm/ knows which one runs. In one process, in virtual time."""

import asyncio
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.checkpoint.manifest import Silent
from manyhands.config import Listed
from manyhands.core import NodeAddr, SamplingParams, Span
from manyhands.errors import BadRequest
from manyhands.member.neighbours import split_nodes
from manyhands.member.view import missing_spans
from manyhands.member.weights import kinds_of, weights_of
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Link
from manyhands.origin import Origin, OriginModel
from manyhands.origin.node import FullNode
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import DirectoryUpdate
from manyhands.worker.execute import Device
from tests.member.members import Town, room_for, spans, town
from tests.swarm.records import key_of

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPT = tuple(range(3, 20))
Scene = Callable[[Town], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("directory") / "tiny", layers=6, seed=3)


@pytest.fixture
def play(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Scene], Any]:
    """Play a scene in a swarm with this kind of directory."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))

    def start(kind: str, scene: Scene) -> Any:
        async def main() -> Any:
            async with town(folder, tmp_path) as place:
                place.ticket = replace(place.ticket, directory=kind)
                return await scene(place)

        return run_virtual(main())

    return start


async def until(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait in virtual time."""
    async with asyncio.timeout(seconds):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def budget(place: Town) -> int:
    """Room for two of the six layers."""
    return room_for(await weights_of(str(place.folder), "bf16", (), place.home, Silent()), 2)


async def answer(place: Town, member: Any) -> list[int]:
    origin = place.origin(member)
    return (await origin.complete(origin.request_ids(PROMPT, PARAMS))).token_ids


def whole(member: Any) -> bool:
    kinds = kinds_of(member.records())
    return bool(kinds) and not any(missing_spans(kind, member.records()) for kind in kinds)


@pytest.mark.parametrize("kind", ["dht", "static"])  # test_member.py has gossip
def test_four_members_join_answer_and_leave(kind: str, play: Any) -> None:
    """Three cover the model, each with what the others lack; a visitor asks; one leaves and a fourth takes its layers."""

    async def scene(place: Town) -> None:
        room = await budget(place)
        town = [await place.host(index, memory_bytes=room) for index in range(3)]
        for hosting in town:
            await until(lambda: len(spans(hosting.member)) == 3, 5)  # noqa: B023
            assert sorted(spans(hosting.member).values()) == [["0-1"], ["2-3"], ["4-5"]]
        said = await answer(place, town[0].member)
        visitor = await place.open(7, is_visitor=True)
        assert visitor.addresses == () and not visitor.hosted()
        visitor.directory.records_of((), town[0].kind.model)
        await until(lambda: whole(visitor), 5)
        assert await answer(place, visitor) == said
        await place.host(3, memory_bytes=room)
        await town[1].member.leave()
        for hosting in (town[0], town[2]):
            await until(lambda: set(spans(hosting.member)) == {"n0", "n2", "n3"}, 5)  # noqa: B023
        await until(lambda: "n1" not in spans(visitor), 40)  # it looks every 24 to 36 s in a dht
        await until(lambda: whole(town[0].member), 60)
        assert await answer(place, town[0].member) == said
        assert not any(member.complaints() for member in (town[0].member, town[2].member, visitor))

    play(kind, scene)


def test_a_visitor_calls_nodes_without_a_directory_again(play: Any) -> None:
    """Those of `serve` are known by their Hello alone, so only while a link is open."""

    async def scene(place: Town) -> None:
        device = Device.start(1)
        place.stack.callback(device.close)
        served = FullNode(lambda hello: place.network.transport(key_of(5).node_id, hello), key_of(5).private_key)
        await place.stack.enter_async_context(served)
        await served.worker.host(place.folder, Span(0, 6), "bf16", device, model_name="tiny")
        place.ticket = place.ticket.with_address(await served.listen(NodeAddr("127.0.0.1", 0)))
        visitor = await place.stack.enter_async_context(place.member(7, is_visitor=True))
        assert await visitor.call() == 1
        origin = Origin(
            visitor.node, OriginModel(place.folder, "bf16"), device, place.ticket.addresses, visitor.directory
        )
        assert origin.routes.is_covered()
        said = (await origin.complete(origin.request_ids(PROMPT, PARAMS))).token_ids
        link = visitor.node.pool.find(key_of(5).node_id, "control")
        assert link is not None
        link.abort("a cable was pulled")
        await until(lambda: not origin.routes.is_covered(), 5)
        assert (await origin.complete(origin.request_ids(PROMPT, PARAMS))).token_ids == said

    play("dht", scene)


def test_a_joiner_learns_the_models_of_a_dht_from_its_first_link(play: Any) -> None:
    """No key of the DHT lists models: who joins hears of them in Hello, looks them up, and lets go what it does not host."""

    async def scene(place: Town) -> None:
        first = await place.host(0)
        second = await place.open(1)
        assert [kind.model for kind in kinds_of(second.records())] == [first.kind.model]
        assert [p.node for p in second.directory.peers()] == [first.member.id]

    play("dht", scene)


def test_another_kind_of_directory_is_named_by_both(play: Any) -> None:
    """The ticket makes all nodes of a swarm equal; should two differ all the same, both say what and how to mend it."""

    async def scene(place: Town) -> None:
        first = await place.host(0)
        place.ticket = replace(place.ticket, directory="gossip")
        second = await place.host(1)
        for one, ours, theirs in ((first.member, "dht", "gossip"), (second.member, "gossip", "dht")):
            (line,) = one.complaints()
            assert f"keeps the directory by {theirs}, this one by {ours}: start that node anew with the ticket" in line
            assert list(spans(one)) == [one.config.name]

    play("dht", scene)


class FaultyPeer:
    """A member by its ticket that answers the directory with `reply`: garbage, or nothing (None)."""

    def __init__(self, network: MemoryNetwork, index: int, reply: Callable[[], bytes] | None) -> None:
        key = key_of(index)
        self.node = FullNode(lambda hello: network.transport(key.node_id, hello), key.private_key, name=f"bad{index}")
        self.asked = 0
        self._reply = reply
        self.node.handle(DirectoryUpdate, self._on_body)

    def _on_body(self, message: DirectoryUpdate, link: Link) -> bool:
        self.asked += 1
        if self._reply is not None:
            link.send(DirectoryUpdate(self._reply()))
        return True


def test_peers_of_a_dht_that_answer_falsely_or_never_do_no_harm(play: Any) -> None:
    """The ticket's first two addresses answer falsely: who joins by it still finds the others, and the answer is right."""

    async def scene(place: Town) -> None:
        room, rng = await budget(place), random.Random(5)
        first = await place.host(0, memory_bytes=room)
        replies = [lambda: b"d" + rng.randbytes(rng.randrange(200)), None]
        faulty = [FaultyPeer(place.network, 20 + index, reply) for index, reply in enumerate(replies)]
        for peer in faulty:
            await place.stack.enter_async_context(peer.node)
            addr = await peer.node.listen(NodeAddr("127.0.0.1", 0))
            await peer.node.pool.get(first.member.addresses[0], "control")
            place.ticket = place.ticket.with_address(addr)
        for index in (1, 2):
            await place.host(index, memory_bytes=room)
        await until(lambda: len(spans(first.member)) == 3, 5)
        assert all(peer.asked for peer in faulty)
        alone = await place.origin(first.member).complete(place.origin(first.member).request_ids(PROMPT, PARAMS))
        assert len(alone.token_ids) == PARAMS.max_tokens and whole(first.member)
        await asyncio.sleep(120)
        assert whole(first.member), "and it stays so, past the lifetime of every record"

    play("dht", scene)


def test_listed_nodes_are_called_until_they_are_there(play: Any) -> None:
    """Static: a node that starts before those of its list meets them when they come, without a ticket that names them."""

    async def scene(place: Town) -> None:
        there = NodeAddr("127.0.0.1", 7701)
        early = await place.stack.enter_async_context(place.member(0, nodes=(there,)))
        await asyncio.sleep(30)
        assert early.edges() == {}
        late = await place.stack.enter_async_context(place.member(1, listen=there))
        await until(lambda: {r.name for r in early.records()} == {r.name for r in late.records()} == {"n0", "n1"}, 30)
        assert [str(addr) for addr in early.invitation().addresses] == [str(early.addresses[0]), str(there)]

    play("static", scene)


# -- the swarm file ---------------------------------------------------------------------------------------------------

NODES = ("10.0.0.1:7700 0-5", "10.0.0.2:7700", "10.0.0.3:7700 6-11", "10.0.0.3:7701 6-11")


@pytest.mark.parametrize(
    ("here", "own"),
    [
        ("10.0.0.1:7700", 0),
        ("10.0.0.1:0", 0),  # any port: the file says which
        ("10.0.0.2:0", 1),
        ("10.0.0.1:9", None),  # told to listen elsewhere
        ("10.0.0.3:7701", 3),
        ("10.0.0.3:0", None),  # two of the list are here: --listen says which
        ("10.0.0.4:7700", None),
    ],
)
def test_one_file_tells_every_machine_which_it_is(here: str, own: int | None) -> None:
    mine, others = split_nodes(NODES, NodeAddr.parse(here))
    assert mine == (None if own is None else Listed.parse(NODES[own]))
    assert others == [Listed.parse(text) for index, text in enumerate(NODES) if index != own]


def test_layers_of_the_file_are_half_open_inside() -> None:
    assert Listed.parse(" [::1]:7  0-5 ") == Listed(NodeAddr("::1", 7), Span(0, 6))
    assert Listed.parse("nas.local:7700").span is None


def test_a_model_whose_name_no_record_can_state_is_served(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The record could not be made, which ended the node."""
    odd = shutil.copytree(folder, tmp_path / "tiny\u00a0model")

    async def main() -> None:
        async with town(odd, tmp_path) as place:
            members = [(await place.host(index)).member for index in range(2)]
            await until(lambda: all(spans(each).keys() == {"n0", "n1"} for each in members), 10)
            assert {kind.name for kind in kinds_of(members[1].records())} == {"tiny?model"}

    run_virtual(main())
    assert "the swarm calls the model tiny?model" in caplog.text


@given(st.text(max_size=40) | st.from_regex(r"[\w.:]{1,9}:\d{1,6}( \d*-?\d*)?", fullmatch=True))
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    try:
        listed = Listed.parse(text)
    except BadRequest as error:
        assert str(error).startswith("nodes has ") and "HOST:PORT" in str(error)
    else:
        assert 0 < listed.addr.port < 65536
