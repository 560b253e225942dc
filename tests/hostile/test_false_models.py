"""A member may offer any number of models, with any files: what that costs a gateway, and requests for other models.

Records are signed by made-up keys, as in test_directory.py. Tokenizers are files from outside: one can make a letter take a
minute, or a gigabyte.
"""

import asyncio
import json
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from manyhands.api.formats import ModelFormats
from manyhands.api.gateway import MAX_BRINGING, MAX_MODELS, Gateway, OfferedModel
from manyhands.api.native.swarm import SHOWN_S, swarm_router
from manyhands.api.run import Caller
from manyhands.checkpoint.folder import MANIFEST
from manyhands.checkpoint.manifest import Silent as NoProgress
from manyhands.checkpoint.manifest import build_manifest
from manyhands.cli.reporter import MOST_LINES, NodeLines, Reporter
from manyhands.config import BalanceConfig, LimitsConfig
from manyhands.core import ModelId, NodeAddr, NodeId, Span, SpanInfo, SpanLoad
from manyhands.errors import BadRequest, ModelError, ModelNotFound, RateLimited, ShardUnavailable, WeightsMismatch
from manyhands.member.neighbours import say_not_admitted
from manyhands.member.view import MAX_HOLDINGS, MAX_NODES, SwarmSnapshot, linked_of, missing_spans, view_of
from manyhands.member.weights import MAX_KINDS, ServedModel, known_kinds, weights_in, weights_of
from manyhands.origin import Origin
from manyhands.place.balance import LoadHistory, decide, may_leave
from manyhands.place.strategy import Holding, coverage
from manyhands.swarm.gossip import MAX_RECORDS
from manyhands.swarm.record import MAX_LAYERS, Record
from manyhands.swarm.record_store import MAX_NOTES
from manyhands.testing.clock import run_virtual
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.text.tokenizer import load_tokenizer
from manyhands.text.tokenizer_parts import check_decoder, is_plain
from manyhands.weights.provider import STALL_S, ProviderError
from tests.api.served import MODEL, Served, make_model, post, raw_slowly, served
from tests.swarm.records import NOW, info_of, node_of, record_of
from tests.waiting import GUARD_S

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_CPU_S = 2.0


def model_id(number: int) -> ModelId:
    return ModelId(f"{number:064x}")


def forged(count: int) -> list[Record]:
    """Records of so many models that there are not, each of as many layers as a record may state."""
    return [of_no_node(i, info_of(0, MAX_LAYERS, num_layers=MAX_LAYERS, model=model_id(i))) for i in range(count)]


def of_no_node(number: int, info: SpanInfo) -> Record:
    """A record of a node that there is not."""
    node = NodeId(f"{number:064x}")
    return replace(record_of(1), node=node, name=f"x{number}", addresses=(NodeAddr("10.6.6.6", 66, node),), info=info)


# -- the directory ----------------------------------------------------------------------------------------------------


def test_a_directory_of_false_models_is_looked_at_once() -> None:
    """GET /v1/models and /api/swarm compared each record with each model, layer by layer: minutes, and gigabytes."""
    honest = record_of(0, info=info_of(0, 24))
    records = [*forged(MAX_RECORDS - 1), honest]
    began = time.thread_time()
    known = known_kinds(records, lambda node: node == honest.node)
    assert len(known) == MAX_KINDS and next(iter(known)).model == honest.info.model  # type: ignore[union-attr]
    told = view_of(SwarmSnapshot("home", node_of(0), NOW, records, {}, {}))
    assert len(told["nodes"]) == MAX_NODES and len(told["models"]) == MAX_KINDS
    assert told["models"][0]["id"] == honest.info.model  # type: ignore[union-attr]
    assert any(node["is_me"] for node in told["nodes"])
    assert f"{MAX_RECORDS - MAX_NODES} more nodes are known" in " ".join(told["warnings"])
    assert len(json.dumps(told)) < 4 << 20 and time.thread_time() - began < MAX_CPU_S


