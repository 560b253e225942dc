"""What is on disk is checked: bytes that changed under an old time stamp are neither computed with nor given away (F8)."""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.checkpoint.folder import JOURNAL, MANIFEST, SINGLE, read_entries
from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.manifest import Silent, build_manifest
from manyhands.checkpoint.split import split_model
from manyhands.core import Span
from manyhands.engine.span import Piece
from manyhands.errors import Damaged, ManyhandsError, ModelError
from manyhands.member.weights import ServedModel, Weights, weights_in
from manyhands.origin import OriginModel
from manyhands.testing.tiny import make_tiny
from manyhands.weights.blocks import BLOCK_BYTES, ProvenStretch
from manyhands.weights.fetch import resolve_model
from manyhands.weights.provider import Provider
from manyhands.weights.refetch import use_fetched
from manyhands.weights.seed import read_shared_model, read_want
from manyhands.wire.weights_message import WeightRequest
from manyhands.worker.execute import SpanModel
from manyhands.worker.runner import load_ends, load_span
from tests.weights.hub_server import REPO, FakeHub, serving
from tests.weights.providers import FromDisk
from tests.weights.test_weights import point_to

ALL, FIRST, LAST = Span(0, 6), Span(0, 3), Span(3, 6)
INNER = "model.layers.4.self_attn.v_proj.weight"
TWIN = "model.layers.5.self_attn.v_proj.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("disk") / "tiny", layers=6, seed=8)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy that was hashed once, as everything is at its first start."""
    copy = shutil.copytree(model, tmp_path / "copy")
    build_manifest(copy)
    return copy


@contextmanager
def in_secret(path: Path) -> Iterator[None]:
    """Whatever happens to `path` within leaves its time stamp as it was."""
    before = path.stat()
    yield
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def entry_of(folder: Path, name: str) -> TensorEntry:
    return next(entry for entry in read_entries(folder) if entry.name == name)


