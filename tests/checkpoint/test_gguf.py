"""Headers of GGUF files: read as the gguf package reads them, and hostile ones refused before anything large is made."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.checkpoint import gguf as header
from manyhands.checkpoint import gguf_model
from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.gguf import parse_gguf
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_model import _part, config_json, tensor_entries
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.checkpoint.manifest import build_manifest
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.ops import Attention, ScaleByPosition
from manyhands.testing.gguf import text, write_gguf
from tests.gguf_files import tiny_gguf

ONE = ("a", "F32", (4,), np.arange(4, dtype=np.float32))
Q4 = ("b", "Q4_0", (2, 64), np.zeros((2, 36), np.uint8))


def parse(raw: bytes, size: int | None = None) -> header.Gguf:
    return parse_gguf(lambda start, end: raw[start:end], "f.gguf", len(raw) if size is None else size)


def made(tmp_path: Path, facts: dict[str, Any] | None = None, tensors: Any = (ONE, Q4)) -> bytes:
    return write_gguf(tmp_path / "f.gguf", facts or {"general.architecture": "llama"}, tensors).read_bytes()


def test_a_file_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    facts = {"s": "text", "b": True, "i": 7, "f": 0.5, "list": ["x", "", "ü"], "n": np.arange(3, dtype=np.int32)}
    path = tmp_path / "f.gguf"
    path.write_bytes(made(tmp_path, facts))
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert {**ours.facts, "n": [0, 1, 2]} == {key: theirs.fields[key].contents() for key in facts}
    for tensor, other in zip(ours.tensors, theirs.tensors, strict=True):
        given = (other.name, other.tensor_type.name, tuple(other.shape[::-1]), other.data_offset, other.n_bytes)
        assert (tensor.name, tensor.dtype, tensor.shape, tensor.start, tensor.end - tensor.start) == given


def test_version_2_is_read(tmp_path: Path) -> None:
    raw = made(tmp_path)
    assert parse(raw[:4] + struct.pack("<I", 2) + raw[8:]).tensors == parse(raw).tensors


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    raw = made(tmp_path)
    for length in range(len(raw) - 32):  # the last tensor is padded
        with pytest.raises(ModelError, match="truncated"):
            parse(raw[:length])
    with pytest.raises(ModelError, match="truncated"):  # a file that ends before it says
        parse(raw[:60], len(raw))


@pytest.mark.parametrize("kind", [*header.REFUSED, 1000])
def test_types_that_are_not_held_are_refused_by_name(kind: int, tmp_path: Path) -> None:
    whole = made(tmp_path)
    at = whole.index(text("b") + struct.pack("<I", 2)) + len(text("b")) + 4 + 2 * 8
    assert whole[at : at + 4] == struct.pack("<I", 2)  # Q4_0
    name = header.REFUSED.get(kind, f"type {kind}")
    with pytest.raises(ModelError, match=f"tensor 'b' is stored as {name}; held exactly are .*, IQ2_S, "):
        parse(whole[:at] + struct.pack("<I", kind) + whole[at + 4 :])
    if kind in header.REFUSED and kind < 36:  # those of bitnet.cpp and PrismML the package lacks
        assert gguf.GGMLQuantizationType(kind).name == name


@pytest.mark.parametrize(
    ("at", "raw", "message"),
    [
        (0, b"GGML", 'begin with "GGUF"'),
        (4, struct.pack(">I", 3), "big-endian"),
        (4, struct.pack("<I", 1), "version is 1"),
        (8, struct.pack("<Q", 1 << 40), "claims 1099511627776 tensors"),
        (16, struct.pack("<Q", 1 << 62), "claims 4611686018427387904 keys"),
        (24, struct.pack("<Q", 1 << 50), "name of a key has"),
        (24, struct.pack("<Q", 0), "name of a key has 0"),
    ],
)
def test_headers_that_claim_the_impossible_are_refused(at: int, raw: bytes, message: str, tmp_path: Path) -> None:
    whole = made(tmp_path)
    with pytest.raises(ModelError, match=message):
        parse(whole[:at] + raw + whole[at + len(raw) :])


def key(value: bytes) -> bytes:
    return header.MAGIC + struct.pack("<IQQ", 3, 0, 1) + text("k") + value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (struct.pack("<IQ", 8, 1 << 45), "truncated"),
        (struct.pack("<IIQ", 9, 8, 1 << 40), "texts in lists"),
        (struct.pack("<IIQ", 9, 6, 1 << 60), "bytes of 'k'"),
        (struct.pack("<IIQ", 9, 8, 1 << 20), "truncated"),
        (struct.pack("<IIQ", 9, 9, 1), "list of the type 9"),
        (struct.pack("<I", 13), "unknown type 13"),
        (struct.pack("<If", 6, float("nan")), "must be finite"),
        (struct.pack("<IQ", 8, 2) + b"\xff\xfe", "not UTF-8"),
    ],
)
def test_values_that_claim_the_impossible_allocate_nothing(value: bytes, message: str) -> None:
    raw = key(value)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message):
            parse(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of a file is bounded, also where the bytes are there."""
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 1 << 16)
    monkeypatch.setattr(header, "FIRST_BYTES", 1 << 12)
    read: list[int] = []
    raw = key(struct.pack("<IIQ", 9, 8, 60_000)) + text("") * 60_000

    def take(start: int, end: int) -> bytes:
        read.append(end)
        return raw[start:end]

    with pytest.raises(ModelError, match="more than 65536 bytes"):
        parse_gguf(take, "f.gguf", 1 << 40)
    assert max(read) <= 1 << 16


