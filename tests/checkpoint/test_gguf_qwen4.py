"""GGUF files of Qwen3.8-Flash-Next: how their table of n-grams is cut, and what is refused in one line."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.checkpoint import gguf_qwen4
from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.gguf import Gguf
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_model import config_json, tensor_entries
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.families.qwen4_exp import _multipliers, _primes
from manyhands.program.tensors import layer_tensors
from manyhands.testing.gguf import Written, write_gguf
from tests.checkpoint.test_gguf import change
from tests.engine.test_gguf import logits
from tests.engine.test_gguf_hybrids import numbers
from tests.gguf_files import tiny_gguf

HUGE = 1 << 60
TABLE = "per_layer_token_embd.weight"
WHOLE = np.array([3, 1 << 33], np.uint64)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf("qwen4_exp_text", tmp_path_factory.mktemp("qwen4") / "a.gguf", layers=4)[0].read_bytes()


def made(found: Gguf) -> dict[str, Any]:
    """The config of a header, of which keys that are None are absent."""
    facts = {name: value for name, value in found.facts.items() if value is not None}
    config: dict[str, Any] = json.loads(config_json(replace(found, facts=facts), lambda tensor: b""))
    return config


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"attention__compress_ratios": None}, r"compress_ratios are \[0, 0, 0, 0\]; one number of all layers with att"),
        ({"attention__compress_ratios": np.array([0, 0, 4, 4], np.int32)}, r"ratios are \[0, 0, 4, 4\]; one number"),
        ({"attention__compress_ratios": np.array([0, 4], np.int32)}, "compress_ratios is array.*for each of 4 layers"),
        ({"attention__compress_ratios": np.array([0, 0, 0, 3], np.int32)}, "indexer_compress_ratio is 3, one of 1, 2"),
        ({"attention__recurrent_layers": np.array([True, False])}, "recurrent_layers is .*a switch for each of 4"),
        ({"attention__recurrent_layers": np.array([True] * 4)}, r"ratios are \[0, 0, 0, 4\]; one number of all layers"),
        ({"attention__indexer__top_k": None}, "indexer.top_k is None; a whole number from 1"),
        ({"attention__indexer__types": np.array([True])}, "indexer.types' is not known here"),
        ({"hyper_connection__count": 1}, "hc_count is 1, a whole number from 2 to 8"),
        ({"hyper_connection__low_rank": None}, "hyper_connection.low_rank is None"),
        ({"hyper_connection__epsilon": 0.5}, "hyper_connection.epsilon' is not known here"),
        ({"ple__layers": np.array([1, 2], np.int32)}, r"ple.layers are \[1, 2\], with per_layer_.*: of one layer"),
        ({"ple__layers": None}, r"its ple.layers are \[\], with per_layer_token_embd.weight: of one layer"),
        ({"ple__layers": np.array([3], np.int32)}, r"ple_layer_ids is \[4\], numbers, from 1, of at most"),
        ({"ple__layers": np.array([HUGE], np.int64)}, r"ple_layer_ids is \[1152921504606846977\], numbers, from 1"),
        ({"ple__ngram_size": 1}, "ple.ngram_size is 1; a whole number from 2"),
        ({"ple__ngram_size": HUGE}, "ngram_size is 1152921504606846976, a whole number from 2 to 5"),
        ({"ple__heads_per_ngram": HUGE}, "heads_per_ngram is 1152921504606846976"),
        ({"ple__eos_token_id": 264}, "eos_token_id is 264, with ple_layer_ids an id below 264"),
        ({"ple__head_vocab_sizes": None}, "ple.head_vocab_sizes is None; a list of whole numbers of 32 or 64 bit"),
        ({"ple__head_vocab_sizes": np.ones(4, np.float32)}, "head_vocab_sizes is array.*a list of whole numbers"),
        ({"ple__head_vocab_sizes": np.ones(65, np.int32)}, "at most 64 numbers from 0 to below 2.63 are read"),
        ({"ple__head_vocab_sizes": -np.ones(4, np.int32)}, "at most 64 numbers from 0 to below 2.63 are read"),
        ({"ple__head_vocab_sizes": WHOLE}, r"per_layer_token_embd.weight has \d+ rows, and heads of n-grams together \d+"),
        ({"ple__head_vocab_sizes": WHOLE * 0}, r"has \d+ rows, and heads of n-grams together 0"),
        ({"embedding_length_per_layer_input": 8}, "embedding_length_per_layer_input is 8; served is 16"),
        ({"ple__seed": 1}, "ple.seed' is not known here"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(facts: dict[str, Any], message: str, raw: bytes) -> None:
    found = change(raw, **{f"qwen4exp__{name}": value for name, value in facts.items()})
    with pytest.raises(ModelError, match=message) as error:
        build_program(made(found))
    assert "\n" not in str(error.value)


def stored(found: Gguf, **fields: Any) -> Gguf:
    """With a table of other fields."""
    own = [replace(tensor, **fields) if tensor.name == TABLE else tensor for tensor in found.tensors]
    return replace(found, tensors=tuple(own))


def test_a_table_of_a_grid_and_one_of_other_shapes_are_refused_before_they_are_read(raw: bytes) -> None:
    found = change(raw)
    for table in (stored(found, dtype="IQ3_S"), stored(found, dtype="Q2_0"), stored(found, shape=(8, 4, 8))):
        with pytest.raises(ModelError, match=r"is stored as .*: rows of BF16, F16, .* are read of a table that stays"):
            made(table)
    none = replace(found, tensors=tuple(tensor for tensor in found.tensors if tensor.name != TABLE))
    with pytest.raises(ModelError, match=r"its ple.layers are \[2\], without per_layer_token_embd.weight"):
        tensor_entries(none)


@pytest.mark.parametrize(("most", "parts"), [(1 << 24, 1), (60, 4), (100, 3)])
def test_the_table_is_cut_into_equal_parts_that_hold_the_rows_of_all_heads(
    most: int, parts: int, raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_qwen4, "_MOST_ROWS", most)
    found = change(raw)
    entries, program = tensor_entries(found), build_program(made(found))
    table = next(tensor for tensor in found.tensors if tensor.name == TABLE)
    shards = [entry for entry in entries if ".shard_" in entry.name]
    assert len(shards) == parts and [entry.start for entry in entries] == sorted(entry.start for entry in entries)
    assert shards[0].start == table.start and all(a.end == b.start for a, b in pairwise(shards))
    needed = int(found.facts["qwen4exp.ple.head_vocab_sizes"].sum())
    assert needed <= sum(entry.shape[0] for entry in shards) <= table.shape[0]
    shapes = {entry.name: entry.shape for entry in entries}
    assert all(shapes[name] == shape for layer in program.layers for name, shape in layer_tensors(layer).items())


def test_the_published_table_is_cut_into_twenty_parts(raw: bytes) -> None:
    """Its numbers as published GGUF files state them, 120 bytes a row."""
    found, rows, size = change(raw), 320_001_536, 120
    sizes = np.array(_primes(20_000_003, 16), np.uint64)
    found.facts["qwen4exp.ple.head_vocab_sizes"] = sizes
    shards = [e for e in tensor_entries(stored(found, dtype="Q5_1", shape=(rows, 160))) if ".shard_" in e.name]
    assert {entry.shape for entry in shards} == {(16_000_073, 160)} and len(shards) == 20
    assert 0 <= shards[-1].end - shards[0].start - int(sizes.sum()) * size < (rows - int(sizes.sum())) * size
    assert _multipliers(1234, 248_320, 3) == (23703573157769, 20109073645365, 8052911324071)


def test_a_padded_table_in_parts_computes_as_it_does_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = tiny_gguf("qwen4_exp_text", tmp_path / "a.gguf", layers=4)
    expected = logits(gguf_folder(file, tmp_path / "whole"))
    monkeypatch.setattr(gguf_qwen4, "_MOST_ROWS", 60)
    padded = [
        (name, dtype, (array.shape[0] + 5, *shape[1:]), np.pad(array, ((0, 5), (0, 0)))) if name == TABLE else
        (name, dtype, shape, array)
        for name, dtype, shape, array in numbers(file)
    ]  # fmt: skip
    parts = gguf_folder(write_gguf(tmp_path / "b.gguf", read_gguf(file).facts, padded), tmp_path / "parts")
    assert sum(".shard_" in entry.name for entry in read_entries(parts)) == 4
    np.testing.assert_array_equal(logits(parts), expected)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        *((name, 32) for name in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")),
        ("Q4_K", 256),
    ],
)
def test_a_table_is_read_as_it_is_stored(dtype: str, width: int, tmp_path: Path) -> None:
    """Q5_1 and IQ4_NL are what published files have."""
    sizes = {"heads_per_ngram": 1, "ple_embed_dim": 2 * width, "layers": 4}
    file, _ = tiny_gguf(
        "qwen4_exp_text", tmp_path / "a.gguf", lambda name, _: dtype if name == TABLE else "F32", **sizes
    )
    assert {t.name: t.dtype for t in read_gguf(file).tensors}[TABLE] == dtype
    facts, whole = read_gguf(file).facts, numbers(file)
    plain = [(name, "F32", shape, as_wide(array) if name == TABLE else array) for name, _, shape, array in whole]
    other = write_gguf(tmp_path / "b.gguf", facts, plain)
    ours, expected = (logits(gguf_folder(path, tmp_path / "home")) for path in (file, other))
    np.testing.assert_array_equal(ours, expected)


def as_wide(array: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers of F16, or of BF16 as bytes, in fp32."""
    if array.dtype in (np.float16, np.float32):
        return array.astype(np.float32)
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer_multipliers", r"layer_multipliers has other numbers than qwen4_exp_text makes of its config"),
        ("head_offsets", r"ngram_heads_offsets has other numbers than qwen4_exp_text makes of its config"),
        ("head_vocab_sizes", r"shard_0.weight is stored as \[218, 16\], needed is \[220, 16\]"),  # of primes
    ],
)
def test_another_hash_is_refused_by_name_where_its_layer_is_loaded(name: str, message: str, tmp_path: Path) -> None:
    file, _ = tiny_gguf("qwen4_exp_text", tmp_path / "a.gguf", layers=4)
    facts, key = dict(read_gguf(file).facts), f"qwen4exp.ple.{name}"
    facts[key] = facts[key].copy()
    facts[key][-1] -= 2
    other = write_gguf(tmp_path / "b.gguf", facts, numbers(file))
    with pytest.raises(ModelError, match=message) as error:
        logits(gguf_folder(other, tmp_path / "home"))
    assert "\n" not in str(error.value)


def test_layers_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    """One more layer of attention, with a mixer of streams of its own."""
    file, _ = tiny_gguf("qwen4_exp_text", tmp_path / "a.gguf", layers=4)
    found, whole = read_gguf(file), numbers(file)
    ahead: list[Written] = [
        (name.replace("blk.3.", "blk.4."), dtype, shape, array)
        for name, dtype, shape, array in whole
        if name.startswith("blk.3.")
    ]
    ahead.append(("blk.4.nextn.eh_proj.weight", "F32", (64, 128), np.zeros((64, 128), np.float32)))
    ahead.append(("blk.4.nextn.hc_head_norm.weight", "F32", (192,), np.zeros(192, np.float32)))
    ratios = np.append(found.facts["qwen4exp.attention.compress_ratios"], np.int32(0))
    facts = {**found.facts, "qwen4exp.block_count": 5, "qwen4exp.nextn_predict_layers": 1}
    longer = write_gguf(tmp_path / "b.gguf", {**facts, "qwen4exp.attention.compress_ratios": ratios}, [*whole, *ahead])
    ours, expected = (logits(gguf_folder(path, tmp_path / "home")) for path in (longer, file))
    np.testing.assert_array_equal(ours, expected)
