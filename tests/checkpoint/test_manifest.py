"""The identity of a model, and hostile files."""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.checkpoint.dtypes import PLAIN_BITS
from manyhands.checkpoint.folder import INDEX, MANIFEST, SINGLE, check_file_name, read_entries
from manyhands.checkpoint.header import MAX_COMMAS, header_length, parse_header, read_header
from manyhands.checkpoint.manifest import Manifest, Silent, TensorDigest, build_manifest, config_digest
from manyhands.checkpoint.plain_file import MAX_TABLE_BYTES
from manyhands.core import Span
from manyhands.errors import ModelError
from manyhands.weights.provider import MAX_FILE_BYTES


class Count(Silent):
    """Progress that adds up."""

    def __init__(self) -> None:
        self.total = 0
        self.seen = 0

    def start(self, name: str, total: int) -> None:
        self.total = total

    def advance(self, amount: int) -> None:
        self.seen += amount


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama, tmp_path / "copy")


def header(tensors: dict[str, Any], data: int) -> tuple[bytes, int]:
    raw = json.dumps(tensors).encode()
    return raw, 8 + len(raw) + data


def tensor(start: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def test_id_does_not_depend_on_the_files(llama: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert build_manifest(llama).id == build_manifest(sharded).id


def test_id_is_the_hash_of_the_canonical_bytes(llama: Path) -> None:
    manifest = build_manifest(llama)
    assert manifest.id == hashlib.sha256(manifest.encode()).hexdigest()
    assert Manifest.decode(manifest.encode()) == manifest


def test_one_bit_changes_id_and_its_span_only(llama: Path, copy: Path) -> None:
    victim = next(entry for entry in read_entries(copy) if ".layers.3." in entry.name)
    with (copy / SINGLE).open("r+b") as handle:
        handle.seek(victim.start)
        byte = handle.read(1)
        handle.seek(victim.start)
        handle.write(bytes([byte[0] ^ 1]))
    one, two = build_manifest(llama), build_manifest(copy)
    assert one.id != two.id
    assert one.digest(Span(0, 3)) == two.digest(Span(0, 3))
    assert one.digest(Span(3, 4)) != two.digest(Span(3, 4))


def test_config_counts_unless_volatile(llama: Path, copy: Path) -> None:
    path = copy / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "transformers_version": "9", "dtype": "float32", "_name_or_path": "x"}))
    assert build_manifest(copy).id == build_manifest(llama).id
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert build_manifest(copy).id != build_manifest(llama).id


def test_config_key_order_does_not_count() -> None:
    assert config_digest(b'{"a": 1, "b": {"c": 2, "torch_dtype": "x"}}') == config_digest(b'{"b":{"c":2},"a":1}')


def test_second_build_reads_no_weights(llama: Path, home: Path) -> None:
    first, second = Count(), Count()
    manifest = build_manifest(llama, first)
    assert first.seen == first.total == sum(len(entry) for entry in read_entries(llama))
    assert build_manifest(llama, second) == manifest
    assert second.seen == 0
    assert len(list((home / "manifests").iterdir())) == 1


def test_cache_notices_a_changed_file(copy: Path) -> None:
    build_manifest(copy)
    os.utime(copy / SINGLE, ns=(1, 1))
    again = Count()
    build_manifest(copy, again)
    assert again.seen > 0


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"stamp": 1}', b"\xff\x00", b"[" * 100_000])
def test_corrupt_cache_is_ignored(llama: Path, home: Path, junk: bytes) -> None:
    manifest = build_manifest(llama)
    (cache,) = (home / "manifests").iterdir()
    cache.write_bytes(junk)
    assert build_manifest(llama) == manifest
    assert cache.read_bytes() != junk


def test_part_with_manifest_has_the_id_of_the_whole(copy: Path, sharded: Path, tmp_path: Path) -> None:
    part = shutil.copytree(sharded, tmp_path / "part")
    (part / MANIFEST).write_bytes(build_manifest(sharded).encode())
    sorted(part.glob("*.safetensors"))[0].unlink()
    assert build_manifest(part).id == build_manifest(copy).id


def test_part_that_disagrees_with_its_manifest_is_refused(copy: Path) -> None:
    (copy / MANIFEST).write_bytes(build_manifest(copy).encode())
    victim = next(entry for entry in read_entries(copy) if ".layers.3." in entry.name)
    with (copy / SINGLE).open("r+b") as handle:
        handle.seek(victim.start)
        handle.write(b"\x55" * 8)
    with pytest.raises(ModelError, match=f"{victim.name} is damaged: SHA-256"):
        build_manifest(copy)


