"""Weights over links: a seed gives what it holds and nothing else; whatever a peer answers, the asker survives it."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.checkpoint.folder import MANIFEST, SINGLE, read_entries
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.manifest import build_manifest
from manyhands.checkpoint.split import split_model
from manyhands.core import ModelId, NodeAddr, NodeId, SamplingParams, Span
from manyhands.errors import BadRequest, LinkClosed, ManyhandsError, ModelError
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Link
from manyhands.origin.node import FullNode
from manyhands.testing.clock import run_virtual
from manyhands.testing.swarm import memory_node, memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.weights import blocks
from manyhands.weights import seed as seeding
from manyhands.weights.blocks import BLOCK_BYTES, ProvenStretch
from manyhands.weights.download import Need, pull
from manyhands.weights.provider import PeerProvider, ProviderError
from manyhands.weights.seed import MAX_WAITING, WeightServer, read_shared_model, read_want
from manyhands.wire.message import Message
from manyhands.wire.weights_message import MAX_CHUNK_BYTES, Part, WeightRequest, WeightsChunk, WeightsNotFound
from tests.gguf_files import tiny_gguf

SPAN = Span(2, 4)
A = NodeId("aa" * 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@asynccontextmanager
async def swarm(*names: str) -> AsyncIterator[tuple[FullNode, list[FullNode], list[PeerProvider]]]:
    """A node that asks, and nodes that it knows as peers."""
    async with AsyncExitStack() as stack:
        network = MemoryNetwork()
        asker = await stack.enter_async_context(memory_node(network, "asker"))
        nodes = [await stack.enter_async_context(memory_node(network, name)) for name in names]
        addrs = [await node.listen(NodeAddr("mem", 0)) for node in nodes]
        yield asker, nodes, [peer_at(asker, node, addr) for node, addr in zip(nodes, addrs, strict=True)]


def peer_at(asker: FullNode, node: FullNode, addr: NodeAddr) -> PeerProvider:
    return PeerProvider(node.transport.node, node.name, asker.wants, lambda: asker.pool.get(addr, "bulk"))


def check_holds(folder: Path, source: Path) -> None:
    """The tensors of both are equal where `folder` has any, and they are those of the same model."""
    originals = {entry.name: entry for entry in read_entries(source)}
    entries = read_entries(folder)
    assert entries
    for one in entries:
        two = originals[one.name]
        assert (folder / one.file).read_bytes()[one.start : one.end] == (
            (source / two.file).read_bytes()[two.start : two.end]
        )
    assert build_manifest(folder).id == build_manifest(source).id


# -- over links -----------------------------------------------------------------------------------------------------------


def test_a_span_travels_from_two_nodes(folder: Path, home: Path, tmp_path: Path) -> None:
    parts = split_model(folder, [Span(0, 3), Span(3, 6)], tmp_path / "parts")

    async def main() -> None:
        async with swarm("n0", "n1") as (_, nodes, peers):
            for node, part in zip(nodes, parts, strict=True):
                await node.seed.add(part)
            pulled = await pull(Need(build_manifest(folder).id, SPAN), peers, home)
            check_holds(pulled.folder, folder)
            assert set(pulled.received) == {peer.node for peer in peers} and pulled.blamed == ()
            given: dict[str, int] = {node.transport.node: node.seed.num_sent for node in nodes}
            assert all(given[node] >= amount for node, amount in pulled.received.items())

    run_virtual(main())


def test_a_tensor_of_many_chunks_arrives_in_order(home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.weights.provider.CHUNK_BYTES", 700)

    async def main() -> None:
        async with swarm("n0") as (_, (node,), peers):
            await node.seed.add(folder)
            pulled = await pull(Need(build_manifest(folder).id, SPAN, with_ends=True), peers, home)
            check_holds(pulled.folder, folder)
            assert pulled.blamed == ()

    run_virtual(main())


def test_what_was_pulled_writes_the_same_text(folder: Path, home: Path) -> None:
    async def text(of: Path) -> str:
        async with memory_swarm(of, "0-2,3-5") as live:
            return (await live.origin.complete(live.origin.request("Hi", SamplingParams(max_tokens=8)))).text

    async def main() -> None:
        async with swarm("n0") as (_, (node,), peers):
            await node.seed.add(folder)
            need = Need(build_manifest(folder).id, None, with_ends=True, with_files=True)
            pulled = await pull(need, peers, home)
        assert await text(pulled.folder) == await text(folder)

    asyncio.run(main())


def test_a_node_that_offers_nothing_lacks_everything(folder: Path) -> None:
    async def main() -> None:
        async with swarm("n0") as (_, _, (peer,)):
            assert await peer.file(build_manifest(folder).id, MANIFEST) is None

    run_virtual(main())


def test_a_node_that_stopped_offering_lacks_everything(folder: Path) -> None:
    async def main() -> None:
        async with swarm("n0") as (_, (node,), (peer,)):
            model = await node.seed.add(folder)
            assert await peer.file(model, "config.json") == (folder / "config.json").read_bytes()
            node.seed.remove(model)
            assert await peer.file(model, "config.json") is None

    run_virtual(main())


def test_a_file_larger_than_a_chunk_arrives_whole(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    for size in (MAX_CHUNK_BYTES, 2 * MAX_CHUNK_BYTES + 5, 0):
        (copy / "merges.txt").write_bytes(b"x" * size)

        async def main(size: int = size) -> None:
            async with swarm("n0") as (_, (node,), (peer,)):
                model = await node.seed.add(copy)
                assert await peer.file(model, "merges.txt") == b"x" * size

        run_virtual(main())


def slow_down(seed: WeightServer, bytes_per_s: float) -> None:
    """From now on `seed` pauses after each answer for as long as a line of that speed would take."""
    answer = seed._answer

    async def later(want: WeightRequest, link: Link) -> None:
        before = seed.num_sent
        await answer(want, link)
        await asyncio.sleep((seed.num_sent - before) / bytes_per_s)

    seed._answer = later  # type: ignore[method-assign]


Answer = Callable[[WeightRequest], list[Message]]


HOSTILE: dict[str, tuple[Answer, str]] = {
    "truncated": (lambda w: [WeightsChunk(w.request, w.offset, bytes(w.length - 1))], "garbage"),
    "nothing": (lambda w: [WeightsChunk(w.request, w.offset, b"")], "garbage"),
    "too much": (lambda w: [WeightsChunk(w.request, w.offset, bytes(w.length + 1))], "garbage"),
    "elsewhere": (lambda w: [WeightsChunk(w.request, w.offset + 1, bytes(w.length))], "garbage"),
    "zeros": (lambda w: [WeightsChunk(w.request, w.offset, bytes(w.length))], "garbage"),
    "unasked": (lambda w: [WeightsChunk(w.request + 1000, w.offset, bytes(w.length))], "stalled"),
    "silence": (lambda w: [], "stalled"),
    "twice": (lambda w: [WeightsChunk(w.request, w.offset, bytes(w.length))] * 2, "garbage"),
    "lack with nonsense": (lambda w: [WeightsNotFound(w.request, "x" * 1000)], ""),
    "lack of another": (lambda w: [WeightsNotFound(w.request ^ 1, "bad_model")], "any"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_a_peer_answers_the_weights_are_right(folder: Path, home: Path, kind: str) -> None:
    """The hostile node gives files truly and tensors falsely; the honest one is slow, so that both are needed."""
    answer, fault = HOSTILE[kind]

    async def main() -> None:
        async with swarm("bad", "good") as (_, (bad, good), peers):
            await bad.seed.add(folder)
            await good.seed.add(folder)
            slow_down(good.seed, 2000)
            honest = bad.seed.on_want

            def on_want(want: WeightRequest, link: Link) -> None:
                if want.part == "file":
                    return honest(want, link)
                for message in answer(want):
                    link.send(message)
                return None

            bad.seed.on_want = on_want  # type: ignore[method-assign]
            pulled = await pull(Need(build_manifest(folder).id, SPAN), peers, home)
            check_holds(pulled.folder, folder)
            found = {blame.name: blame.fault for blame in pulled.blamed}
            assert "good" not in found
            assert fault == "any" or found.get("bad", "") == fault, pulled.blamed

    run_virtual(main())


def test_a_node_that_vanishes_is_replaced(folder: Path, home: Path) -> None:
    async def main() -> None:
        async with swarm("bad", "good") as (asker, (bad, good), peers):
            await bad.seed.add(folder)
            await good.seed.add(folder)
            slow_down(bad.seed, 3000)
            slow_down(good.seed, 3000)
            work = asyncio.ensure_future(pull(Need(build_manifest(folder).id, SPAN), peers, home))
            await asyncio.sleep(8)
            link = asker.pool.find(bad.transport.node, "bulk")
            assert link is not None
            await bad.transport.aclose()
            link.abort("pulled out")
            pulled = await work
            check_holds(pulled.folder, folder)
            assert [(blame.name, blame.fault) for blame in pulled.blamed] == [("bad", "lost")]

    run_virtual(main())


def test_a_node_that_cannot_be_dialled_is_lost(folder: Path) -> None:
    async def main() -> None:
        async with swarm() as (asker, _, _):
            peer = PeerProvider(A, "gone", asker.wants, lambda: asker.pool.get(NodeAddr("nowhere", 1), "bulk"))
            with pytest.raises(ProviderError, match="nothing listens there") as lost:
                await peer.file(build_manifest(folder).id, MANIFEST)
            assert lost.value.fault == "lost"

    run_virtual(main())


def test_a_file_without_end_is_garbage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.weights.provider.MAX_FILE_BYTES", 3 * MAX_CHUNK_BYTES)

    async def main() -> None:
        async with swarm("bad") as (asker, (bad,), (peer,)):
            bad.seed.on_want = lambda want, link: link.send(WeightsChunk(want.request, want.offset, bytes(want.length)))  # type: ignore[method-assign]
            with pytest.raises(ProviderError, match="does not end within"):
                await peer.file(build_manifest(folder).id, MANIFEST)
            assert asker.wants._asked == {}, "nothing is left behind"

    run_virtual(main())


def test_who_stops_reading_leaves_no_request_behind(folder: Path) -> None:
    async def main() -> None:
        async with swarm("n0") as (asker, (node,), (peer,)):
            model = await node.seed.add(folder)
            size = next(len(entry) for entry in read_entries(folder) if entry.name == "lm_head.weight")
            blocks = peer.read(model, "lm_head.weight", 0, size)
            await anext(blocks)
            await blocks.aclose()
            assert asker.wants._asked == {}

    run_virtual(main())


# -- the seed -------------------------------------------------------------------------------------------------------------


def want(model: ModelId, name: str, offset: int = 0, length: int = 1, part: Part = "tensor") -> WeightRequest:
    return WeightRequest(1, model, part, name, offset, length)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "model.safetensors",
        "../llama/config.json",
        "./config.json",
        ".ranges.json",
        "config.json\0",
        "",
        "x" * 60_000,
    ],
)
def test_no_name_leads_out_of_the_list(folder: Path, name: str) -> None:
    model, shared = read_shared_model(folder)
    parts: tuple[Part, ...] = ("file", "tensor")
    for part in parts:
        with pytest.raises(ModelError, match="is not here"):
            read_want(shared, want(model, name, part=part))


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 129), (128, 1), (1 << 63, 1), ((1 << 64) - 1, MAX_CHUNK_BYTES), (0, 0), (127, 2)]
)
def test_bytes_outside_a_tensor_are_refused(folder: Path, offset: int, length: int) -> None:
    model, shared = read_shared_model(folder)
    assert len(read_want(shared, want(model, "model.norm.weight", 0, 128))) == 128
    with pytest.raises(BadRequest, match="it has 128 bytes"):
        read_want(shared, want(model, "model.norm.weight", offset, length))


@given(st.integers(0, (1 << 64) - 1), st.integers(0, MAX_CHUNK_BYTES), st.sampled_from(["tensor", "file"]), st.data())
def test_any_want_gives_bytes_of_that_item_or_an_error(
    folder: Path, offset: int, length: int, part: Part, data: st.DataObject
) -> None:
    model, shared = read_shared_model(folder)
    places = shared.tensors if part == "tensor" else shared.files
    name = data.draw(st.sampled_from(sorted(places)) | st.text(max_size=20))
    offset = data.draw(st.sampled_from([offset, offset % 200]))
    try:
        got = read_want(shared, WeightRequest(1, model, part, name, offset, length))
    except ManyhandsError:
        return
    entries = {entry.name: entry for entry in read_entries(folder)}
    if part == "tensor":
        whole = (folder / entries[name].file).read_bytes()[entries[name].start : entries[name].end]
    else:
        whole = build_manifest(folder).encode() if name == MANIFEST else (folder / name).read_bytes()
    assert got == whole[offset : offset + length]


def test_a_part_offers_what_it_holds(folder: Path, tmp_path: Path) -> None:
    (_, part) = split_model(folder, [Span(0, 2), Span(2, 6)], tmp_path / "parts")
    model, shared = read_shared_model(part)
    assert model == build_manifest(folder).id
    assert set(shared.tensors) == {entry.name for entry in read_entries(part)}
    assert shared.files[MANIFEST].read(0, MAX_CHUNK_BYTES) == build_manifest(folder).encode()


def test_links_out_of_the_folder_are_not_offered(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    for name in (SINGLE, "tokenizer.json"):
        (copy / name).rename(tmp_path / name)
        (copy / name).symlink_to(tmp_path / name)
    _, shared = read_shared_model(copy)
    assert shared.tensors == {}
    assert "tokenizer.json" not in shared.files


def test_a_file_that_becomes_a_link_or_shrinks_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    model, shared = read_shared_model(copy)
    (copy / SINGLE).write_bytes(b"short")
    with pytest.raises(ModelError, match="ended early"):
        read_want(shared, want(model, "model.norm.weight"))
    (copy / SINGLE).unlink()
    (copy / SINGLE).symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match="cannot be read"):
        read_want(shared, want(model, "model.norm.weight"))


@dataclass(eq=False)
class Slow:
    """A link that takes notes, and lets a chunk leave when told to."""

    peer: NodeId = A
    sent: list[Message] = field(default_factory=list)
    may_leave: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: str | None = None

    @property
    def is_closed(self) -> bool:
        return self.aborted is not None

    def send(self, message: Message) -> None:
        if self.aborted is not None:
            raise LinkClosed(self.aborted)
        self.sent.append(message)

    async def drain(self) -> None:
        await self.may_leave.wait()

    def abort(self, reason: str) -> None:
        self.aborted = reason


def with_seed(body: Callable[[WeightServer, Slow], Awaitable[None]]) -> None:
    """Run `body` with a seed and a link, under the virtual clock; its tasks must have ended by then or are cancelled."""

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []
            seed = WeightServer(lambda work: tasks.append(group.create_task(work)))
            await body(seed, Slow())
            for task in tasks:
                task.cancel()
        seed.close()

    run_virtual(main())


def test_a_peer_that_does_not_read_holds_one_chunk_and_then_loses_its_link(folder: Path) -> None:
    async def body(seed: WeightServer, link: Slow) -> None:
        model = await seed.add(folder)
        for _ in range(MAX_WAITING):
            seed.on_want(want(model, "model.norm.weight"), cast(Link, link))
        await asyncio.sleep(1)
        assert len(link.sent) == 1 and not link.is_closed
        other = Slow(NodeId("bb" * 32))
        other.may_leave.set()
        seed.on_want(want(model, "model.norm.weight"), cast(Link, other))
        await asyncio.sleep(1)
        assert len(other.sent) == 1, "others are served meanwhile"
        await asyncio.sleep(seeding.SEND_S)
        assert link.aborted is not None and "did not leave" in link.aborted

    with_seed(body)


def test_a_peer_that_asks_too_much_at_once_loses_its_link(folder: Path) -> None:
    async def body(seed: WeightServer, link: Slow) -> None:
        model = await seed.add(folder)
        for _ in range(MAX_WAITING + 1):
            assert not link.is_closed
            seed.on_want(want(model, "model.norm.weight"), cast(Link, link))
        assert link.aborted == f"more than {MAX_WAITING} requests for weights wait"
        await asyncio.sleep(1)
        assert link.sent == [] and seed._waiting == {}

    with_seed(body)


def test_single_bytes_are_given_at_the_pace_of_what_is_read_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of a byte has half a megabyte read and hashed: 600 KB of them a second took a core."""
    size = len(read_shared_model(folder)[1].tensors["lm_head.weight"])
    assert size <= BLOCK_BYTES
    monkeypatch.setattr(seeding, "WASTE_BPS", size)  # one a second

    async def body(seed: WeightServer, link: Slow) -> None:
        model, other, honest = await seed.add(folder), Slow(NodeId("bb" * 32)), Slow(NodeId("cc" * 32))
        for each in (link, other, honest):
            each.may_leave.set()
        for _ in range(8):
            for each, length in ((link, 1), (other, 1), (honest, size)):
                seed.on_want(want(model, "lm_head.weight", 0, length), cast(Link, each))
        await asyncio.sleep(6.5)
        assert len(link.sent) + len(other.sent) in (7, 8), "both share it"
        assert len(honest.sent) == 8
        assert not link.is_closed

    with_seed(body)


