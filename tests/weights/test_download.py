"""Weights from peers: what is kept is what the ModelId says, whichever peer sent it, and wrong bytes are blamed."""

import asyncio
import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.checkpoint import store
from manyhands.checkpoint.folder import FILES, MANIFEST, RANKED, SINGLE, TOKENIZER, read_entries
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.header import LENGTH_BYTES, TensorEntry, parse_header
from manyhands.checkpoint.manifest import Manifest, TensorDigest, build_manifest, config_digest
from manyhands.checkpoint.partition import needed_tensors
from manyhands.checkpoint.split import split_model
from manyhands.core import ModelId, Span
from manyhands.errors import CutError, DiskFull, ModelError, ShardUnavailable
from manyhands.testing.clock import run_virtual
from manyhands.weights import download, workers
from manyhands.weights.asking import first_answer
from manyhands.weights.download import NEXT_S, Need, Pulled, layout, proven_config, pull
from manyhands.weights.hub_provider import HubProvider
from manyhands.weights.partial import PARTIAL
from manyhands.weights.provider import Lacking, Provider
from manyhands.weights.seed import MemoryFile
from manyhands.weights.workers import Blame
from tests.checkpoints import SPAN, check_holds
from tests.gguf_files import tiny_gguf
from tests.weights.hub_server import REPO, FakeHub, serving
from tests.weights.providers import FromDisk, Twist, after, honest, lack, lie, slow, stall, vanish


def need(source: Path, span: Span | None = SPAN, **more: Any) -> Need:
    return Need(build_manifest(source).id, span, **more)


def get(wanted: Need, providers: Sequence[Provider], home: Path, **more: Any) -> Pulled:
    return run_virtual(pull(wanted, providers, home, **more))


def faults(pulled: Pulled, *providers: FromDisk) -> list[str]:
    """What each provider is blamed for, "" if nothing."""
    by_node = {blame.node: str(blame.fault) for blame in pulled.blamed}
    return [by_node.get(provider.node, "") for provider in providers]


# -- what arrives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "sharded", "tied"])
@pytest.mark.parametrize("with_ends", [False, True])
def test_exactly_the_tensors_of_the_span_arrive(
    home: Path, request: pytest.FixtureRequest, kind: str, with_ends: bool
) -> None:
    source = request.getfixturevalue(kind)
    a, b = FromDisk("a", source), FromDisk("b", source)
    pulled = get(need(source, with_ends=with_ends), [a, b], home)
    names = check_holds(pulled.folder, source, with_ends=with_ends)
    assert names == set(needed_tensors(build_manifest(source).names, 6, SPAN, with_ends))
    assert sorted(a.asked + b.asked) == sorted(names), "each is asked for once"
    assert a.asked and b.asked, "both work"
    assert pulled.blamed == () and pulled.folder == home / "models" / build_manifest(source).id


def test_parts_of_several_nodes_make_a_whole(llama: Path, home: Path, tmp_path: Path) -> None:
    parts = split_model(llama, [Span(0, 2), Span(2, 6)], tmp_path / "parts")
    pulled = get(need(llama, None, with_ends=True), [FromDisk(part.name, part) for part in parts], home)
    check_holds(pulled.folder, llama, None, with_ends=True)
    assert pulled.blamed == (), "to lack something is no fault"


def test_a_second_span_joins_the_first(llama: Path, home: Path) -> None:
    first = get(need(llama), [FromDisk("a", llama)], home)
    before = check_holds(first.folder, llama)
    again = FromDisk("b", llama)
    second = get(need(llama, Span(3, 5)), [again], home)
    assert second.folder == first.folder
    assert set(again.asked) == check_holds(second.folder, llama, Span(2, 5)) - before


def test_no_peer_is_asked_when_all_is_here(llama: Path, home: Path) -> None:
    folder = get(need(llama), [FromDisk("a", llama)], home).folder
    assert get(need(llama), [], home).folder == folder