def offset(raw: bytes, name: bytes, to: int) -> bytes:
    """`raw` with another offset of the vector `name`."""
    at = raw.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 8 + 4
    return raw[:at] + struct.pack("<Q", to) + raw[at + 8 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: offset(raw, b"a", 1), "no multiple of the alignment"),
        (lambda raw: offset(raw, b"a", 1 << 50), "truncated"),
        (lambda raw: offset(raw, b"a", 32), "overlaps"),
        (lambda raw: raw.replace(b"\x01\0\0\0\0\0\0\0b", b"\x01\0\0\0\0\0\0\0a"), "occurs twice"),
    ],
)
def test_tensors_out_of_place_are_refused(change: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        parse(change(made(tmp_path)))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("a", "Q4_0", (2, 33), np.zeros(1)), "rows of no whole blocks: a multiple of 32"),
        (("a", "Q4_K", (4, 64), np.zeros(1)), "a multiple of 256"),
        (("a", "F32", (1, 1, 1, 1, 4), np.zeros(1)), "has 5 dimensions"),
        (("a", "F32", (1 << 60, 1 << 60), np.zeros(1)), "truncated"),
        (("a", "F32", (1 << 60, 0), np.zeros(1)), "has the empty shape"),
    ],
)
def test_impossible_tensors_are_refused(tensor: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        parse(made(tmp_path, tensors=[tensor]))


@pytest.mark.parametrize("number", sorted(header.REFUSED))
def test_types_that_are_not_held_exactly_are_refused_by_name(number: int, tmp_path: Path) -> None:
    raw = made(tmp_path, tensors=[ONE])
    at = raw.index(b"\x01\0\0\0\0\0\0\0a") + 9 + 4 + 8
    with pytest.raises(ModelError, match=f"stored as {header.REFUSED[number]}; held exactly are F32"):
        parse(raw[:at] + struct.pack("<I", number) + raw[at + 4 :])


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_reader(raw: bytes) -> None:
    for whole in (raw, header.MAGIC + struct.pack("<I", 3) + raw, key(raw)):
        try:
            parse(whole)
        except ModelError:
            pass


@given(st.integers(0, 1000), st.integers(0, 5000), st.binary(min_size=1, max_size=8))
def test_no_change_of_a_real_header_crashes_what_reads_it(
    real: bytes, others: dict[str, bytes], which: int, at: int, put: bytes
) -> None:
    real = [real, *others.values()][which % (len(others) + 1)]
    raw = real[:at] + put + real[at + len(put) :]
    try:
        found = parse(raw, len(real))
        tensor_entries(found)
        config_json(found, lambda tensor: raw[tensor.start : tensor.end])
    except ModelError:
        pass


DENSE = ("ministral3", "gemma4_text", "exaone4", "muse_glimmer_text", "bitnet", "llama_nanbeige", "falcon_plain", "mpt")
HYBRIDS = ("qwen3_5_text", "lfm2", "lfm2_moe", "granitemoehybrid_mamba", "nemotron_h", "falcon_h1")
EXPERTS = ("deepseek_v2", "glm4_moe", "glm4_moe_air", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("others")
    names = (
        "gpt_oss",
        "deepseek_v3",
        "granite",
        "granitemoe_swa",
        "olmo3",
        "qwen2_moe",
        "glm4",
        "gpt_neox",
        "granitemoe",
        *HYBRIDS,
        *DENSE,
        *EXPERTS,
    )
    return {name: tiny_gguf(name, folder / f"{name}.gguf", layers=3)[0].read_bytes() for name in names}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file, _ = tiny_gguf("llama_tied", tmp_path_factory.mktemp("gguf") / "f.gguf", layers=1)
    return file.read_bytes()


def change(raw: bytes, **facts: Any) -> header.Gguf:
    """A parsed header with other facts; dots are written as two underscores."""
    found = parse(raw)
    found.facts.update({name.replace("__", "."): value for name, value in facts.items()})
    return found


TWO = np.array([1, 2], np.int32)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"general__architecture": "rwkv7"}, "architecture is 'rwkv7'; served from GGUF are llama"),
        ({"general__architecture": 3}, "architecture is 3"),
        ({"llama__block_count": "x"}, "llama.block_count is 'x'"),
        ({"llama__attention__head_count": np.array([4, 2], np.int32)}, "a whole number from 1 is needed"),
        ({"llama__new__field": 1}, "'llama.new.field' is not known here"),
        ({"prism__hadamard__block_size": 1024}, "'prism.hadamard.block_size' is not known here"),
        ({"llama__rope__scaling__type": "odd"}, "positions are scaled by 'odd'"),
        ({"llama__rope__scaling__type": "longrope"}, "scaled by longrope .*, without factors of columns"),
        ({"llama__rope__scaling__attn_factor": 1.5}, "attn_factor 1.5, without factors of columns"),
        ({"llama__attention__causal": False}, "its attention looks ahead"),
        ({"llama__attention__value_length": 8}, "heads of different widths"),
        ({"llama__expert_count": TWO}, "'llama.expert_count' is a list"),
        ({"llama__rope__scaling__type": TWO}, "'llama.rope.scaling.type' is a list"),
    ],
)
def test_metadata_that_is_not_understood_is_refused(facts: dict[str, Any], message: str, real: bytes) -> None:
    found = change(real, **facts)
    found = header.Gguf(found.file, found.facts, tuple(t for t in found.tensors if "rope" not in t.name), 0)
    with pytest.raises(ModelError, match=message):
        config_json(found, lambda tensor: b"")


