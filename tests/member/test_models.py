"""Every member answers for every model of its swarm: listed from the records, loaded when asked for, within --memory."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from manyhands.api.gateway import BRING_S, Gateway, OfferedModel
from manyhands.checkpoint.manifest import Silent
from manyhands.core import SamplingParams, Span
from manyhands.errors import ExperimentalDisabled, ModelNotFound, ShardUnavailable
from manyhands.member.hosting import Hosting
from manyhands.member.models import SwarmModels
from manyhands.member.providers import providers_of
from manyhands.member.view import missing_spans
from manyhands.member.weights import kinds_of, weights_in
from manyhands.origin import Origin, OriginModel
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.worker.execute import Device
from tests.member.members import TOKENS, Town, room_for, town

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPT = tuple(range(3, 20))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [make_tiny("llama", base / "one", layers=4, seed=3), make_tiny("qwen3", base / "two", layers=4, seed=4)]


async def joined(place: Town, index: int, name: str, home: Path, **changes: object) -> tuple[Hosting, Device]:
    """A member that hosts what it could of model `name`, all of it from the others, and has no ends."""
    member = await place.open(index, **changes)
    kind = next(kind for kind in kinds_of(member.records()) if kind.name == name)
    weights = await weights_in(kind, providers_of(member, member.records()), home, Silent())
    if "span" not in changes:  # --memory for two layers and not a byte more
        object.__setattr__(member.config, "memory_bytes", room_for(weights, 2))
    device = Device.start(1)
    place.stack.callback(device.close)
    hosting = Hosting(member, weights, device, home, Silent(), place.said.append, with_ends=False)
    await hosting.start()
    return hosting, device


def models_of(hosting: Hosting, device: Device, home: Path) -> SwarmModels:
    member = hosting.member

    async def make(model: OriginModel, fetch: object) -> Origin:
        return Origin(member.node, model, device, (), member.directory)

    return SwarmModels(hosting, device, home, Silent, make)


async def covered(origin: Origin) -> None:
    async with asyncio.timeout(60):
        while not origin.routes.is_covered():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))


def test_a_member_that_joined_answers_for_both_models_of_the_swarm(folders: list[Path], tmp_path: Path) -> None:

    async def scene() -> None:
        async with town(folders[0], tmp_path) as place:
            one = await place.host(0)
            place.folder = folders[1]
            await place.host(1)
            hosting, device = await joined(place, 2, "one", tmp_path / "joined", span=Span(1, 3))
            models = models_of(hosting, device, tmp_path / "joined")
            gateway = Gateway({}, others=models)
            offered: Mapping[str, OfferedModel] = gateway.models
            assert set(offered) == {"one", "two"} and offered["two"].num_layers == 4
            assert offered["one"].is_covered and offered["one"].id == one.kind.model
            with pytest.raises(ModelNotFound, match="there is one, two"):
                gateway.origin("three")
            await gateway.bring("three")
            assert not gateway.origins
            await gateway.bring("two")
            assert set(gateway.origins) == {"two"} and not hosting.with_ends, "no other is fetched and loaded"
            await gateway.bring("one:latest")
            assert set(gateway.origins) == {"one", "two"} and not gateway.refused and hosting.with_ends
            for index, name in enumerate(("one", "two")):
                here, first = gateway.origin(name), Town.origin
                place.folder = folders[index]
                theirs = first(place, one.member)
                await covered(here)
                await covered(theirs)
                texts = [await o.complete(o.request_ids(PROMPT, PARAMS)) for o in (here, theirs)]
                assert texts[0].token_ids == texts[1].token_ids and len(texts[0].token_ids) == PARAMS.max_tokens

    run_virtual(scene())


def test_ends_beyond_the_memory_are_refused_by_name(folders: list[Path], tmp_path: Path) -> None:

    async def scene() -> None:
        async with town(folders[0], tmp_path) as place:
            await place.host(0)
            hosting, device = await joined(place, 1, "one", tmp_path / "joined")
            gateway = Gateway({}, others=models_of(hosting, device, tmp_path / "joined"))
            await gateway.bring("one")
            assert not gateway.origins and not hosting.with_ends
            assert "its embedding and head take" in gateway.refused["one"] and "--api" in gateway.refused["one"]
            assert not missing_spans(hosting.kind, hosting.member.records()) and hosting.budget.tokens == TOKENS

    run_virtual(scene())


def test_a_model_that_is_loaded_again_counts_once(folders: list[Path], tmp_path: Path) -> None:
    """Memory is there for its ends and half of them again; each time before it was given up as one with a bad tokenizer."""

    async def scene() -> None:
        async with town(folders[0], tmp_path) as place:
            await place.host(0)
            place.folder = folders[1]
            other = await place.host(1)
            hosting, device = await joined(place, 2, "one", tmp_path / "joined", span=Span(1, 3))
            missing = other.weights.shape.ends_bytes * 3 // 2 - hosting.budget.left_bytes(hosting.held)
            object.__setattr__(hosting.member.config, "memory_bytes", hosting.member.config.memory_bytes + missing)
            now = [0.0]
            gateway = Gateway({}, others=models_of(hosting, device, tmp_path / "joined"), clock=lambda: now[0])
            for _ in range(3):
                await gateway.bring("two")
                assert "two" in gateway.origins, gateway.refused
                gateway.refuse("two", "its chat template cannot be used")
                now[0] += BRING_S + 1

    run_virtual(scene())


def test_a_node_that_serves_no_layer_now_answers_for_its_model_unless_it_is_switched_off(
    folders: list[Path], tmp_path: Path
) -> None:
    """Switched off it says so, and loads nothing; on again it loads, also while its spans are drained for a move."""

    async def scene() -> None:
        async with town(folders[0], tmp_path) as place:
            await place.host(0)
            hosting, device = await joined(place, 1, "one", tmp_path / "joined", span=Span(1, 3))
            gateway = Gateway({}, others=models_of(hosting, device, tmp_path / "joined"))
            off = "n1 is switched off, so it serves nothing: `manyhands switch on`"
            assert off not in hosting.view()["warnings"]
            hosting.member.switch(on=False)
            assert off in hosting.view()["warnings"]
            with pytest.raises(ExperimentalDisabled, match="is switched off: `manyhands switch on`"):
                await gateway.bring("one")
            assert not gateway.origins and not gateway.refused and not hosting.with_ends
            hosting.member.switch(on=True)
            for host in hosting.member.node.hosts:
                host.drain()
            assert not hosting.held
            await gateway.bring("one")
            assert set(gateway.origins) == {"one"} and not gateway.refused

    run_virtual(scene())


class Failing:
    """Offers one model, which cannot be loaded."""

    own = ""

    def __init__(self) -> None:
        self.loads = 0

    def offered(self) -> dict[str, OfferedModel]:
        return {"gone": OfferedModel("ab" * 32, "bf16", 4, 128)}  # type: ignore[arg-type]

    async def load(self, name: str) -> Origin:
        self.loads += 1
        raise ShardUnavailable("no node has its tokenizer")


def test_what_failed_is_not_tried_again_at_once() -> None:
    """Requests for models that do not exist cost nothing."""
    now = [100.0]
    others = Failing()
    gateway = Gateway({}, others=others, clock=lambda: now[0])

    async def scene() -> None:
        for _ in range(5):
            await gateway.bring("gone")
        assert others.loads == 1 and gateway.refused == {"gone": "no node has its tokenizer"}
        now[0] += BRING_S + 1
        await gateway.bring("gone")
        assert others.loads == 2

    asyncio.run(scene())