def test_a_model_that_all_claim_costs_no_more() -> None:
    info = info_of(0, MAX_LAYERS, num_layers=MAX_LAYERS)
    records = [of_no_node(i, info) for i in range(MAX_RECORDS)]
    kind = ServedModel(info.model, info.model_name, info.precision)
    began = time.thread_time()
    assert not missing_spans(kind, records)
    view_of(SwarmSnapshot("home", node_of(0), NOW, records, {}, {}))
    assert time.thread_time() - began < MAX_CPU_S


def test_more_layers_than_a_config_may_have_are_no_record() -> None:
    with pytest.raises(BadRequest, match="layers"):
        record_of(1, info=info_of(0, 1, num_layers=MAX_LAYERS + 1))


def test_nodes_that_come_and_go_are_told_in_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Each false record was a line of the terminal, when it came and when it went, and one that was kept for ever."""
    now = [0.0]
    lines = NodeLines(Reporter(as_json=False), lambda: now[0])
    for number in range(5000):
        lines("came", f"x{number} has joined", node=node_of(1))
    assert len(capsys.readouterr().out.splitlines()) == MOST_LINES
    now[0] += 2.5
    for number in range(5):
        lines("gone", f"x{number} has left")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and f"{5000 - MOST_LINES} more lines" in said[0] and said[1] == "x0 has left"


def test_nodes_that_are_kept_out_are_few_lines() -> None:
    info = info_of(0, 1)
    assert len(say_not_admitted((of_no_node(i, info) for i in range(MAX_RECORDS)), "lan")) == MAX_NOTES


def test_coverage_counts_overlaps() -> None:
    held = [Holding(node_of(1), Span(0, 3)), Holding(node_of(2), Span(2, 9)), Holding(node_of(3), Span(20, 30))]
    assert coverage(held, 5) == [1, 1, 2, 1, 1] and coverage([], 2) == [0, 0]


def test_many_who_ask_for_the_view_share_one(tmp_path: Path) -> None:
    made = 0

    async def view() -> dict[str, Any]:
        nonlocal made
        made += 1
        await asyncio.sleep(2 * SHOWN_S)  # of a large swarm, on a busy machine
        return {"nodes": []}

    async def main() -> None:
        (route,) = swarm_router(view).routes
        for number in (1, 2):
            answers = await asyncio.gather(*(route.endpoint() for _ in range(50)))  # type: ignore[attr-defined]
            assert {answer.body for answer in answers} == {b'{"nodes":[]}'} and made == number
            await asyncio.sleep(SHOWN_S)

    run_virtual(main())


# -- models that are offered ------------------------------------------------------------------------------------------


class Offering:
    """Other models: "good", and many that never come."""

    own = ""

    def __init__(self, origin: Origin | None = None) -> None:
        self.asked: list[str] = []
        self._origin, self._names = origin, ["good", *(f"bad{i}" for i in range(8))]

    def offered(self) -> dict[str, OfferedModel]:
        return {name: OfferedModel(model_id(i), "bf16", 4, 128) for i, name in enumerate(self._names)}

    async def load(self, name: str) -> Origin:
        self.asked.append(name)
        if name == "gone":
            raise ShardUnavailable("gone")
        if name != "good":
            await asyncio.Event().wait()  # its provider never ends
        assert self._origin is not None
        return self._origin


def test_models_that_never_come_hold_up_no_other(tmp_path: Path) -> None:
    """One request for one model loaded all that were offered, one after another: a false one kept all others waiting."""

    async def main() -> None:
        async with memory_swarm(make_model(tmp_path / "m"), "0,1") as swarm:
            others = Offering(swarm.origin)
            gateway = Gateway({}, others=others)
            stuck = [asyncio.create_task(gateway.bring(f"bad{i}")) for i in range(MAX_BRINGING - 1)]
            await asyncio.sleep(0)
            async with asyncio.timeout(GUARD_S):
                await gateway.bring("good")
            assert set(gateway.origins) == {"good"} and sorted(others.asked) == ["bad0", "bad1", "bad2", "good"]
            stuck.append(asyncio.create_task(gateway.bring("bad7")))
            await asyncio.sleep(0)
            with pytest.raises(RateLimited, match="models are being loaded"):
                await gateway.bring("bad6")
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
            assert not any(lock.locked() for lock in gateway._bringing.values())

    asyncio.run(main())


class Endless:
    """Offers any number of models, each of which loads at once."""

    own = "own"

    def __init__(self, count: int) -> None:
        self._names = ["own", *(f"m{i}" for i in range(count))]

    def offered(self) -> dict[str, OfferedModel]:
        return {name: OfferedModel(model_id(i), "bf16", 4, 128) for i, name in enumerate(self._names)}

    async def load(self, name: str) -> Origin:
        return cast(Origin, object())


def test_a_gateway_loads_a_bounded_number_of_models() -> None:
    """Each stayed for good, with its tokenizer and its metrics: a member that offered small ones could fill the memory."""

    async def main() -> None:
        gateway = Gateway({}, others=Endless(MAX_MODELS + 5))
        for number in range(MAX_MODELS):
            await gateway.bring(f"m{number}")
        for number in range(MAX_MODELS, MAX_MODELS + 5):
            with pytest.raises(ModelNotFound, match=f"no more than {MAX_MODELS}: ask another member for 'm{number}'"):
                await gateway.bring(f"m{number}")
        await gateway.bring("m0")
        assert len(gateway.origins) == MAX_MODELS
        await gateway.bring("own")
        assert "own" in gateway.origins, "what this machine hosts has a place of its own"

    asyncio.run(main())


def test_loading_a_model_is_charged_on_every_path() -> None:
    async def main() -> None:
        gateway = Gateway({}, LimitsConfig(requests_per_minute=1), others=Offering())
        for expected in (TimeoutError, RateLimited):
            with pytest.raises(expected):
                async with asyncio.timeout(0.05):
                    await gateway.ensure("bad1", Caller(name="k"))

    asyncio.run(main())


def test_a_model_with_a_broken_template_breaks_no_other(tmp_path: Path) -> None:
    """What a model's files say was found out for all models at once: one that could not be read ended every request."""
    broken = make_model(tmp_path / "broken", "{% for %}")

    async def main() -> None:
        async with served(make_model(tmp_path / "m")) as it, memory_swarm(broken, "0,1") as other:
            it.gateway.origins["broken"] = other.origin
            formats = ModelFormats(it.gateway)
            await formats.open()
            status, said = await raw_slowly(
                it, post(TEXT, json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2}).encode())
            )
            assert status == 200, said[-300:]
            if "broken" not in it.gateway.origins:
                with pytest.raises(ModelNotFound, match="cannot be used"):
                    formats.known("broken")
            await formats.close()

    asyncio.run(main())