@pytest.mark.parametrize(
    ("family", "facts", "message"),
    [
        ("gpt_oss", {"gpt-oss__attention__sliding_window_pattern": 3}, "pattern is 3; served is 2"),
        ("gpt_oss", {"gpt-oss__rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5; served is 1.0"),
        ("gpt_oss", {"gpt-oss__expert_feed_forward_length": 0}, "expert_feed_forward_length is 0; a whole number"),
        ("deepseek_v3", {"deepseek2__rope__scaling__yarn_log_multiplier": 0.0}, "yarn without rope.scaling.yarn_log"),
        (
            "deepseek_v3",
            {"deepseek2__attention__key_length_mla": 8},
            "queries of a head are 8 wide; more than the 8 that turn",
        ),
        ("deepseek_v3", {"deepseek2__attention__kv_lora_rank": "x"}, "kv_lora_rank is 'x'"),
        ("deepseek_v3", {"deepseek2__expert_weights_norm": 1}, "expert_weights_norm is 1; true or false is needed"),
        ("granite", {"granite__rope__scaling__finetuned": False}, "finetuned is False; served is True"),
        (
            "granitemoe_swa",
            {"granite_swa__attention__sliding_window": None},
            "sliding_window is None; a whole number from 1",
        ),
        ("granitemoe_swa", {"granite_swa__attention__sliding_window_pattern": None}, "which layers have a window"),
        ("granitemoe_swa", {"granite_swa__attention__rope_pattern": TWO}, "a switch for each of 3 layers is needed"),
        ("granitemoe_swa", {"granite_swa__deepstack_mapping": TWO}, "deepstack_mapping' is not known here"),
        ("granite", {"granite__logit_scale": None}, "logit_scale is None; a number is needed"),
        (
            "olmo3",
            {"olmo2__attention__sliding_window_pattern": TWO},
            r"is array\(\[1, 2\].*; a switch for each of 3 layers",
        ),
        ("olmo3", {"olmo2__attention__sliding_window_pattern": "x"}, "pattern is 'x'; a switch for each"),
        ("qwen2_moe", {"qwen2moe__expert_used_count": 0}, "expert_used_count is 0"),
        ("glm4", {"glm4__nextn_predict_layers": 1}, "nextn_predict_layers' is not known here"),
        ("gpt_neox", {"gptneox__use_parallel_residual": 1}, "residual is 1; true or false is needed"),
        ("gpt_neox", {"gptneox__attention__head_count_kv": 2}, "its heads share keys"),
        ("gpt_neox", {"gptneox__attention__layer_norm_epsilon": None}, "layer_norm_epsilon is None; a number"),
        ("qwen3_5_text", {"qwen35__ssm__inner_size": 97}, "has 97 columns of values, no multiple of its 6 heads"),
        (
            "qwen3_5_text",
            {"qwen35__rope__dimension_sections": None},
            "dimension_sections is None; a whole number from 0",
        ),
        (
            "qwen3_5_text",
            {"qwen35__rope__dimension_sections": np.array([1, 1, 1, 1], np.int32)},
            r"dimension_sections \[1, 1, 1, 1\] are not the 4 pairs of columns that turn",
        ),
        ("lfm2", {"lfm2__attention__head_count_kv": TWO}, "a whole number from 0 for each of 3 layers"),
        ("lfm2", {"lfm2__attention__head_count_kv": np.array([0, 2, 1], np.int32)}, "different numbers of key heads: "),
        ("lfm2_moe", {"lfm2moe__expert_gating_func": 1}, "its experts are not chosen by sigmoid"),
        ("granitemoehybrid_mamba", {"granitehybrid__ssm__inner_size": 100}, "Mamba are 100 wide, no multiple of 64"),
        ("granitemoehybrid_mamba", {"granitehybrid__rope__scaling__finetuned": 1}, "finetuned is 1; true or false is"),
        ("granitemoehybrid_mamba", {"granitehybrid__ssm__group_count": None}, "group_count is None; a whole number"),
        ("granitemoehybrid_mamba", {"granitehybrid__attention__head_count_kv": TWO}, "for each of 3 layers is needed"),
        ("falcon_h1", {"falcon-h1__ssm__inner_size": 97}, "97 wide, no multiple of their 8 heads"),
        ("falcon_h1", {"falcon-h1__ssm__new": 1}, "ssm.new' is not known here"),
        ("nemotron_h", {"nemotron_h_moe__expert_gating_func": 1}, "its experts are not chosen by sigmoid"),
        ("nemotron_h", {"nemotron_h_moe__expert_group_count": 2}, "expert_group_count is 2; served is 1"),
        ("nemotron_h", {"nemotron_h_moe__expert_shared_count": 2}, "expert_shared_count is 2; served is 1"),
        ("nemotron_h", {"nemotron_h_moe__ssm__inner_size": 97}, "97 wide, no multiple of their 8 heads"),
        ("nemotron_h", {"nemotron_h_moe__feed_forward_length": TWO}, "for each of 4 layers is needed"),
        (
            "nemotron_h",
            {"nemotron_h_moe__feed_forward_length": np.array([0, 40, 0, 8], np.int32)},
            r"different widths of blocks: \[0, 8, 40\]",
        ),
        (
            "nemotron_h",
            {"nemotron_h_moe__attention__head_count_kv": np.array([2, 2, 2, 0], np.int32)},
            "both attention and a block",
        ),
        ("granitemoe", {"granitemoe__rope__scaling__finetuned": False}, "finetuned is False; served is True"),
        (
            "granitemoe",
            {"granitemoe__expert_shared_feed_forward_length": 8},
            "shared_feed_forward_length' is not known",
        ),
        ("deepseek_v3", {"deepseek2__attention__temperature_scale": 1.0}, "temperature_scale' is not known here"),
        ("ministral3", {"mistral3__attention__temperature_scale": "x"}, "temperature_scale is 'x'; a number is needed"),
        ("ministral3", {"mistral3__attention__temperature_length": 8}, "temperature_length' is not known here"),
        ("exaone4", {"exaone4__attention__sliding_window_pattern": TWO}, "a switch for each of 64 layers is needed"),
        ("exaone4", {"exaone4__attention__sliding_window": "x"}, "sliding_window is 'x'; a whole number"),
        (
            "muse_glimmer_text",
            {"muse-glimmer__attention__sliding_window_pattern": None},
            "does not say .* have a window",
        ),
        ("muse_glimmer_text", {"muse-glimmer__attention__sliding_window": None}, "sliding_window is None"),
        ("muse_glimmer_text", {"muse-glimmer__logit_scale": None}, "logit_scale is None; a number is needed"),
        (
            "muse_glimmer_text",
            {"muse-glimmer__rope__scaling__type": "linear", "muse-glimmer__rope__scaling__factor": 2.0},
            "its positions are scaled",
        ),
        ("bitnet", {"bitnet__hidden_activation": None}, "does not say by hidden_activation .* relu2 as in 2B-4T"),
        ("bitnet", {"bitnet__hidden_activation": "gelu"}, "hidden_activation is 'gelu'; served are silu and relu2"),
        ("bitnet", {"bitnet__hidden_activation": TWO}, "'bitnet.hidden_activation' is a list"),
        ("mpt", {"mpt__attention__max_alibi_bias": 0.0}, "max_alibi_bias is 0.0; served is 8.0"),
        ("mpt", {"mpt__attention__clamp_kqv": "6"}, "clamp_kqv is '6'; a number is needed"),
        ("falcon_plain", {"falcon__use_alibi": True}, "'falcon.use_alibi' is not known here"),
        ("llama_nanbeige", {"nanbeige__num_loops": 0}, "num_loops is 0; a whole number from 1 is needed"),
        ("llama_nanbeige", {"nanbeige__num_loops": 400}, "3 layers are gone through 400 times; at most 1024 layers"),
        ("llama_nanbeige", {"nanbeige__skip_loop_final_norm": 1}, "final_norm is 1; true or false is needed"),
        ("llama_nanbeige", {"nanbeige__attention__head_dim": 8}, "head_dim is 8; served is 16"),
        ("llama_nanbeige", {"nanbeige__loop_share_kv": True}, "'nanbeige.loop_share_kv' is not known here"),
        ("ministral3", {"mistral3__expert_count": 4}, "mistral3 with experts is not served from GGUF"),
    ],
)
def test_metadata_of_an_architecture_is_refused_by_name(
    family: str, facts: dict[str, Any], message: str, others: dict[str, bytes]
) -> None:
    with pytest.raises(ModelError, match=message):
        config_json(change(others[family], **facts), lambda tensor: b"")


def config(raw: bytes, **facts: Any) -> dict[str, Any]:
    """The config.json that is made of a file with other facts."""
    found: dict[str, Any] = json.loads(config_json(change(raw, **facts), lambda tensor: raw[tensor.start : tensor.end]))
    return found


@pytest.mark.parametrize(("head", "turned"), [(44, 30), (98, 2), (100, 58), (110, 62), (96, 32)])
def test_as_many_columns_turn_as_the_file_says(head: int, turned: int, others: dict[str, bytes]) -> None:
    """A part of a head is a quotient, and the recipe multiplies: 44 * (30 / 44) is 29.99, and 29 columns were refused."""
    sizes = {"attention__key_length": head, "attention__value_length": head, "rope__dimension_count": turned}
    program = build_program(config(others["glm4"], **{f"glm4__{name}": size for name, size in sizes.items()}))
    assert {len(rope.frequencies) for rope in program.ropes} == {turned // 2}


def test_every_part_of_every_head_comes_back() -> None:
    pairs = [(head, turned) for head in range(2, 1025, 2) for turned in range(2, head + 1, 2)]
    assert all(int(head * _part(turned, head)) == turned and _part(turned, head) <= 1 for head, turned in pairs)


def test_queries_that_grow_do_so_from_the_length_that_the_file_says(others: dict[str, bytes]) -> None:
    """Ministral 3: queries are scaled from the length before yarn on; without yarn from what the file says, else not."""
    known, raw = "mistral3__rope__scaling__original_context_length", others["ministral3"]

    def lengths(**facts: Any) -> set[tuple[float, int]]:
        program = build_program(config(raw, **facts))
        assert program.context == 1024
        ops = (op for layer in program.layers for op in layer.ops)
        return {(op.beta, op.length) for op in ops if isinstance(op, ScaleByPosition)}

    assert lengths() == {(0.1, 32)}
    assert lengths(mistral3__attention__temperature_scale=0.0) == set()
    plain = {"mistral3__rope__scaling__type": "none"}
    assert lengths(**plain) == {(0.1, 32)}
    assert lengths(**plain, **{known: 1024}) == {(0.1, 1024)}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"attention__shared_kv_layers": -1}, "shared_kv_layers is -1; a whole number from 0"),
        ({"embedding_length_per_layer_input": 0.5}, "embedding_length_per_layer_input is 0.5; a whole number from 0"),
        (
            {"feed_forward_length": np.array([96, 96, 192], np.int32)},
            "not one number, or twice that in the last 0 layers",
        ),
        ({"feed_forward_length": TWO}, "a whole number from 0 for each of 3 layers"),
        ({"attention__key_length_swa": None}, "key_length_swa is None; a whole number"),
        ({"attention__value_length_swa": 8}, "value_length_swa is 8; served is 32"),
        ({"rope__dimension_count_swa": 8}, "dimension_count_swa is 8; served is 32"),
        ({"attention__sliding_window_pattern": None}, "does not leave the last layer without a window"),
        ({"attention__sliding_window_pattern": np.array([True] * 3)}, "does not leave the last layer without a window"),
        ({"attention__sliding_window_pattern": TWO}, "a switch for each of 3 layers"),
        ({"attention__head_count_kv": np.array([2, 1, 1], np.int32)}, "different numbers of key heads: "),
        ({"attention__head_count_kv": np.array([2, 2, 0], np.int32)}, "different numbers of key heads: "),
        ({"rope__freq_base_swa": None}, "freq_base_swa is None; a number is needed"),
        (
            {"attention__key_length": 32, "attention__value_length": 32, "rope__dimension_count": 32},
            "is not 16 factors",
        ),
        ({"expert_feed_forward_length": 0}, "expert_feed_forward_length is 0"),
        ({"rope__scaling__factor": 2.0}, "scaled twice: by linear and by rope_freqs.weight"),
    ],
)
def test_what_is_not_served_of_gemma_4_is_refused_by_name(
    facts: dict[str, Any], message: str, others: dict[str, bytes]
) -> None:
    with pytest.raises(ModelError, match=message):
        config(others["gemma4_text"], **{f"gemma4__{name}": value for name, value in facts.items()})


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {"attention__shared_kv_layers": 1},
            "feed_forward_length is not one number, or twice that in the last 1 layers",
        ),
        ({"attention__shared_kv_layers": 4}, "twice that in the last 4 layers"),
        ({"embedding_length_per_layer_input": 0}, "num_kv_shared_layers is 2, only 0 is supported"),
        ({"feed_forward_length": np.array([96, 192, 192, 192], np.int32)}, "twice that in the last 2 layers"),
    ],
)
def test_what_is_not_served_of_gemma_4_e4b_is_refused_by_name(
    facts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw = tiny_gguf("gemma4_text_e4b", tmp_path / "e4b.gguf", layers=4)[0].read_bytes()
    with pytest.raises(ModelError, match=message):
        build_program(config(raw, **{f"gemma4__{name}": value for name, value in facts.items()}))
    even = config(raw, gemma4__feed_forward_length=96)
    assert (even["intermediate_size"], even["use_double_wide_mlp"]) == (96, False)
    assert config(raw)["use_double_wide_mlp"] is True


def gemma4(raw: bytes, *more: str, factors: tuple[float, ...] = ()) -> dict[str, Any]:
    """The config.json of a file with more tensors, or other factors of columns."""
    found = parse(raw)
    added = [header.GgufTensor(name, "F32", (64, 64), 0, 16384, found.file) for name in more]

    def read(tensor: header.GgufTensor) -> bytes:
        return np.array(factors, "<f4").tobytes() if factors else raw[tensor.start : tensor.end]

    made: dict[str, Any] = json.loads(
        config_json(header.Gguf(found.file, found.facts, (*found.tensors, *added), 0), read)
    )
    return made


@pytest.mark.parametrize("factors", [(1.0,) * 8 + (2.0,) * 24, (1.0,) * 8 + (1e30,) * 23 + (1.0,), (1e30,) * 32])
def test_pairs_that_turn_at_other_rates_are_refused(factors: tuple[float, ...], others: dict[str, bytes]) -> None:
    raw = others["gemma4_text"]
    part = gemma4(raw, factors=(1.0,) * 4 + (1e30,) * 28)["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    assert part == 4 / 32
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not 32 factors, first 1 for pairs that turn"):
        gemma4(raw, factors=factors)


def test_products_of_values_that_some_layers_lack_are_refused(others: dict[str, bytes]) -> None:
    """Layers without a window all have them, or none; with them they have as many key heads as others."""
    raw = others["gemma4_text"]
    assert gemma4(raw)["attention_k_eq_v"] is True
    with pytest.raises(ModelError, match="have 1 key heads and products of values"):
        gemma4(raw, "blk.2.attn_v.weight")
    found = change(raw, gemma4__attention__sliding_window_pattern=np.array([True, False, False]))
    found.facts["gemma4.attention.head_count_kv"] = np.array([2, 1, 1], np.int32)
    with pytest.raises(ModelError, match=r"it has no blk\.2\.attn_v\.weight, but blk\.1\.attn_v\.weight"):
        config_json(found, lambda tensor: raw[tensor.start : tensor.end])


def test_layers_of_muse_glimmer_turn_by_the_base_of_windows(others: dict[str, bytes]) -> None:
    """Those without a window have no positions."""
    found = config(others["muse_glimmer_text"], **{"muse-glimmer__rope__freq_base_swa": 5e5})
    assert found["layer_rope_theta"] == [5e5 * (kind == "sliding_attention") for kind in found["layer_types"]]
    assert build_program(found).ropes == build_program(found | {"rope_parameters": {"rope_theta": 5e5}}).ropes


def test_layers_of_exaone_4_that_guess_ahead_are_left_out(others: dict[str, bytes]) -> None:
    """EXAONE 4.5; and of windows that no switches place, every fourth layer has none."""
    raw, windows = others["exaone4"], np.array([True, True, True, False] * 16)[:62]
    added = {"exaone4__nextn_predict_layers": 2, "exaone4__attention__sliding_window_pattern": windows}
    found = change(raw, **added)
    assert config(raw, **added)["num_hidden_layers"] == 62
    assert {entry.name.split(".")[2] for entry in tensor_entries(found) if "layers" in entry.name} == set(
        map(str, range(62))
    )
    made = [
        build_program(config(raw, exaone4__attention__sliding_window_pattern=one)) for one in (None, np.ones(64) > 0)
    ]
    seen = [[op.window for layer in one.layers for op in layer.ops if isinstance(op, Attention)] for one in made]
    assert seen == [[24, 24, 24, None] * 16, [24] * 64]


def test_biases_that_no_recipe_adds_are_refused(others: dict[str, bytes]) -> None:
    found = parse(others["deepseek_v3"])
    one = header.GgufTensor("blk.0.attn_q_b.bias", "F32", (64,), 0, 256, found.file)
    with pytest.raises(ModelError, match="biases of attn_q_b, which deepseek_v3 has not"):
        config_json(header.Gguf(found.file, found.facts, (*found.tensors, one), 0), lambda tensor: b"")


@pytest.mark.parametrize("facts", [{"llama__rope__scaling__type": "yarn"}, {"llama__rope__scaling__factor": 4.0}])
def test_positions_that_are_scaled_twice_are_refused(facts: dict[str, Any], real: bytes) -> None:
    with pytest.raises(ModelError, match=r"scaled twice: by \w+ and by rope_freqs.weight"):
        config_json(change(real, **facts), lambda tensor: real[tensor.start : tensor.end])


def test_a_factor_without_a_scaling_scales_nothing(real: bytes) -> None:
    found = change(real, llama__rope__scaling__type="none", llama__rope__scaling__factor=4.0)
    tensors = tuple(tensor for tensor in found.tensors if "rope" not in tensor.name)
    config = config_json(header.Gguf(found.file, found.facts, tensors, 0), lambda tensor: b"")
    assert "rope_scaling" not in json.loads(config)


def test_biases_of_some_products_are_not_left_out(real: bytes) -> None:
    """llama.cpp adds those that there are; transformers has a bias for all products of attention, or for none."""
    found = parse(real)
    one = header.GgufTensor("blk.0.attn_q.bias", "F32", (64,), 0, 256, found.file)
    with pytest.raises(ModelError, match="biases of attn_q, and not of attn_k, attn_output, attn_v"):
        config_json(
            header.Gguf(found.file, found.facts, (*found.tensors, one), 0),
            lambda tensor: real[tensor.start : tensor.end],
        )


def test_files_of_falcon_2_must_state_their_base_frequency(others: dict[str, bytes]) -> None:
    """They have several key heads and one norm; llama.cpp's converter writes none for any falcon."""
    found = change(others["falcon_plain"], falcon__attention__head_count_kv=2)
    assert json.loads(config_json(found, lambda tensor: b""))["new_decoder_architecture"] is True
    del found.facts["falcon.rope.freq_base"]
    with pytest.raises(ModelError, match=r"one norm, as Falcon 2, and does not state rope\.freq_base"):
        config_json(found, lambda tensor: b"")
    found.facts["falcon.attention.head_count_kv"] = 1
    assert json.loads(config_json(found, lambda tensor: b""))["rope_theta"] == 10000.0


def test_layers_that_are_gone_through_again_are_entries_of_the_same_bytes(others: dict[str, bytes]) -> None:
    """With the last norm before the first of them. Layers beyond those that are counted are none to go through again."""
    found = change(others["llama_nanbeige"])
    places = {entry.name: (entry.start, entry.end) for entry in tensor_entries(found)}
    again = [name for name in places if name.startswith(("model.layers.3.", "model.layers.4.", "model.layers.5."))]
    assert len(again) == 3 * 9 + 1 and places["model.layers.3.loop_norm.weight"] == places["model.norm.weight"]
    assert places["model.layers.5.mlp.up_proj.weight"] == places["model.layers.2.mlp.up_proj.weight"]
    found.facts.update({"nanbeige.block_count": 1, "nanbeige.num_loops": 1024})
    assert len(tensor_entries(found)) == 1024 * 10 - 1 + 3 + 2 * 9


def test_a_tensor_that_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="llama has no tensor 'blk"):
        tensor_entries(parse(made(tmp_path, tensors=[("blk.0.odd.weight", "F32", (4,), ONE[3])])))


def test_experts_are_ranges_of_their_stack(tmp_path: Path) -> None:
    file, _ = tiny_gguf("mixtral", tmp_path / "f.gguf", "Q8_0", layers=1)
    found = {entry.name: entry for entry in tensor_entries(read_gguf(file))}
    one, two = (found[f"model.layers.0.block_sparse_moe.experts.{n}.w1.weight"] for n in (0, 1))
    assert one.end == two.start and one.shape == (96, 64) and len(one) == 96 * 2 * 34


@pytest.mark.parametrize("shape", [(5000, 4), (4, 4, 4), (4,)])
def test_stacks_of_norms_that_make_no_sense_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = ("blk.0.attn_q_norm.weight", "F32", shape, np.zeros(shape, np.float32))
    with pytest.raises(ModelError, match="a stack of at most 4096 vectors is needed"):
        tensor_entries(parse(made(tmp_path, {"general.architecture": "stablelm"}, [tensor])))


@pytest.mark.parametrize("shape", [(5000, 1, 1), (4, 4), (4,)])
def test_stacks_of_experts_that_make_no_sense_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Each expert is an entry: their number is bounded, whatever the size of the file."""
    tensor = ("blk.0.ffn_gate_exps.weight", "F32", shape, np.zeros(shape, np.float32))
    raw = made(tmp_path, {"general.architecture": "qwen3moe"}, [tensor])
    with pytest.raises(ModelError, match="a stack of at most 4096 matrices is needed"):
        tensor_entries(parse(raw))


def test_stacks_without_end_are_refused_before_they_are_unfolded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """131,072 tensors, each a stack of 4,096: a file of a gigabyte became 537 million entries."""
    monkeypatch.setattr(gguf_model, "MAX_ENTRIES", 100)
    stack = np.zeros((40, 1, 1), np.float32)
    unfolded: list[int] = []

    def entry(*facts: Any) -> None:
        unfolded.append(1)

    for count in (2, 1000):
        tensors = [(f"blk.{layer}.ffn_gate_exps.weight", "F32", stack.shape, stack) for layer in range(count)]
        raw = made(tmp_path, {"general.architecture": "qwen3moe"}, tensors)
        if count == 2:
            assert len(tensor_entries(parse(raw))) == 80
            continue
        monkeypatch.setattr(gguf_model, "TensorEntry", entry)
        with pytest.raises(ModelError, match="with each expert by itself it has more than 100 tensors"):
            tensor_entries(parse(raw))
        assert len(unfolded) == 101


def test_the_id_names_the_stored_bytes(tmp_path: Path) -> None:
    """The same bytes are the same model, whatever the file is called; another type of the same weights is another model."""
    file, _ = tiny_gguf("qwen2", tmp_path / "a.gguf", "Q8_0", layers=1)
    copy = tmp_path / "b.gguf"
    copy.write_bytes(file.read_bytes())
    other, _ = tiny_gguf("qwen2", tmp_path / "c.gguf", "Q4_0", layers=1)
    ids = [build_manifest(gguf_folder(path, tmp_path / "home")).id for path in (file, copy, other)]
    assert ids[0] == ids[1] != ids[2]
    dtypes = {tensor.name: tensor.dtype for tensor in build_manifest(gguf_folder(file, tmp_path / "home")).tensors}
    assert dtypes["model.embed_tokens.weight"] == "Q8_0" and dtypes["model.norm.weight"] == "F32"


def test_a_folder_follows_its_file(tmp_path: Path) -> None:
    """It holds no copy of weights, is made once, and anew when the file has changed."""
    file, _ = tiny_gguf("qwen2", tmp_path / "a.gguf", layers=1)
    folder = gguf_folder(file, tmp_path / "home")
    assert (folder / "a.gguf").is_symlink() and sum(path.lstat().st_size for path in folder.iterdir()) < 50_000
    before = (folder / "config.json").stat().st_mtime_ns
    assert gguf_folder(file, tmp_path / "home") == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    tiny_gguf("qwen2", tmp_path / "new.gguf", layers=2)[0].replace(file)
    assert json.loads((gguf_folder(file, tmp_path / "home") / "config.json").read_bytes())["num_hidden_layers"] == 2
    assert len({entry.name.split(".")[2] for entry in read_entries(folder) if ".layers." in entry.name}) == 2