def test_what_is_read_is_what_is_said_to_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)
    stretch = read_shared_model(folder)[1].tensors["lm_head.weight"]
    stretch.read(0, 1)
    counts: list[int] = []
    read = ProvenStretch._read

    def counted(self: ProvenStretch, start: int, end: int) -> bytes:
        counts.append(end - start)
        return read(self, start, end)

    monkeypatch.setattr(ProvenStretch, "_read", counted)
    for offset, length in (
        (0, 1),
        (999, 2),
        (1000, 1000),
        (500, 1000),
        (len(stretch) - 1, 1),
        (len(stretch), 5),
        (0, 1 << 20),
    ):
        counts.clear()
        stretch.read(offset, length)
        assert sum(counts) == stretch.reads(offset, length)


def test_damage_is_told_once(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each request for it wrote a line, as fast as a peer asks."""
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    entry = next(entry for entry in read_entries(damaged) if entry.name == "model.norm.weight")

    async def body(seed: WeightServer, link: Slow) -> None:
        link.may_leave.set()
        model = await seed.add(damaged)
        with (damaged / SINGLE).open("r+b") as file:
            file.seek(entry.start)
            file.write(b"\xff" * 8)
        for _ in range(5):
            seed.on_want(want(model, "model.norm.weight"), cast(Link, link))
        await asyncio.sleep(1)
        assert len(link.sent) == 5

    with_seed(body)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_refusals_name_their_code(folder: Path) -> None:
    async def body(seed: WeightServer, link: Slow) -> None:
        link.may_leave.set()
        model = await seed.add(folder)
        for request in (want(ModelId("ab" * 32), "x"), want(model, "x"), want(model, "model.norm.weight", 1 << 60)):
            seed.on_want(request, cast(Link, link))
        await asyncio.sleep(1)
        assert link.sent == [
            WeightsNotFound(1, "bad_model"),
            WeightsNotFound(1, "bad_model"),
            WeightsNotFound(1, "bad_request"),
        ]

    with_seed(body)


def test_reading_happens_off_the_event_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[str] = []
    read = ProvenStretch._read

    def noted(stretch: ProvenStretch, start: int, end: int) -> bytes:
        readers.append(threading.current_thread().name)
        return read(stretch, start, end)

    monkeypatch.setattr(ProvenStretch, "_read", noted)

    async def body(seed: WeightServer, link: Slow) -> None:
        link.may_leave.set()
        model = await seed.add(folder)
        for _ in range(3):
            seed.on_want(want(model, "model.norm.weight"), cast(Link, link))
        await asyncio.sleep(1)
        assert len(readers) == 4, "one to prove it, then one for each"
        assert all(name.startswith("seed") for name in readers)

    with_seed(body)


def test_links_to_gguf_files_are_followed_in_our_own_folders_only(tmp_path: Path, home: Path) -> None:
    file, _ = tiny_gguf("qwen2", tmp_path / "model.gguf", "Q8_0", layers=1)
    own = gguf_folder(file, home)
    model, shared = read_shared_model(own)
    assert len(shared.tensors) == len(read_entries(own)) > 0
    copied = shutil.copytree(own, tmp_path / "downloaded", symlinks=True)
    model_too, given = read_shared_model(copied)
    assert model_too == model and not given.tensors