def test_config_that_disagrees_with_the_manifest_is_refused(copy: Path) -> None:
    (copy / MANIFEST).write_bytes(build_manifest(copy).encode())
    (copy / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(ModelError, match=r"config.json is not the one"):
        build_manifest(copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_the_tokenizer_is_a_part_of_the_model(llama: Path, copy: Path, name: str) -> None:
    """With another one the same prompt has another answer."""
    (copy / name).write_bytes((copy / name).read_bytes() + b" ")
    one, two = build_manifest(llama), build_manifest(copy)
    assert one.id != two.id and two.unlike(one) == name and one.unlike(one) == ""
    assert one.digest(Span(0, 4)) == two.digest(Span(0, 4))


def test_what_the_difference_is_called(llama: Path, tied: Path) -> None:
    one = build_manifest(llama)
    assert one.unlike(build_manifest(tied)) == "config.json"
    more = replace(one, files=(*one.files, ("vocab.txt", "0" * 64)))
    assert more.unlike(one) == one.unlike(more) == "vocab.txt"
    assert one.unlike(replace(one, tensors=one.tensors[1:])) == f"tensor {one.tensors[0].name}"


def test_other_files_do_not_count(llama: Path, copy: Path) -> None:
    (copy / "README.md").write_text("read me")
    assert build_manifest(copy).id == build_manifest(llama).id


def test_a_changed_or_foreign_tokenizer_of_a_part_is_refused(copy: Path) -> None:
    """A missing one is not: a hop needs none."""
    manifest = build_manifest(copy)
    (copy / MANIFEST).write_bytes(manifest.encode())
    (copy / "tokenizer.json").unlink()
    assert build_manifest(copy).id == manifest.id
    (copy / "vocab.txt").write_text("a")
    with pytest.raises(ModelError, match=r"vocab\.txt is not the one that the model's manifest was made with"):
        build_manifest(copy)


def test_shard_that_the_index_names_must_exist(sharded: Path, tmp_path: Path) -> None:
    part = shutil.copytree(sharded, tmp_path / "part")
    lost = sorted(part.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"lacks {lost.name}, which {INDEX} names"):
        build_manifest(part)


def test_tensor_that_the_index_names_must_exist(sharded: Path, tmp_path: Path) -> None:
    part = shutil.copytree(sharded, tmp_path / "part")
    index = json.loads((part / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = next(iter(index["weight_map"].values()))
    (part / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks tensor model\.ghost\.weight"):
        build_manifest(part)


@pytest.mark.parametrize("kept", [0, 7, 100, 100_000])
def test_truncated_file_is_named(copy: Path, kept: int) -> None:
    os.truncate(copy / SINGLE, kept)
    with pytest.raises(ModelError, match=f"{SINGLE} is truncated"):
        build_manifest(copy)


def test_longer_file_is_refused(copy: Path) -> None:
    with (copy / SINGLE).open("ab") as handle:
        handle.write(b"x")
    with pytest.raises(ModelError, match="too long"):
        build_manifest(copy)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_missing_or_corrupt_config_is_named(copy: Path, content: bytes | None) -> None:
    (copy / "config.json").unlink()
    if content is not None:
        (copy / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        build_manifest(copy)


def test_pickle_weights_are_refused(copy: Path) -> None:
    (copy / SINGLE).rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="refused: pickle weights; convert to safetensors"):
        build_manifest(copy)


def test_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no weights"):
        build_manifest(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        build_manifest(tmp_path / "absent")


@pytest.mark.parametrize(
    ("tensors", "data", "message"),
    [
        ({"a": tensor(0, 4), "b": tensor(3, 7)}, 7, "overlaps"),
        ({"a": tensor(0, 4), "b": tensor(5, 7)}, 7, "belong to no tensor"),
        ({"a": tensor(0, 4)}, 3, "truncated"),
        ({"a": tensor(0, 4)}, 5, "too long"),
        ({"a": tensor(0, 4, "F33", [1])}, 4, "unknown dtype 'F33'"),
        ({"a": tensor(0, 4, "F32", [2])}, 4, "does not fit"),
        ({"a": tensor(4, 0)}, 4, "does not fit|impossible"),
        ({"a": tensor(0, 4, "U8", [-4])}, 4, "impossible shape"),
        ({"a": tensor(0, 1, "U8", [True])}, 1, "impossible shape"),
        ({"a": tensor(0, 0, "F32", [1 << 61, 0])}, 0, "impossible shape"),
        ({"a": tensor(0, 0, "F32", [1 << 30, 0, 1 << 30])}, 0, "impossible shape"),
        ({"a": {"dtype": "U8"}}, 4, "lacks dtype, shape or offsets"),
        ({"a": 3}, 4, "lacks dtype"),
        ({"a": {**tensor(0, 4), "data_offsets": [0]}}, 4, "impossible"),
        ({"a": {**tensor(0, 4), "dtype": ["U8"]}}, 4, "unknown dtype"),
    ],
)
def test_lying_headers_are_refused(tensors: dict[str, Any], data: int, message: str) -> None:
    raw, size = header(tensors, data)
    with pytest.raises(ModelError, match=message):
        parse_header(raw, "f.safetensors", size)


@pytest.mark.parametrize("raw", [b"", b"[]", b"3", b"{", b"\xff\xff", b'{"a":1,"a":2}', b"[" * 100_000])
def test_headers_that_are_no_objects_are_refused(raw: bytes) -> None:
    with pytest.raises(ModelError, match="header is not"):
        parse_header(raw, "f.safetensors", 8 + len(raw))


def test_huge_header_is_refused_before_it_is_read() -> None:
    with pytest.raises(ModelError, match="claims 100000001 bytes"):
        header_length((100_000_001).to_bytes(8, "little"), "f", 1 << 40)


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_reader(raw: bytes) -> None:
    try:
        length = header_length(raw[:8], "f", len(raw))
        parse_header(raw[8 : 8 + length], "f", len(raw))
    except ModelError:
        pass


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(PLAIN_BITS)), st.lists(st.integers(0, 6), max_size=3).map(lambda s: [*s, 2])),
        max_size=8,
    )
)
def test_honest_headers_are_read(facts: list[tuple[str, list[int]]]) -> None:
    tensors, at = {}, 0
    for index, (dtype, shape) in enumerate(facts):
        count = 1
        for side in shape:
            count *= side
        tensors[f"t{index}"] = tensor(at, at + count * PLAIN_BITS[dtype] // 8, dtype, shape)
        at += count * PLAIN_BITS[dtype] // 8
    raw, size = header(tensors, at)
    entries = parse_header(raw, "f", size)
    assert sum(len(entry) for entry in entries) == at
    assert {entry.name for entry in entries} == set(tensors)


def test_entries_point_at_the_bytes_that_safetensors_reads(llama: Path) -> None:
    from safetensors import safe_open

    with safe_open(llama / SINGLE, framework="np") as handle:
        names = set(handle.keys())
    assert {entry.name for entry in read_header(llama / SINGLE)} == names


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../b", "a//b", ".", "a\\b", "c:a", "a\0b"])
def test_file_names_must_stay_in_the_folder(name: str) -> None:
    with pytest.raises(ModelError, match="refused"):
        check_file_name(name)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"manyhands":1,"config":"%s","tensors":[]}' % (b"0" * 64),
        b'{"manyhands":3,"config":"%s","files":{},"tensors":[]}' % (b"0" * 64),
        b'{"manyhands":2,"config":"%s","tensors":[]}' % (b"0" * 64),
        b'{"manyhands":2,"config":"%s","files":[],"tensors":[]}' % (b"0" * 64),
        b'{"manyhands":2,"config":"%s","files":{"../evil":"%s"},"tensors":[]}' % (b"0" * 64, b"0" * 64),
        b'{"manyhands":2,"config":"%s","files":{"config.json":"%s"},"tensors":[]}' % (b"0" * 64, b"0" * 64),
        b'{"manyhands":2,"config":"%s","files":{"vocab.json":"11"},"tensors":[]}' % (b"0" * 64),
        b'{"manyhands":2,"config":"%s","files":{"vocab.json":3},"tensors":[]}' % (b"0" * 64),
        b'{"manyhands":2,"config":"00","files":{},"tensors":[]}',
        b'{"manyhands":2,"config":"%s","files":{},"tensors":[[1]]}' % (b"0" * 64),
        b'{"manyhands":2,"config":"%s","files":{},"tensors":[["a","F9",[],"%s"]]}' % (b"0" * 64, b"0" * 64),
        b'{"manyhands":2,"config":"%s","files":{},"tensors":[["a","U8",[-1],"%s"]]}' % (b"0" * 64, b"0" * 64),
    ],
)
def test_malformed_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(ModelError, match="is not a manifest"):
        Manifest.decode(raw)


def test_manifest_lists_each_tensor_once_and_in_order() -> None:
    rows = [TensorDigest("b", "U8", (1,), "0" * 64), TensorDigest("a", "U8", (1,), "0" * 64)]
    assert [entry.name for entry in Manifest.of("0" * 64, rows, {}).tensors] == ["a", "b"]
    with pytest.raises(ModelError, match="each once"):
        Manifest.of("0" * 64, [rows[0], rows[0]], {})


def test_a_manifest_of_as_many_tensors_as_kimi_k3_has_is_read() -> None:
    """497,052 of the text part, of which 494,592 are codes and scales of experts; by its longest row."""
    name = "model.layers.92.block_sparse_moe.experts.895.w1.weight_packed"
    row = Manifest.of("0" * 64, [TensorDigest(name, "U8", (3072, 1792), "0" * 64)], {}).encode()
    rest = Manifest.of("0" * 64, [], {}).encode()
    assert 497_052 * (len(row) - len(rest) + 1) < min(MAX_TABLE_BYTES, MAX_FILE_BYTES)
    assert 497_052 * (row.count(b",") - rest.count(b",") + 1) < MAX_COMMAS