class Holder:
    """A provider: of a model, or silent."""

    def __init__(self, number: int, files: dict[str, bytes] | None) -> None:
        self.node, self.name, self._files = node_of(number), f"x{number}", files

    async def file(self, model: ModelId, name: str) -> bytes | None:
        if self._files is None:
            await asyncio.sleep(STALL_S)
            raise ProviderError("stalled", "no answer")
        return self._files.get(name)

    def read(self, *_: object) -> Any:
        raise AssertionError("nothing is fetched here")


def test_silent_holders_of_a_model_do_not_hold_up_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were asked one after another, 20 s each: 64 made-up records of a model kept who joined waiting for 21 minutes."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    folder = make_model(tmp_path / "m")
    manifest = build_manifest(folder)
    files = {MANIFEST: manifest.encode(), "config.json": (folder / "config.json").read_bytes()}
    silent, wrong = Holder(1, None), Holder(2, {**files, MANIFEST: b"{}"})
    holders: list[Any] = [*[silent] * 30, wrong, Holder(3, files)]
    kind = ServedModel(manifest.id, "m", "bf16")

    async def main() -> float:
        began = asyncio.get_running_loop().time()
        assert (await weights_in(kind, holders, tmp_path, NoProgress())).id == manifest.id
        with pytest.raises(ShardUnavailable, match="9 asked"):
            await weights_in(kind, [silent] * 8 + [wrong], tmp_path, NoProgress())
        return asyncio.get_running_loop().time() - began

    assert run_virtual(main()) < 6 * STALL_S