def test_a_manifest_is_not_read_on_the_loop(llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may name so many tensors that this takes seconds."""
    threads: dict[str, set[str]] = {}

    def note(of: Any, name: str, function: Callable[..., Any]) -> None:
        def noted(*args: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return function(*args)

        monkeypatch.setattr(of, name, noted)

    wanted, provider = need(llama), FromDisk("a", llama)
    note(Manifest, "decode", Manifest.decode)
    note(download, "layout", layout)
    get(wanted, [provider], home)
    get(wanted, [provider], home)
    assert threads == {"decode": {"pull_0"}, "layout": {"pull_0"}}


def test_a_pulled_folder_can_be_offered(llama: Path, home: Path, tmp_path: Path) -> None:
    first = get(need(llama, with_files=True), [FromDisk("a", llama)], home).folder
    second = get(need(llama, with_files=True), [FromDisk("b", first)], tmp_path / "other").folder
    check_holds(second, llama)


def test_a_span_outside_the_model_is_refused(llama: Path, home: Path) -> None:
    with pytest.raises(CutError, match="out of range"):
        get(need(llama, Span(4, 9)), [FromDisk("a", llama)], home)


def test_what_no_peer_has_is_named(llama: Path, home: Path, tmp_path: Path) -> None:
    (part, _) = split_model(llama, [Span(0, 3), Span(3, 6)], tmp_path / "parts")
    with pytest.raises(ShardUnavailable, match=r"no provider has tensor model\.layers\.3.*1 peers were asked"):
        get(need(llama), [FromDisk("a", part)], home)
    pulled = get(need(llama), [FromDisk("b", llama)], home)
    assert 0 < sum(pulled.received.values()) < sum(len(e) for e in read_entries(pulled.folder)), "what came was kept"


def test_without_peers_the_manifest_is_missing(home: Path) -> None:
    with pytest.raises(ShardUnavailable, match=r"no provider has manyhands\.json of model abab"):
        get(Need(ModelId("ab" * 32), None), [], home)


def test_progress_counts_every_byte_once(llama: Path, home: Path) -> None:
    class Bar:
        total, at, ended = 0, 0, 0

        def start(self, name: str, total: int) -> None:
            self.total += total

        def advance(self, amount: int) -> None:
            self.at += amount

        def done(self) -> None:
            self.ended += 1

    bar = Bar()
    pulled = get(need(llama), [FromDisk("a", llama), FromDisk("b", llama)], home, progress=bar)
    assert bar.at == bar.total == sum(pulled.received.values()) == sum(map(len, read_entries(pulled.folder)))
    assert bar.ended == 1


# -- hostile providers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("twist", "fault"),
    [
        (lie, "garbage"),
        (after(3, lie), "garbage"),
        (stall, "stalled"),
        (after(3, stall), "stalled"),
        (vanish, "lost"),
        (after(3, vanish), "lost"),
        (lack, ""),
    ],
    ids=["lies", "lies later", "stalls", "stalls later", "vanishes", "vanishes later", "lacks all"],
)
def test_a_bad_provider_is_dropped_and_blamed_and_the_good_one_does_its_work(
    llama: Path, home: Path, twist: Twist, fault: str
) -> None:
    async def only_tensors(name: str, at: int, data: bytes) -> bytes:
        return data if name.endswith(".json") else await twist(name, at, data)

    heard: list[Blame] = []
    bad, good = FromDisk("bad", llama, only_tensors), FromDisk("good", llama, slow(2.0))
    pulled = get(need(llama), [bad, good], home, on_blame=heard.append)
    check_holds(pulled.folder, llama)
    assert faults(pulled, bad, good) == [fault, ""]
    assert heard == list(pulled.blamed)


def test_a_provider_that_fails_at_once_does_not_hold_a_pull_up(llama: Path, home: Path) -> None:
    """As a node that could not be reached lately: its other workers are cancelled before they begin, and were counted on."""

    async def unreached(name: str, at: int, data: bytes) -> bytes:
        return data if name.endswith(".json") else await vanish(name, at, data)

    async def main() -> None:
        async with asyncio.timeout(60.0):
            await pull(need(llama), [FromDisk("gone", llama, unreached)], home)

    with pytest.raises(ShardUnavailable, match=r"no provider has tensor .* dropped: gone"):
        run_virtual(main())


def test_the_rest_of_a_tensor_comes_from_another(llama: Path, home: Path) -> None:
    """A provider that goes away in the middle has not worked in vain."""
    bad, good = FromDisk("bad", llama, after(9, vanish)), FromDisk("good", llama, slow(0.5))
    pulled = get(need(llama), [bad, good], home)
    check_holds(pulled.folder, llama)
    assert sum(pulled.received.values()) == sum(map(len, read_entries(pulled.folder)))


def test_a_bounded_number_of_providers_is_asked_at_once(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each record: with thousands of false ones as many dials, each to whatever address it names."""
    monkeypatch.setattr(download, "MAX_WORKING", 3)
    asked, counts = list[str](), list[int]()

    def vanishing(name: str) -> FromDisk:
        async def twist(tensor: str, at: int, data: bytes) -> bytes:
            if tensor.endswith(".json"):
                return data
            asked.append(name)
            counts.append(len(set(asked)))
            try:
                await asyncio.sleep(1.0)
            finally:
                asked.remove(name)
            return await vanish(tensor, at, data)

        return FromDisk(name, llama, twist)

    providers = [*(vanishing(f"false{number}") for number in range(12)), FromDisk("good", llama)]
    pulled = get(need(llama), providers, home)
    check_holds(pulled.folder, llama)
    assert max(counts) == 3 and faults(pulled, *providers) == ["lost"] * 12 + [""]


def test_a_tensor_that_is_noted_while_its_provider_goes_stays_as_it_is(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was fetched again, and counted as there meanwhile: so did the wrong bytes of the next provider."""
    noting, gone, mark = threading.Event(), threading.Event(), store.Store.mark
    noted: list[str] = []

    def slowly(self: store.Store, handle: BinaryIO, entry: TensorEntry) -> None:
        noting.set()
        assert gone.wait(10.0)
        mark(self, handle, entry)
        noted.append(entry.name)

    async def leave(name: str, at: int, data: bytes) -> bytes:
        if name not in first.asked[:1]:
            return data
        await asyncio.to_thread(noting.wait, 10.0)
        return await vanish(name, at, data)

    async def lie_again(name: str, at: int, data: bytes) -> bytes:
        await asyncio.to_thread(gone.wait, 10.0)
        return await (lie if name in noted else honest)(name, at, data)

    monkeypatch.setattr(store.Store, "mark", slowly)
    first, second = FromDisk("first", llama, leave), FromDisk("second", llama, lie_again)
    pulled = asyncio.run(pull(need(llama), [first, second], home, on_blame=lambda _: gone.set()))
    check_holds(pulled.folder, llama)
    assert faults(pulled, first, second) == ["lost", ""] and len(noted) == len(set(noted))


def test_a_lie_inside_a_mixed_tensor_is_found_out(llama: Path, home: Path) -> None:
    """A peer sends a wrong piece and leaves; the right one that completes the tensor is not blamed for it."""
    bad, good = FromDisk("bad", llama, after(8, vanish, before=lie)), FromDisk("good", llama, slow(0.5))
    pulled = get(need(llama), [bad, good], home)
    check_holds(pulled.folder, llama)
    assert faults(pulled, bad, good) == ["garbage", ""]
    assert any("wrong bytes 0 to" in blame.detail for blame in pulled.blamed)


def test_another_tensors_bytes_are_garbage(llama: Path, home: Path) -> None:
    """Two tensors of one shape, sent one for the other."""
    bad = FromDisk("bad", llama)
    held = bad.store.tensors
    held.update({name.replace(".2.", ".3."): place for name, place in held.items() if ".layers.2." in name})
    good = FromDisk("good", llama, slow(0.001))
    pulled = get(need(llama), [bad, good], home)
    check_holds(pulled.folder, llama)
    assert faults(pulled, bad, good) == ["garbage", ""]


def test_only_wrong_bytes_leave_nothing_that_counts(llama: Path, home: Path) -> None:
    with pytest.raises(ShardUnavailable, match=r"dropped: bad .* garbage: tensor"):
        get(need(llama), [FromDisk("bad", llama, lie)], home)
    folder = home / "models" / build_manifest(llama).id
    assert read_entries(folder) == []
    assert get(need(llama), [FromDisk("good", llama)], home).blamed == (), "nor is it held against others"
    check_holds(folder, llama)


def test_a_wrong_hash_of_an_empty_tensor_is_said_before_anyone_is_asked(llama: Path, home: Path) -> None:
    """No bytes could make it right: it was asked for again for ever."""

    async def files_alone(name: str, at: int, data: bytes) -> bytes:
        assert name.endswith(".json"), f"{name} was asked for"
        return data

    true = build_manifest(llama)
    empty = TensorDigest("model.layers.2.empty", "F32", (0,), "00" * 32)
    false = Manifest.of(true.config_sha256, [*true.tensors, empty], dict(true.files))
    provider = FromDisk("bad", llama, files_alone)
    provider.store.files[MANIFEST] = MemoryFile(false.encode())
    with pytest.raises(ModelError, match=r"layers\.2\.empty' is empty"):
        get(Need(false.id, SPAN), [provider], home)


def test_a_dribbling_provider_does_not_hold_up_the_end(llama: Path, home: Path) -> None:
    """It answers just often enough never to stall; who is idle takes its work over, and the pull ends."""
    dribble, good = FromDisk("dribble", llama, slow(15.0), piece=10), FromDisk("good", llama, slow(0.01))

    async def main() -> tuple[Pulled, float]:
        pulled = await pull(need(llama), [dribble, good], home)
        return pulled, asyncio.get_running_loop().time()

    pulled, seconds = run_virtual(main())
    check_holds(pulled.folder, llama)
    assert seconds < 120 and faults(pulled, dribble, good) == ["", ""]


BEHAVIOURS: list[Twist] = [honest, lie, stall, vanish, lack, slow(0.1), slow(7.0)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(BEHAVIOURS), st.sampled_from(BEHAVIOURS), st.integers(0, 12), st.integers(300, 5000)),
        max_size=3,
    )
)
def test_one_honest_node_is_enough(llama: Path, home: Path, crowd: list[tuple[Twist, Twist, int, int]]) -> None:
    shutil.rmtree(home / "models", ignore_errors=True)
    good = FromDisk("good", llama, slow(0.05))
    others = [
        FromDisk(f"n{index}", llama, after(pieces, then, before), size)
        for index, (before, then, pieces, size) in enumerate(crowd)
    ]
    pulled = get(need(llama), [*others, good], home)
    check_holds(pulled.folder, llama)
    decent = [provider for provider, (before, then, *_) in zip(others, crowd, strict=True) if lie not in (before, then)]
    assert "garbage" not in faults(pulled, *decent) and faults(pulled, good) == [""]


# -- small files ----------------------------------------------------------------------------------------------------------


def test_a_false_manifest_or_config_is_refused(llama: Path, tied: Path, home: Path) -> None:
    faulty, vain, good = FromDisk("faulty", llama), FromDisk("vain", llama), FromDisk("good", llama)
    other = FromDisk("other", tied).store.files
    faulty.store.files[MANIFEST] = other[MANIFEST]
    vain.store.files["config.json"] = other["config.json"]
    pulled = get(need(llama), [faulty, vain, good], home)
    check_holds(pulled.folder, llama)
    assert faults(pulled, faulty, vain, good) == ["garbage", "garbage", ""]


def test_peers_that_trickle_a_small_file_hold_a_pull_up_for_a_moment_each(llama: Path, home: Path) -> None:
    """One that sent 64 MiB of wrong bytes, a mebibyte in 19 s, had a newcomer wait for 20 minutes, and the next one again."""

    async def trickle(name: str, at: int, data: bytes) -> bytes:
        if name != "config.json":
            raise Lacking(name)
        await asyncio.sleep(1200)
        return b"{}"

    async def main() -> tuple[Pulled, float]:
        began = asyncio.get_running_loop().time()
        crowd = [FromDisk(f"slow{index}", llama, trickle) for index in range(3)]
        pulled = await pull(need(llama), [*crowd, FromDisk("good", llama)], home)
        return pulled, asyncio.get_running_loop().time() - began

    pulled, took_s = run_virtual(main())
    check_holds(pulled.folder, llama)
    assert took_s < 4 * NEXT_S


def test_so_many_are_asked_at_once_and_the_first_with_an_answer_counts(llama: Path) -> None:
    asked, under_way = list[Provider](), [0, 0]
    crowd = [FromDisk(f"{index}", llama) for index in range(9)]

    async def ask(provider: Provider) -> str | None:
        asked.append(provider)
        under_way[0] += 1
        under_way[1] = max(under_way)
        try:
            await asyncio.sleep({"0": 100, "1": 0, "6": 45}.get(provider.name, 1000))
        finally:
            under_way[0] -= 1
        if provider.name == "7":
            raise ModelError("no")
        return provider.name if provider.name in "06" else None

    def first(providers: Sequence[Provider], most: int) -> str | None:
        asked.clear()
        return run_virtual(first_answer(providers, ask, 10, most))

    assert first(crowd, 9) == "6" and len(asked) == 9 and under_way == [0, 8]
    assert first(crowd, 3) == "0" and [each.name for each in asked] == ["0", "1", "2", "3"] and under_way[0] == 0
    assert first(crowd[1:4], 1) is None and first((), 3) is None
    with pytest.raises(ModelError, match="no"):
        first(crowd[7:], 2)


def test_config_arrives_without_fields_that_its_digest_leaves_out(llama: Path, home: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"_name_or_path": "http://evil", "_attn_implementation": "evil/kernel", "torch_dtype": "float64"}
    (folder / "config.json").write_text(json.dumps(config))
    pulled = get(need(llama), [FromDisk("a", folder)], home)
    text = (pulled.folder / "config.json").read_text()
    assert "evil" not in text and "float64" not in text
    assert config_digest(text.encode()) == config_digest((llama / "config.json").read_bytes())
    assert proven_config(text.encode()) == text.encode()


def test_the_tokenizer_comes_along_if_asked_for(llama: Path, home: Path) -> None:
    plain = get(need(llama), [FromDisk("a", llama)], home)
    assert not (plain.folder / "tokenizer.json").exists()
    pulled = get(need(llama, with_files=True), [FromDisk("a", llama)], home)
    there = {name for name in FILES if (llama / name).exists()}
    assert "tokenizer.json" in there
    assert {name: (pulled.folder / name).read_bytes() for name in there} == {
        name: (llama / name).read_bytes() for name in there
    }


@pytest.mark.parametrize("name", RANKED)
def test_so_does_a_tokenizer_by_ranks(llama: Path, home: Path, tmp_path: Path, name: str) -> None:
    source = shutil.copytree(llama, tmp_path / "ranked")
    (source / TOKENIZER).rename(source / name)
    pulled = get(need(source, with_files=True), [FromDisk("a", source)], home)
    assert (pulled.folder / name).read_bytes() == (source / name).read_bytes()
    assert not (pulled.folder / TOKENIZER).exists()


def changed(source: Path, to: Path, name: str = "tokenizer_config.json") -> Path:
    folder = shutil.copytree(source, to)
    (folder / name).write_text('{"chat_template": "evil"}')
    return folder


def test_a_tokenizer_that_is_not_the_models_is_refused(llama: Path, home: Path, tmp_path: Path) -> None:
    """However many offer it: the ModelId proves the files."""
    evil, good = changed(llama, tmp_path / "evil"), FromDisk("good", llama)
    crowd = [FromDisk(f"evil{index}", evil) for index in range(3)]
    for faulty in crowd:
        faulty.store.files[MANIFEST] = good.store.files[MANIFEST]
    pulled = get(need(llama, with_files=True), [*crowd, good], home)
    assert faults(pulled, *crowd, good) == ["garbage"] * 3 + [""]
    assert (pulled.folder / "tokenizer_config.json").read_bytes() == (llama / "tokenizer_config.json").read_bytes()
    with pytest.raises(
        ShardUnavailable, match=r"no provider has tokenizer_config.json .* is not the one of the manifest"
    ):
        get(need(llama, with_files=True), crowd, tmp_path / "other")


# -- the disk -------------------------------------------------------------------------------------------------------------


def interrupted(source: Path, home: Path, seconds: float) -> tuple[Path, set[str]]:
    """A pull that is cancelled: its folder and the tensors that were whole."""

    async def main() -> None:
        task = asyncio.ensure_future(pull(need(source), [FromDisk("first", source, slow(1.0))], home))
        await asyncio.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
    folder = home / "models" / build_manifest(source).id
    return folder, {entry.name for entry in read_entries(folder)}


@pytest.mark.parametrize("seconds", [1.5, 5.5, 15.5])
def test_a_cancelled_pull_is_taken_up_where_it_was(llama: Path, home: Path, seconds: float) -> None:
    folder, kept = interrupted(llama, home, seconds)
    second = FromDisk("b", llama)
    pulled = get(need(llama), [second], home)
    assert set(second.asked) == check_holds(folder, llama) - kept
    before = 4 * 1500 * (int(seconds) - 1)  # four workers, a piece a second after config.json; last pieces are shorter
    rest = sum(pulled.received.values())
    total = sum(map(len, read_entries(folder)))
    assert total - before <= rest <= total - 0.7 * before
    assert not (folder / PARTIAL).exists()


def test_a_kill_costs_only_what_was_not_written_down(llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, but nothing runs after the cut: only what was committed on the way is there."""
    monkeypatch.setattr(store, "COMMIT_BYTES", 1)
    folder, kept = interrupted(llama, home, 15.5)
    assert kept
    (folder / PARTIAL).unlink()
    second = FromDisk("b", llama)
    pulled = get(need(llama), [second], home)
    names = check_holds(folder, llama)
    assert set(second.asked) == names - kept
    assert sum(pulled.received.values()) == sum(len(e) for e in read_entries(folder) if e.name not in kept)


@pytest.mark.parametrize("change", ["bytes", "list", "lengths"])
def test_a_prefix_is_not_believed(llama: Path, home: Path, change: str) -> None:
    """A disk that lost bytes costs a second fetch, and blames no peer."""
    folder, kept = interrupted(llama, home, 4.5)
    prefixes = json.loads((folder / PARTIAL).read_bytes())
    if change == "bytes":
        _, entries, _ = layout(build_manifest(llama))
        with (folder / SINGLE).open("r+b") as handle:
            for name in prefixes:
                handle.seek(entries[name].start)
                handle.write(bytes(100))
    elif change == "list":
        (folder / PARTIAL).write_text("[[")
    else:
        wrong = {name: [-1, True, 1 << 70, None, 3][index % 5] for index, name in enumerate(prefixes)}
        (folder / PARTIAL).write_text(json.dumps(wrong))
    pulled = get(need(llama), [FromDisk("good", llama)], home)
    check_holds(folder, llama)
    assert pulled.blamed == () and not kept & set(prefixes)


def test_a_journal_that_was_never_written_counts_nothing(llama: Path, home: Path) -> None:
    folder = get(need(llama), [FromDisk("a", llama)], home).folder
    (folder / ".ranges.json").unlink()
    again = FromDisk("b", llama)
    get(need(llama), [again], home)
    assert set(again.asked) == check_holds(folder, llama)


def test_two_pulls_of_one_folder_take_turns(llama: Path, home: Path) -> None:
    a, b = FromDisk("a", llama, slow(0.1)), FromDisk("b", llama, slow(0.1))

    async def both() -> None:
        await asyncio.gather(pull(need(llama), [a], home), pull(need(llama), [b], home))

    asyncio.run(both())
    assert sorted(a.asked + b.asked) == sorted(check_holds(home / "models" / build_manifest(llama).id, llama))


def test_too_little_room_is_said_before_anything_is_fetched(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    provider = FromDisk("a", llama)
    with pytest.raises(DiskFull, match=r"needs [\d.]+ kB, [\d.]+ kB more than are free"):
        get(need(llama), [provider], home)
    assert provider.asked == []


def test_a_disk_that_fills_up_blames_no_peer(llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, count = workers._put, 0

    def full(handle: BinaryIO, at: int, block: bytes, sha: Any) -> None:
        nonlocal count
        count += 1
        if count > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(handle, at, block, sha)

    monkeypatch.setattr(workers, "_put", full)
    heard: list[Any] = []
    with pytest.raises(DiskFull, match="the disk is full"):
        get(need(llama), [FromDisk("a", llama), FromDisk("b", llama)], home, on_blame=heard.append)
    assert heard == []
    monkeypatch.setattr(workers, "_put", put)
    check_holds(get(need(llama), [FromDisk("a", llama)], home).folder, llama)


names = st.text(max_size=30).filter(lambda name: name != "__metadata__" and name.isprintable())
tensors = st.builds(
    lambda name, dtype, shape: TensorDigest(name, dtype, tuple(shape), "00" * 32),
    names,
    st.sampled_from(["F32", "BF16", "U8", "I64"]),
    st.lists(st.integers(0, 40), max_size=3),
)


@given(st.lists(tensors, max_size=6, unique_by=lambda tensor: tensor.name))
def test_any_manifest_makes_a_readable_file_in_its_own_folder(some: list[TensorDigest]) -> None:
    """Names of tensors never become paths, "../../etc" neither."""
    header, entries, size = layout(Manifest.of("00" * 32, some, {}))
    assert {entry.file for entry in entries.values()} <= {SINGLE}
    parsed = parse_header(header[LENGTH_BYTES:], SINGLE, size)
    assert {entry.name: entry for entry in parsed} == entries


@pytest.mark.parametrize(
    "tensor",
    [
        TensorDigest("__metadata__", "F32", (1,), "00" * 32),
        TensorDigest("huge", "F32", (1 << 61,), "00" * 32),
        TensorDigest("half", "F4", (1,), "00" * 32),
    ],
    ids=lambda tensor: tensor.name,
)
def test_a_manifest_that_cannot_be_stored_is_refused(tensor: TensorDigest) -> None:
    with pytest.raises(ModelError, match="cannot be stored"):
        layout(Manifest.of("00" * 32, [tensor], {}))


# -- the hub --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(FakeHub(shutil.copytree(sharded, tmp_path / "repo"))) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        yield hub


def test_the_hub_gives_only_what_peers_lack(llama: Path, home: Path, tmp_path: Path, hub: FakeHub) -> None:
    """Peers hold layers 0-2; layer 3 comes from the hub, whose files are cut another way."""
    (part, _) = split_model(llama, [Span(0, 3), Span(3, 6)], tmp_path / "parts")
    pulled = asyncio.run(pull(need(llama), [FromDisk("a", part)], home, hub=HubProvider(REPO)))
    check_holds(pulled.folder, llama)
    wanted = sum(len(entry) for entry in read_entries(llama) if ".layers.3." in entry.name)
    assert pulled.received["hub"] == wanted and hub.weight_bytes < wanted + 20_000, "headers aside"


def test_the_hub_is_not_asked_when_peers_have_all(llama: Path, home: Path, hub: FakeHub) -> None:
    asyncio.run(pull(need(llama, with_files=True), [FromDisk("a", llama)], home, hub=HubProvider(REPO)))
    assert hub.tokens == []


def test_the_hub_alone_will_do_where_a_peer_has_the_manifest(llama: Path, home: Path, hub: FakeHub) -> None:
    manifest = FromDisk("a", llama)
    manifest.store.tensors.clear()
    del manifest.store.files["tokenizer.json"]
    pulled = asyncio.run(pull(need(llama, with_files=True), [manifest], home, hub=HubProvider(REPO)))
    check_holds(pulled.folder, llama)
    assert (pulled.folder / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()


def test_a_hub_with_other_weights_is_garbage_too(llama: Path, home: Path, hub: FakeHub) -> None:
    for entry in read_entries(hub.folder)[:1]:
        hub.corrupt_at[entry.file] = (entry.start, 99)
    for file in hub.folder.glob("*.safetensors"):
        hub.corrupt_at[file.name] = (file.stat().st_size - 1, 99)
    manifest = FromDisk("a", llama)
    manifest.store.tensors.clear()
    with pytest.raises(ShardUnavailable, match=f"{REPO} .hub. garbage"):
        asyncio.run(pull(need(llama, None, with_ends=True), [manifest], home, hub=HubProvider(REPO)))


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_1", "BF16"])
def test_a_joiner_gets_its_span_of_a_gguf_file_as_it_is_stored(dtype: str, tmp_path: Path, home: Path) -> None:
    """From a node that was given the file; and from one that pulled it. What arrives is the same model, blocks and all."""
    file, _ = tiny_gguf("llama", tmp_path / "model.gguf", dtype)
    source = gguf_folder(file, home)
    first = get(need(source, with_ends=True, with_files=True), [FromDisk("a", source)], tmp_path / "one")
    names = check_holds(first.folder, source, with_ends=True)
    assert not any(".layers.0." in name for name in names)
    needed = sum(len(entry) for entry in read_entries(source) if entry.name in names)
    assert sum(first.received.values()) == needed
    second = get(need(source, with_files=True), [FromDisk("b", first.folder)], tmp_path / "two")
    check_holds(second.folder, source)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (second.folder / name).read_bytes() == (source / name).read_bytes()


def test_parts_of_a_gguf_file_can_be_split_off(tmp_path: Path, home: Path) -> None:
    file, _ = tiny_gguf("llama", tmp_path / "model.gguf", "Q4_0")
    source = gguf_folder(file, home)
    for part in split_model(source, [Span(0, 2), Span(2, 6)], tmp_path / "parts"):
        assert build_manifest(part).id == build_manifest(source).id