def overwrite(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a tensor's bytes and nothing else."""
    entry = entry_of(folder, name)
    path = folder / entry.file
    with in_secret(path), path.open("r+b") as handle:
        handle.seek(entry.start)
        raw = handle.read(len(entry))
        handle.seek(entry.start)
        handle.write(change(raw))


def flip(folder: Path, name: str = INNER) -> None:
    """One bit of the mantissa of one number."""
    overwrite(folder, name, lambda raw: bytes([raw[0] ^ 1]) + raw[1:])


def load(folder: Path, span: Span = ALL, *, with_ends: bool = True) -> SpanModel:
    """As a node does."""
    return SpanModel(folder, span, "bf16", with_ends, 1, build_manifest(folder))


# -- nothing wrong is computed with -----------------------------------------------------------------------------------


def test_one_flipped_bit_under_an_old_time_stamp_is_refused(folder: Path, model: Path) -> None:
    load(folder)
    flip(folder)
    assert build_manifest(folder).id == build_manifest(model).id, "the claim is the old one: only the bytes tell"
    with pytest.raises(Damaged) as caught:
        load(folder)
    text = str(caught.value)
    assert caught.value.names == (INNER,) and INNER in text and str(folder) in text
    assert "copy or fetch the file again" in text and "\n" not in text


def test_only_what_is_used_is_read(folder: Path) -> None:
    """A node of other layers serves on."""
    flip(folder)
    load(folder, FIRST, with_ends=False)
    with pytest.raises(Damaged):
        load(folder, LAST, with_ends=False)


@pytest.mark.parametrize("name", [EMBED, "model.norm.weight", "lm_head.weight"])
def test_an_origin_checks_its_ends(folder: Path, name: str) -> None:
    flip(folder, name)
    with pytest.raises(Damaged, match=name):
        OriginModel(folder, "bf16")


def test_two_tensors_of_one_shape_do_not_pass_for_each_other(folder: Path) -> None:
    one, two = (
        (folder / SINGLE).read_bytes()[e.start : e.end] for e in (entry_of(folder, INNER), entry_of(folder, TWIN))
    )
    overwrite(folder, INNER, lambda _: two)
    overwrite(folder, TWIN, lambda _: one)
    with pytest.raises(Damaged) as caught:
        load(folder)
    assert set(caught.value.names) == {INNER, TWIN}


def test_names_swapped_in_the_header_are_noticed(folder: Path) -> None:
    path = folder / SINGLE
    raw, a, b = path.read_bytes(), INNER.encode(), TWIN.encode()
    with in_secret(path):
        path.write_bytes(raw.replace(a, b"?" * len(a), 1).replace(b, a, 1).replace(b"?" * len(a), b, 1))
    with pytest.raises(Damaged):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_a_file_cut_short_is_one_line(folder: Path, keep: int) -> None:
    with in_secret(folder / SINGLE):
        os.truncate(folder / SINGLE, keep)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert SINGLE in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_small_files_are_hashed_each_time(folder: Path, name: str) -> None:
    """They are a part of the ModelId: another tokenizer is another answer."""
    path = folder / name
    raw = path.read_bytes()
    assert b"2" in raw
    with in_secret(path):
        path.write_bytes(raw.replace(b"2", b"3", 1))
    with pytest.raises(Damaged, match=name):
        OriginModel(folder, "bf16")


@pytest.mark.parametrize("junk", [b"", b"\xff" * 100, b"{"])
def test_a_config_that_is_no_config_is_one_line(folder: Path, junk: bytes) -> None:
    with in_secret(folder / "config.json"):
        (folder / "config.json").write_bytes(junk)
    with pytest.raises(ModelError, match=r"config\.json"):
        OriginModel(folder, "bf16")


def test_a_change_on_purpose_is_another_model(folder: Path, model: Path) -> None:
    flip(folder)
    os.utime(folder / SINGLE)
    load(folder)
    assert build_manifest(folder).id != build_manifest(model).id


def test_a_damaged_list_of_hashes_is_not_believed(folder: Path, home: Path) -> None:
    (cache,) = (home / "manifests").iterdir()
    raw = cache.read_bytes()
    at = raw.index(INNER.encode())
    end = raw.index(b"]", raw.index(b"]", at) + 1) - 5
    cache.write_bytes(raw[:end] + (b"0" if raw[end : end + 1] != b"0" else b"1") + raw[end + 1 :])
    load(folder)


def test_what_is_served_does_not_change_with_the_file(folder: Path) -> None:
    """Damage while a node runs, even a file cut to nothing, neither changes a number nor kills the process."""
    ends, span = load_ends(folder, "bf16", 1), load_span(folder, ALL, "bf16", 1)

    def logits() -> NDArray[np.float32]:
        rows = ends.embed(range(8))
        return ends.logits(span.step(rows.tobytes(), [Piece(span.new_cache(8), 0, 8)], 1), 8, 1)

    want = logits()
    for name in (EMBED, "model.norm.weight", "model.layers.1.input_layernorm.weight", INNER):
        overwrite(folder, name, lambda raw: bytes(len(raw)))
        assert np.array_equal(logits(), want)
    os.truncate(folder / SINGLE, 0)
    assert np.array_equal(logits(), want)
    with pytest.raises(ModelError):
        load(folder)


# -- nothing wrong is given away --------------------------------------------------------------------------------------


def want(model: str, name: str, offset: int = 0, length: int = 16) -> WeightRequest:
    return WeightRequest(1, model, "tensor", name, offset, length)  # type: ignore[arg-type]


def test_a_seeding_node_gives_no_damaged_bytes(folder: Path) -> None:
    """Neither what was wrong before it was first asked for, nor what became wrong after; the rest is given."""
    flip(folder)
    model, shelf = read_shared_model(folder)
    with pytest.raises(Damaged, match="not given to peers"):
        read_want(shelf, want(model, INNER, 64))
    assert len(read_want(shelf, want(model, TWIN))) == 16
    flip(folder, TWIN)
    with pytest.raises(Damaged, match="changed since"):
        read_want(shelf, want(model, TWIN, 64))
    with in_secret(folder / "tokenizer.json"):
        (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes().replace(b"2", b"3", 1))
    with pytest.raises(Damaged):
        read_want(shelf, WeightRequest(1, model, "file", "tokenizer.json", 0, 1 << 20))


def test_blocks_are_proven_one_by_one(tmp_path: Path) -> None:
    """A change in one block refuses reads of that block, and later all: the node has to fetch it again."""
    import hashlib

    raw = os.urandom(3 * BLOCK_BYTES + 5)
    path = tmp_path / "file"
    path.write_bytes(b"head" + raw)
    stretch = ProvenStretch(path, 4, 4 + len(raw), "tensor x", hashlib.sha256(raw).hexdigest())
    for offset, length in [(0, 1), (BLOCK_BYTES - 1, 2), (len(raw) - 1, 9), (len(raw), 1), (7, 2 * BLOCK_BYTES + 9)]:
        assert stretch.read(offset, length) == raw[offset : offset + length]
    path.write_bytes(b"head" + raw[: 2 * BLOCK_BYTES] + bytes([raw[2 * BLOCK_BYTES] ^ 1]) + raw[2 * BLOCK_BYTES + 1 :])
    assert stretch.read(0, BLOCK_BYTES) == raw[:BLOCK_BYTES]
    with pytest.raises(Damaged):
        stretch.read(2 * BLOCK_BYTES + 100, 1)
    with pytest.raises(Damaged):
        stretch.read(0, 1)


# -- it heals by itself -----------------------------------------------------------------------------------------------


def fetched(model: Path, home: Path, providers: Sequence[Provider]) -> tuple[Path, Weights, Callable[[], Path]]:
    """Layers 3-5 and the ends pulled from `providers`; and how to fetch them again."""
    kind = ServedModel(build_manifest(model).id, "owner/tiny", "bf16")
    weights = asyncio.run(weights_in(kind, providers, home, Silent()))

    def again() -> Path:
        return asyncio.run(weights.fetch(LAST, home, providers, Silent(), with_ends=True))[0]

    return again(), weights, again


def mended(folder: Path, again: Callable[[], Path] | None) -> SpanModel:
    async def use(folder: Path) -> SpanModel:
        return load(folder, LAST)

    async def fetch() -> Path:
        return await asyncio.to_thread(again) if again else folder

    return asyncio.run(use_fetched(folder, fetch if again else None, use))


def test_a_damaged_tensor_is_fetched_again_and_no_other(model: Path, home: Path) -> None:
    provider = FromDisk("p", model)
    folder, _, again = fetched(model, home, [provider])
    load(folder, LAST)
    flip(folder)
    provider.asked.clear()
    mended(folder, again)
    assert provider.asked == [INNER]
    load(again(), LAST)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", MANIFEST])
def test_damaged_small_files_are_fetched_again(model: Path, home: Path, name: str) -> None:
    folder, _, again = fetched(model, home, [FromDisk("p", model)])
    with in_secret(folder / name):
        (folder / name).write_bytes((folder / name).read_bytes()[:-40])
    mended(again(), again)


def test_a_shorter_file_and_a_damaged_header_are_fetched_again(model: Path, home: Path) -> None:
    provider = FromDisk("p", model)
    folder, _, again = fetched(model, home, [provider])
    lost = sorted(e.name for e in read_entries(folder) if e.end > 200_000)
    assert lost
    with in_secret(folder / SINGLE):
        os.truncate(folder / SINGLE, 200_000)
    provider.asked.clear()
    mended(again(), again)
    assert sorted(provider.asked) == lost
    for at, junk in [(0, b"\xff" * 8), (30, b"\x00" * 8)]:
        with in_secret(folder / SINGLE), (folder / SINGLE).open("r+b") as handle:
            handle.seek(at)
            handle.write(junk)
        provider.asked.clear()
        mended(again(), again)
        assert provider.asked == []


def test_without_a_source_the_error_names_what_and_why(model: Path, home: Path) -> None:
    folder, weights, _ = fetched(model, home, [FromDisk("p", model)])
    flip(folder)

    def again() -> Path:
        return asyncio.run(weights.fetch(LAST, home, [], Silent(), with_ends=True))[0]

    with pytest.raises(ManyhandsError, match=rf"{INNER} is damaged.*cannot be fetched again") as caught:
        mended(folder, again)
    assert "\n" not in str(caught.value)


def test_a_folder_of_the_user_is_never_changed(folder: Path) -> None:
    flip(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(Damaged):
        mended(folder, lambda: folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not (folder / JOURNAL).exists()


def test_a_part_cut_out_is_checked_against_the_whole(folder: Path, tmp_path: Path) -> None:
    part = split_model(folder, [FIRST, LAST], tmp_path / "parts")[1]
    load(part, LAST, with_ends=False)
    flip(part)
    with pytest.raises(Damaged, match=INNER):
        load(part, LAST, with_ends=False)


def test_the_hub_mends_what_came_from_it(
    model: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit, a damaged tokenizer, a file cut short: each is fetched again by its name, and the rest is not."""

    def again() -> Path:
        return resolve_model(REPO, LAST, True, home, Silent())

    with serving(FakeHub(shutil.copytree(model, tmp_path / "repo"))) as hub:
        point_to(hub.endpoint, monkeypatch)
        folder = again()
        load(folder, LAST)
        flip(folder)
        mended(folder, again)
        with in_secret(folder / "tokenizer.json"):
            (folder / "tokenizer.json").write_bytes(b"{}")
        mended(folder, again)
        with in_secret(folder / SINGLE):
            os.truncate(folder / SINGLE, 200_000)
        mended(again(), again)
