"""GGUF models in several files: the same model as in one file, and refused in one line where the parts are not those of one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from manyhands.checkpoint import gguf as header
from manyhands.checkpoint import gguf_parts
from manyhands.checkpoint.folder import read_config, read_entries
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.checkpoint.manifest import build_manifest
from manyhands.core import Span
from manyhands.errors import ModelError
from manyhands.testing.gguf import write_gguf
from manyhands.weights import names
from manyhands.weights.here import folder_named
from manyhands.worker.runner import load_ends, load_span
from tests.gguf_files import tiny_gguf
from tests.gguf_parts import numbers, split_gguf, written

IDS = [(37 * i * i + 11 * i) % 256 for i in range(40)]


def ids_and_logits(folder: Path) -> tuple[list[int], bytes]:
    """What a node computes in fp32: the likeliest id after each of IDS, and all logits."""
    from manyhands.engine.span import Piece

    ends, span = load_ends(folder, "fp32", 1), load_span(folder, Span(0, 6), "fp32", 1)
    rows = span.step(ends.embed(IDS).tobytes(), [Piece(span.new_cache(64), 0, len(IDS))], 1)
    logits = ends.logits(rows, len(IDS), 1)
    return logits.argmax(axis=1).tolist(), logits.tobytes()


@pytest.mark.parametrize(("family", "dtype"), [("llama_tied", "Q4_0"), ("mixtral", "Q8_0"), ("gpt_oss", "F16")])
@pytest.mark.parametrize("first", [0, 1, 7])
def test_a_model_in_parts_is_that_of_the_one_file(family: str, dtype: str, first: int, tmp_path: Path) -> None:
    """Also where the first part has no tensors, and where the factors of columns lie behind the first."""
    file, _ = tiny_gguf(family, tmp_path / "m.gguf", dtype, layers=6)
    total = len(read_gguf(file).tensors)
    parts = split_gguf(file, tmp_path / "parts", (first, 9, total - 1))
    whole, folder = (gguf_folder(path, tmp_path / "home") for path in (file, parts[0]))
    assert read_config(folder) == read_config(whole)
    assert build_manifest(folder).encode() == build_manifest(whole).encode()
    assert {entry.file for entry in read_entries(folder) if len(entry)} <= {path.name for path in parts}
    assert ids_and_logits(folder) == ids_and_logits(whole)


@pytest.mark.parametrize("is_first_small", [False, True])
def test_parts_are_read_as_the_gguf_package_writes_them(is_first_small: bool, tmp_path: Path) -> None:
    """It splits as llama.cpp's converter does; with `small_first_shard` the first part has no tensors."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=3, small_first_shard=is_first_small)
    writer.add_uint32("llama.block_count", 8)
    writer.add_token_list(["a", "b"])
    given = {f"t{number}": np.full((2, number + 1), number, np.float32) for number in range(8)}
    for name, array in given.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(tmp_path.glob("m-0000?-of-0000?.gguf"))
    assert len(files) == 3 + is_first_small
    found = read_gguf(files[1])
    assert (found.file, found.facts["llama.block_count"]) == (files[0].name, 8)
    assert found.facts["tokenizer.ggml.tokens"] == ["a", "b"]
    assert {tensor.name for tensor in found.tensors} == given.keys()
    for tensor in found.tensors:
        array = given[tensor.name]
        assert gguf_parts.read_tensor(tmp_path, tensor) == array.tobytes() and tensor.shape == array.shape


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three parts of a model, alone in their folder."""
    file, _ = tiny_gguf("llama", tmp_path / "m.gguf", "Q4_0", layers=2)
    return split_gguf(file, tmp_path / "parts", (5, 12))


def test_any_part_and_the_folder_name_the_model(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.chdir(parts[0].parent)
    called = [*map(str, parts), parts[1].name, str(parts[0].parent), "."]
    assert {folder_named(name, home) for name in called} == {gguf_folder(parts[0], home)}
    assert {names.label(name) for name in called} == {"m"} and all(map(names.is_here, called))
    folder = gguf_folder(parts[2], home)
    assert sorted(path.name for path in folder.glob("*.gguf")) == [path.name for path in parts]
    assert sum(path.lstat().st_size for path in folder.iterdir()) < 50_000


def test_a_folder_of_several_models_asks_for_one(parts: list[Path], tmp_path: Path) -> None:
    (parts[0].parent / "mmproj.gguf").write_bytes(b"GGUF")
    folder = folder_named(str(parts[0].parent), tmp_path / "home")
    assert folder is not None
    with pytest.raises(ModelError, match=r"holds 2 GGUF models: name one of m-00001-of-00003\.gguf, mmproj\.gguf$"):
        read_config(folder)


def test_the_folder_follows_each_part(parts: list[Path], tmp_path: Path) -> None:
    """Made anew when one of them has changed."""
    home = tmp_path / "home"
    folder = gguf_folder(parts[0], home)
    before, whole = (folder / "config.json").stat().st_mtime_ns, build_manifest(folder, home=home)
    assert gguf_folder(parts[1], home) == folder and (folder / "config.json").stat().st_mtime_ns == before
    end = read_gguf(parts[2]).tensors[-1].end
    raw = bytearray(parts[2].read_bytes())
    raw[end - 1] ^= 1
    parts[2].with_suffix(".new").write_bytes(raw)
    parts[2].with_suffix(".new").replace(parts[2])
    assert gguf_folder(parts[1], home) == folder and (folder / "config.json").stat().st_mtime_ns > before
    assert build_manifest(folder, home=home).id != whole.id


def test_links_to_parts_go_by_their_own_names(parts: list[Path], tmp_path: Path) -> None:
    """As in the cache of huggingface_hub: what they lead to is named by a hash."""
    blobs, links = tmp_path / "blobs", tmp_path / "links"
    blobs.mkdir()
    links.mkdir()
    for number, part in enumerate(parts):
        (links / part.name).symlink_to(part.rename(blobs / f"{number:064d}"))
    folder = gguf_folder(links / parts[1].name, tmp_path / "home")
    assert len(read_entries(folder)) == len(read_gguf(links / parts[0].name).tensors)
    assert names.label(str(links / parts[2].name)) == names.label(str(links)) == "m"


Spoil = Callable[[list[Path]], Any]


def lost(parts: list[Path]) -> None:
    parts[1].unlink()


def put(number: int, **facts: Any) -> Spoil:
    """Write a part again with other facts; two underscores are a dot, None removes one."""

    def spoil(parts: list[Path]) -> None:
        raw = {tensor.name: tensor for tensor in header_of(parts[number]).tensors}
        found = header_of(parts[number])
        changed = {name.replace("__", "."): value for name, value in facts.items()}
        given = {**typed(found), **changed}
        kept = {name: value for name, value in given.items() if value is not None}
        write_gguf(parts[number], kept, written(parts[number], found, 0, len(raw)))

    return spoil


def header_of(path: Path) -> header.Gguf:
    """Of this file alone."""
    raw = path.read_bytes()
    return header.parse_gguf(lambda start, end: raw[start:end], path.name, len(raw))


def typed(found: header.Gguf) -> dict[str, Any]:
    said = [found.facts[f"split.{name}"] for name in ("no", "count", "tensors.count")]
    return {**found.facts, **numbers(*said)}


def exchanged(parts: list[Path]) -> None:
    one, two = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(two), parts[2].write_bytes(one)


def doubled(parts: list[Path]) -> None:
    """The last part has a tensor of the first in place of its last one."""
    first, last = header_of(parts[0]), header_of(parts[2])
    tensors = written(parts[2], last, 0, len(last.tensors) - 1) + written(parts[0], first, 1, 2)
    write_gguf(parts[2], typed(last), tensors)


def dropped(parts: list[Path]) -> None:
    last = header_of(parts[2])
    write_gguf(parts[2], typed(last), written(parts[2], last, 0, len(last.tensors) - 1))


def cut_off(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-64])


def other_model(parts: list[Path]) -> None:
    """A part of a model of more layers, with as many parts."""
    file, _ = tiny_gguf("llama", parts[0].parent.parent / "other.gguf", "Q4_0", layers=3)
    split_gguf(file, parts[0].parent.parent / "others", (5, 12))[1].replace(parts[1])


def not_gguf(parts: list[Path]) -> None:
    parts[2].write_bytes(b"version https://git-lfs")


AGAIN = "; fetch all parts again from one place, under the names that they have there$"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lost, r"m-00002-of-00003\.gguf is missing: fetch it, all 3 parts of m are needed$"),
        (put(1, split__count=np.uint16(4)), f"^m-00002-of-00003.gguf refused: its split.count is 4, .*is 3{AGAIN}"),
        (put(0, split__count=None), f"^m-00001-of-00003.gguf refused: its split.count is None, .*is 3{AGAIN}"),
        (put(0, split__count=True), f"^m-00001-of-00003.gguf refused: its split.count is True, .*is 3{AGAIN}"),
        (
            put(2, split__no=np.uint16(1)),
            f"^m-00003-of-00003.gguf refused: its split.no is 1, by its name it is 2{AGAIN}",
        ),
        (put(2, split__no="2"), f"^m-00003-of-00003.gguf refused: its split.no is '2', by its name it is 2{AGAIN}"),
        (put(1, split__no=np.array([1, 1], np.int32)), "^m-00002-of-00003.gguf refused: the key 'split.no' is a list"),
        (
            put(1, split__tensors__count=np.int32(9)),
            f"its split.tensors.count is 9, m-00001-of-00003.gguf has 21{AGAIN}",
        ),
        (
            put(0, split__tensors__count=None),
            f"^m-00001-of-00003.gguf refused: its split.tensors.count is None{AGAIN}",
        ),
        (
            put(1, general__architecture="qwen2"),
            f"'general.architecture' differs from that of m-00001-of.*model{AGAIN}",
        ),
        (put(2, general__name="x"), f"^m-00003-of-00003.gguf refused: its key 'general.name' differs from.*{AGAIN}"),
        (exchanged, f"^m-00002-of-00003.gguf refused: its split.no is 2, by its name it is 1{AGAIN}"),
        (doubled, f"^m-00003-of-00003.gguf refused: tensor '.*' is in m-00001-of-00003.gguf too{AGAIN}"),
        (dropped, f"split.tensors.count is 21, and its 3 parts have 20 tensors{AGAIN}"),
        (cut_off, "^m-00002-of-00003.gguf is truncated: tensor"),
        (other_model, f"^m-00002-of-00003.gguf refused: its split.tensors.count is 30, m-00001-of-.* has 21{AGAIN}"),
        (not_gguf, '^m-00003-of-00003.gguf refused: it does not begin with "GGUF"'),
    ],
)
def test_parts_that_are_not_those_of_one_model_are_refused(
    spoil: Spoil, message: str, parts: list[Path], tmp_path: Path
) -> None:
    spoil(parts)
    with pytest.raises(ModelError, match=message) as caught:
        gguf_folder(parts[0], tmp_path / "home")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "home").exists()


def test_metadata_that_are_repeated_are_no_difference(parts: list[Path], tmp_path: Path) -> None:
    whole = gguf_folder(parts[0], tmp_path / "home")
    before = build_manifest(whole).id
    facts = {name: value for name, value in read_gguf(parts[0]).facts.items() if not name.startswith("split.")}
    put(1, **{name.replace(".", "__"): value for name, value in facts.items()})(parts)
    assert build_manifest(gguf_folder(parts[0], tmp_path / "home")).id == before


def test_a_part_under_another_name_is_refused(parts: list[Path], tmp_path: Path) -> None:
    path = parts[0].rename(tmp_path / "whole.gguf")
    message = r"split.count is 3, by its name it is a model by itself; name the parts as gguf-split does, NAME-00001-of"
    with pytest.raises(ModelError, match=message):
        gguf_folder(path, tmp_path / "home")


@pytest.mark.parametrize("count", [0, 1])
def test_the_one_file_of_a_merged_model_is_read(count: int, parts: list[Path], tmp_path: Path) -> None:
    """llama-gguf-split --merge leaves a count of 0."""
    one = split_gguf(tmp_path / "m.gguf", tmp_path / "one", ())[0]
    put(0, split__count=np.uint16(count))([one])
    assert one.name == "m-00001-of-00001.gguf"
    assert names.label(str(one)) == "m"
    whole, folder = gguf_folder(tmp_path / "m.gguf", tmp_path / "home"), gguf_folder(one, tmp_path / "home")
    assert build_manifest(folder).id == build_manifest(whole).id


@pytest.mark.parametrize("name", ["a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-00001-of-09999.gguf"])
def test_names_of_no_part_are_refused(name: str, parts: list[Path], tmp_path: Path) -> None:
    path = parts[0].rename(tmp_path / name)
    with pytest.raises(ModelError, match=r"^a-.*refused: by its name it is part \d of \d+; parts are numbered from 1"):
        gguf_folder(path, tmp_path / "home")


def test_parts_together_have_the_limits_of_one_file(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused at the part that goes beyond them, before the next is read."""
    parts[2].write_bytes(b"")
    for limit, value in (("MAX_TENSORS", 11), ("MAX_HEADER_BYTES", header_of(parts[0]).data_start)):
        with monkeypatch.context() as patch:
            patch.setattr(gguf_parts, limit, value)
            with pytest.raises(
                ModelError, match=r"m-0000\d-of-00003.gguf refused: with it the parts .* have more than"
            ):
                read_gguf(parts[0])


def test_headers_of_later_parts_are_read_in_small_pieces(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no vocabulary, and there may be a thousand of them."""
    lengths: dict[str, int] = {}
    known = gguf_parts._read_range

    def read(path: Path, start: int, end: int) -> bytes:
        lengths[path.name] = lengths.get(path.name, 0) + end - start
        return known(path, start, end)

    monkeypatch.setattr(gguf_parts, "_read_range", read)
    monkeypatch.setattr(header, "PART_BYTES", 512)
    assert len(read_gguf(parts[0]).tensors) == 21
    assert lengths[parts[0].name] == parts[0].stat().st_size
    assert all(lengths[part.name] == 2048 < part.stat().st_size for part in parts[1:])