@pytest.mark.parametrize("config", [b"", b"{", b"\xff", b"[]", b"[" * 99, b'{"a": NaN}', b"{}" + bytes(5 << 20)])
def test_a_holder_that_gives_another_config_keeps_no_node_from_what_a_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: bytes
) -> None:
    """The right manifest, which anyone has, and bytes that are no config.json: who joined was told that the model is bad."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    folder = make_model(tmp_path / "m")
    manifest = build_manifest(folder)
    files = {MANIFEST: manifest.encode(), "config.json": (folder / "config.json").read_bytes()}
    holders: list[Any] = [Holder(1, {**files, "config.json": config}), Holder(2, files)]
    kind = ServedModel(manifest.id, "m", "bf16")
    assert run_virtual(weights_in(kind, holders, tmp_path, NoProgress())).id == manifest.id
    with pytest.raises(ShardUnavailable, match="1 asked"):
        run_virtual(weights_in(kind, holders[:1], tmp_path, NoProgress()))


# -- tokenizers -------------------------------------------------------------------------------------------------------


def hostile(folder: Path, change: Callable[[Any], None]) -> Path:
    """A model whose tokenizer was changed."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(backend)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def slow(backend: Any) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"(?:a|aa)+!|(?:a|b|ab)+?!|."), "isolated"), pre_tokenizers.ByteLevel()]
    )


def bloating(backend: Any) -> None:
    backend.normalizer = normalizers.Replace("a", "b" * (1 << 20))


def test_tokenizers_that_cost_too_much_cost_their_own_requests(tmp_path: Path) -> None:
    """8 KiB of letters were tokenised on the event loop: for ever, or into all memory."""
    folders = {change: hostile(make_model(tmp_path / change.__name__), change) for change in (slow, bloating)}

    async def ask(it: Served, **fields: Any) -> tuple[int, bytes]:
        return await raw_slowly(it, post(TEXT, json.dumps({"max_tokens": 1, **fields}).encode()))

    async def main() -> None:
        async with served(folders[slow]) as it, memory_swarm(folders[bloating], "0,1") as other:
            it.gateway.origins["bloating"] = other.origin
            it.gateway.parts[0].preparing._deadline_s = 0.5  # type: ignore[attr-defined]
            before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
            for model in (MODEL, "bloating"):
                status, said = await ask(it, model=model, prompt="a" * 3000)
                refusals = (b"too much memory", b"takes more than", b"tokenizer cannot read the text")
                assert status == 400 and any(each in said for each in refusals), said[-300:]
            assert time.thread_time() - began < MAX_CPU_S
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10
            it.gateway.parts[0].preparing._deadline_s = 30.0  # type: ignore[attr-defined]
            status, said = await ask(it, model=MODEL, prompt=[65, 66])
            assert status == 200, said[-300:]

    asyncio.run(main())


def test_what_is_plain_is_known_by_name(tmp_path: Path) -> None:
    plain = load_tokenizer(make_model(tmp_path / "m")).backend_tokenizer
    assert is_plain(plain)
    for change in (slow, bloating):
        backend = Tokenizer.from_str(plain.to_str())
        change(backend)
        assert not is_plain(backend)


@pytest.mark.parametrize("decoder", [decoders.Replace("a", "b" * 99), decoders.Replace(Regex("(a|aa)+$"), "b")])
def test_a_decoder_that_bloats_is_refused_when_it_is_loaded(decoder: Any, tmp_path: Path) -> None:
    """Tokens become text one by one on the event loop."""
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoder])
    with pytest.raises(ModelError, match="decoder"):
        check_decoder(backend)

    def change(backend: Any) -> None:
        backend.decoder = decoder

    with pytest.raises(ModelError, match="decoder"):
        load_tokenizer(hostile(make_model(tmp_path / "m"), change))


