"""Seeders of weights that answer as they like, drawn by seeds: what is fetched is right, in memory that has a bound, and an
honest seeder does the work of those that are dropped."""

import asyncio
import random
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from manyhands.checkpoint.folder import MANIFEST, read_entries
from manyhands.checkpoint.manifest import build_manifest
from manyhands.core import Span
from manyhands.errors import LinkClosed, ManyhandsError, ShardUnavailable
from manyhands.net.transport import Link
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.weights import provider
from manyhands.weights.download import Need, Pulled, pull
from manyhands.weights.provider import STALL_S
from manyhands.weights.seed import WeightServer, read_want
from manyhands.wire.weights_message import MAX_CHUNK_BYTES, WeightRequest, WeightsChunk, WeightsNotFound
from tests.weights.test_seed import check_holds, swarm

CHUNK = 4096  # that tensors are asked for by, so that each takes several
MAX_FILE = 3 << 20
LIMIT_S = 6 * 3600.0  # virtual
# Of all nodes: what is under way to the asker from six seeders, 16 answers of a MiB each at most, and to whom it is copied.
MAX_PEAK = 400 << 20
HUGE = (0, 1, CHUNK, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


class Seeder:
    """Answers requests in ways that `chance` draws, of `ways` or of all; the truth of what `seed` holds among them."""

    def __init__(self, seed: WeightServer, chance: random.Random, ways: list[str]) -> None:
        self._seed, self._chance, self._ways = seed, chance, ways
        self._others = [0]  # numbers of requests
        self.done = set[str]()

    def on_want(self, want: WeightRequest, link: Link) -> None:
        self._seed._start(self._answer(want, link))

    async def _answer(self, want: WeightRequest, link: Link) -> None:
        way = self._chance.choice(self._ways)
        try:
            truth = read_want(self._seed._models.get(want.model), want)
        except ManyhandsError:
            with suppress(LinkClosed):
                link.send(WeightsNotFound(want.request, "model_not_found"))
            return
        self.done.add(way)
        self._others.append(want.request)
        with suppress(LinkClosed):  # by another answer
            await WAYS[way](self, want, link, truth)

    # -- ways ---------------------------------------------------------------------------------------------------------

    async def truth(self, want: WeightRequest, link: Link, data: bytes) -> None:
        link.send(WeightsChunk(want.request, want.offset, data))

    async def silence(self, want: WeightRequest, link: Link, data: bytes) -> None:
        pass

    async def absence(self, want: WeightRequest, link: Link, data: bytes) -> None:
        link.send(WeightsNotFound(want.request, self._chance.choice(["model_not_found", "", "\n" * 50, "x" * 4000])))

    async def length(self, want: WeightRequest, link: Link, data: bytes) -> None:
        longer = data + bytes(self._chance.randrange(1, 9))
        link.send(
            WeightsChunk(
                want.request, want.offset, self._chance.choice([b"", data[:-1], longer, bytes(MAX_CHUNK_BYTES)])
            )
        )

    async def bits(self, want: WeightRequest, link: Link, data: bytes) -> None:
        wrong = bytearray(data)
        wrong[self._chance.randrange(len(wrong))] ^= 1 << self._chance.randrange(8)
        link.send(WeightsChunk(want.request, want.offset, bytes(wrong)))

    async def place(self, want: WeightRequest, link: Link, data: bytes) -> None:
        """Far away, before the beginning (as a number without a sign), or within what was given before."""
        by = self._chance.choice([-1, 1, -CHUNK, CHUNK // 2])
        where = self._chance.choice([*HUGE, (want.offset + by) % (1 << 64)])
        link.send(WeightsChunk(want.request, where, data))

    async def number(self, want: WeightRequest, link: Link, data: bytes) -> None:
        """Of another request: one that is under way, or one that never was."""
        number = self._chance.choice([*self._others, (1 << 32) - 1])
        link.send(WeightsChunk(number, want.offset, data))

    async def twice(self, want: WeightRequest, link: Link, data: bytes) -> None:
        for _ in range(3):
            link.send(WeightsChunk(want.request, want.offset, data))

    async def drip(self, want: WeightRequest, link: Link, data: bytes) -> None:
        await asyncio.sleep(STALL_S * self._chance.choice([0.5, 0.95, 1.5]))
        link.send(WeightsChunk(want.request, want.offset, data))

    async def flood(self, want: WeightRequest, link: Link, data: bytes) -> None:
        for _ in range(8):
            link.send(WeightsChunk(self._chance.randrange(1 << 32), 0, bytes(MAX_CHUNK_BYTES)))
            await link.drain()

    async def endless(self, want: WeightRequest, link: Link, data: bytes) -> None:
        """A file that does not end; of a tensor as many bytes as were asked for, of another place of it."""
        link.send(WeightsChunk(want.request, want.offset, bytes(want.length)))

    async def end(self, want: WeightRequest, link: Link, data: bytes) -> None:
        link.abort("enough")


Way = Callable[[Seeder, WeightRequest, Link, bytes], Awaitable[None]]
WAYS: dict[str, Way] = {
    "truth": Seeder.truth,
    "silence": Seeder.silence,
    "absence": Seeder.absence,
    "length": Seeder.length,
    "bits": Seeder.bits,
    "place": Seeder.place,
    "number": Seeder.number,
    "twice": Seeder.twice,
    "drip": Seeder.drip,
    "flood": Seeder.flood,
    "endless": Seeder.endless,
    "end": Seeder.end,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "llama", layers=3, seed=4)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "manifests"))
    monkeypatch.setattr(provider, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(provider, "MAX_FILE_BYTES", MAX_FILE)
    return tmp_path / "home"


def fetched(folder: Path, home: Path, ways: list[list[str]], seed: int, *, is_one_honest: bool) -> Pulled:
    """What is pulled from seeders, of which each has its ways, and from an honest one. Every way is taken at least once."""
    model = build_manifest(folder).id

    async def main() -> Pulled:
        names = [f"n{number}" for number in range(len(ways) + is_one_honest)]
        async with swarm(*names) as (_, nodes, peers):
            seeders = []
            for node in nodes:
                await node.seed.add(folder)
            for number, (node, own) in enumerate(zip(nodes, ways, strict=False)):
                seeders.append(Seeder(node.seed, random.Random(f"{seed} {number}"), own))
                node.seed.on_want = seeders[-1].on_want  # type: ignore[method-assign]
            try:
                return await pull(Need(model, Span(0, 2), with_ends=True, with_files=True), peers, home)
            finally:
                assert any(seeder.done for seeder in seeders), "none was asked"

    tracemalloc.start()
    try:
        return run_virtual(main(), limit_s=LIMIT_S)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_PEAK, peak
        check_tree(home, model)


def check_tree(home: Path, model: str) -> None:
    """Nothing lies outside the model's folder, and nothing in it that no model has; what counts as there is right."""
    around = {path.relative_to(home.parent).parts[0] for path in home.parent.iterdir()}
    assert around <= {"home", "manifests"}, around
    assert {path.name for path in (home / "models").iterdir()} <= {model}
    for path in home.rglob("*"):
        assert path.is_dir() or (not path.is_symlink() and path.parent == home / "models" / model), path


@pytest.mark.parametrize("way", [way for way in WAYS if way != "truth"])
def test_seeders_of_one_way_do_not_keep_weights_from_coming(folder: Path, home: Path, way: str) -> None:
    """Two that always do it, before an honest one."""
    pulled = fetched(folder, home, [[way], [way]], 0, is_one_honest=True)
    check_holds(pulled.folder, folder)
    assert len(pulled.blamed) <= 2


@pytest.mark.parametrize("seed", range(6))
def test_seeders_of_all_ways_do_not_keep_weights_from_coming(folder: Path, home: Path, seed: int) -> None:
    """Six that are mostly honest, or never: each draws a few ways. The honest one is never dropped for what they did."""
    chance = random.Random(seed)
    ways = [chance.sample(list(WAYS), chance.randrange(1, 5)) + ["truth"] * chance.choice([0, 3, 20]) for _ in range(6)]
    pulled = fetched(folder, home, ways, seed, is_one_honest=True)
    check_holds(pulled.folder, folder)
    assert "n6" not in {blame.name for blame in pulled.blamed}
    assert (pulled.folder / MANIFEST).is_file() and (pulled.folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("seed", range(3))
def test_without_an_honest_seeder_a_fetch_ends(folder: Path, home: Path, seed: int) -> None:
    """And nothing wrong counts as there."""
    chance = random.Random(seed)
    lies = ["length", "bits", "place", "endless", "end", "silence"]
    ways = [[chance.choice(lies), "bits"] + ["truth"] * 3 for _ in range(4)]
    try:
        pulled = fetched(folder, home, ways, seed, is_one_honest=False)
    except ShardUnavailable:
        kept = home / "models" / build_manifest(folder).id
        if (kept / MANIFEST).is_file() and list(kept.glob("*.safetensors")) and read_entries(kept):
            check_holds(kept, folder)
    else:
        check_holds(pulled.folder, folder)