@pytest.mark.parametrize("place", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("key", ["normalizer", "normali\\u007aer"])
def test_normalizers_cannot_end_the_process_that_loads_them(place: str, key: str, tmp_path: Path) -> None:
    """Added tokens are normalised by the library while it loads them: of "x" came 10 ** 12 characters, and SIGABRT."""
    folder = make_tiny("llama", tmp_path / "tiny", layers=1)
    body = json.loads((folder / "tokenizer.json").read_text())
    token = {
        "content": "x",
        "normalized": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "special": False,
    }
    part = {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 100}
    body["normalizer"] = {"type": "Sequence", "normalizers": [part] * 6}
    if place == "tokenizer.json":
        body["added_tokens"].append({"id": 300, **token})
    else:
        config = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps({**config, "added_tokens_decoder": {"300": token}}))
    (folder / "tokenizer.json").write_text(json.dumps(body).replace('"normalizer"', f'"{key}"'))
    with pytest.raises(ModelError, match=r"normalizers that could make 1e\+12 characters of one"):
        load_tokenizer(folder)


def test_a_move_is_decided_in_a_moment_whatever_linked_nodes_state() -> None:
    """Fifty keys of a member are linked, with 64 spans each. What is weighed is bounded, and honest nodes are among it."""
    me, honest, load = NodeId("0" * 64), [NodeId(f"{i:064x}") for i in range(1, 6)], SpanLoad(layer_s=0.001)
    false = [
        Holding(NodeId(f"{1000 + node:064x}"), Span(start % 60, 60 + start % 7), load)
        for node in range(50)
        for start in range(64)
    ]
    held = [Holding(node, Span(60, 80), SpanLoad(layer_s=0.01)) for node in honest]
    mine = Holding(me, Span(0, 60), load)
    everything = [*false, *held, mine]
    weighed = linked_of(everything, me, {holding.node for holding in everything})
    assert len(weighed) == MAX_HOLDINGS and weighed[0] == mine and set(held) <= set(weighed)
    assert linked_of(everything, me, set(honest)) == [mine, *held]
    began = time.thread_time()
    decision = decide(mine, weighed, 80, LoadHistory(9), 1, 0.0, BalanceConfig())
    assert may_leave(mine, None, weighed)
    assert time.thread_time() - began < MAX_CPU_S
    assert decision.move is not None or "another node moves" in decision.why, "all that may move were looked at"


def test_a_model_of_the_same_name_keeps_no_node_from_its_own(tmp_path: Path) -> None:
    """One record of other weights, or of another precision, under the name of a model that the swarm serves."""

    async def main() -> None:
        own = await weights_of("tales", None, (), tmp_path, NoProgress())
        assert own.id is not None
        info = info_of(0, 12, num_layers=12, model=own.id, model_name="tales", precision=own.precision)
        honest = of_no_node(1, info)
        others = [of_no_node(number, replace(info, model=model_id(9))) for number in range(2, 5)]
        coarse = [of_no_node(number, replace(info, precision="w4")) for number in range(5, 8)]
        for records in ([*others, honest], [honest, *coarse], [*others, *coarse, honest]):
            found = await weights_of(
                "tales", None, records, tmp_path, NoProgress(), is_linked=lambda node: node == honest.node
            )
            assert (found.id, found.precision) == (own.id, own.precision)
        with pytest.raises(WeightsMismatch, match="serves another tales"):
            await weights_of("tales", None, others, tmp_path, NoProgress())
        with pytest.raises(WeightsMismatch, match="in w4, not bf16"):
            await weights_of("tales", "bf16", coarse, tmp_path, NoProgress())

    asyncio.run(main())
