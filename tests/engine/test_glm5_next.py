"""GLM-5.3-Flash (glm5_next) against transformers: logits in fp32 by every back end; bits whatever the cuts and steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.cpu import CpuSpan
from manyhands.engine.golden_cases import reals
from manyhands.engine.library import Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.span import Piece
from manyhands.errors import ModelError
from manyhands.program.families import build_program, read_program
from tests.engine.test_kimi_k3 import native
from tests.glm5_next import TEXT, make, stock

PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(75)]
TOLERANCE = 1.2e-4  # of the largest logit: fp32 sums in other orders, which differ by CPU; seen are 0.6e-5 to 8.4e-5
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "groups of experts": {"n_group": 4, "topk_group": 2},
    "two streams, biases": {"hc_mult": 2, "attention_bias": True, "index_kpool": 4, "index_topk": 76},
}


def native_span(folder: Path) -> CpuSpan:
    program = read_program(folder)
    with MappedTensors(folder, lambda *_: None) as tensors:
        return CpuSpan(program, Span(0, len(program.layers)), tensors.read, "bf16", Team(2))


def rows_of(span: CpuSpan, count: int, seed: int) -> NDArray[np.uint8]:
    return (
        (reals(seed, count, span.hidden_size).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(count, -1)
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("back_end", library.supported())
def test_logits_are_those_of_transformers(variant: str, back_end: str, tmp_path: Path) -> None:
    model = stock(**VARIANTS[variant])
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()
    ours = native(make(tmp_path, model, **VARIANTS[variant]), PROMPT, back_end=back_end)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("kept", ["bf16", "fp32", "w8", "w4"])
def test_bits_depend_neither_on_cuts_nor_on_steps(kept: Precision, tmp_path: Path) -> None:
    folder = make(tmp_path, stock(), torch.bfloat16)
    whole = native(folder, PROMPT, kept=kept)
    for cuts, chunk in (((2,), 75), ((1, 4), 75), ((2, 3), 7), ((), 1)):
        assert native(folder, PROMPT, cuts=cuts, chunk=chunk, kept=kept).tobytes() == whole.tobytes()


@pytest.mark.parametrize(("rate", "top_k"), [(1, 8), (4, 16), (8, 16), (16, 32), (32, 64)])
def test_logits_are_those_of_transformers_far_beyond_what_is_chosen(rate: int, top_k: int, tmp_path: Path) -> None:
    """200 positions; a model that sees all has other logits behind the first."""
    given: dict[str, Any] = {"index_topk": top_k, "index_kpool": rate, "index_n_heads": 16}
    model, ids = stock(**given), [(37 * i * i + 11 * i) % 256 for i in range(200)]
    with torch.inference_mode():
        theirs = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    ours = native(make(tmp_path, model, **given), ids)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE
    whole = native(make(tmp_path, model, **{**given, "index_topk": 512}), ids)
    differs = np.abs(whole - theirs).max(-1) / np.abs(theirs).max()
    assert differs[: top_k + rate - 1].max() < TOLERANCE < 1e-3 < np.median(differs[top_k + rate :])


@pytest.mark.parametrize("kept", ["bf16", "w4"])
def test_the_same_bits_whatever_cuts_chunks_and_back_end_where_entries_are_chosen(
    kept: Precision, tmp_path: Path
) -> None:
    """150 positions, of which two entries of eight are seen and up to seven behind them; cuts within and between entries."""
    given: dict[str, Any] = {"index_topk": 16, "index_n_heads": 16}
    folder, ids = make(tmp_path, stock(**given), torch.bfloat16, **given), [(11 * i * i + 5) % 256 for i in range(150)]
    whole = native(folder, ids, kept=kept, back_end="scalar")
    for back_end in library.supported():
        for cuts, chunk in (((1, 2, 4), 150), ((3,), 13), ((), 64)):
            assert (
                native(folder, ids, cuts=cuts, chunk=chunk, kept=kept, back_end=back_end).tobytes() == whole.tobytes()
            )


def test_a_session_goes_back_into_an_entry(tmp_path: Path) -> None:
    """States hold the values and gates of an entry's positions: wrong rows in its middle leave nothing behind."""
    given: dict[str, Any] = {"index_topk": 16, "index_n_heads": 16}
    folder = make(tmp_path, stock(**given), torch.bfloat16, **given)
    span = native_span(folder)
    right, wrong = rows_of(span, 100, 1), rows_of(span, 100, 2)
    whole = span.step(right.tobytes(), [Piece(span.new_cache(), 0, 100)], 1)
    cache = span.new_cache()
    span.step(right[:61].tobytes(), [Piece(cache, 0, 61)], 1)
    span.step(wrong[61:75].tobytes(), [Piece(cache, 61, 14)], 1)
    assert np.array_equal(span.step(right[61:].tobytes(), [Piece(cache, 61, 39)], 1), whole[61:])
    fork = span.fork(cache, 85, 200)
    assert np.array_equal(span.step(right[85:].tobytes(), [Piece(fork, 85, 15)], 1), whole[85:])


def test_the_context_is_that_of_the_config() -> None:
    program = build_program({**TEXT, "model_type": "glm5_next_text", "max_position_embeddings": 1 << 20})
    assert program.context == 1 << 20 and program.has_index and program.has_states


def test_what_the_published_config_says_besides_is_what_is_computed() -> None:
    """Fields of zai-org/GLM-5.3-Flash that transformers (5.23) does not read: inert ones, and others that stand fast."""
    inert = {"indexer_rope_interleave": True, "index_share_for_mtp_iteration": True, "num_nextn_predict_layers": 1}
    fixed: dict[str, Any] = {
        "mhc": True, "index_kpool_compress": True, "mla_use_nope": True, "moe_router_dtype": "float32", "moe_layer_freq": 1,
        "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    }  # fmt: skip
    plain = {**TEXT, "model_type": "glm5_next_text"}
    assert build_program({**plain, **inert, **fixed}) == build_program(plain)
    for name in fixed:
        with pytest.raises(ModelError, match=f"{name} is"):
            build_program({**plain, **fixed, name: 2})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"index_topk": 73}, "index_topk is 73, a multiple of index_kpool, 8"),
        ({"index_kpool": 3}, "index_kpool is 3, one of 1, 2, 4, 8, 16, 32 is needed"),
        ({"indexer_types": ["full", "full", "full", "shared", "full"]}, "an indexer in each layer of attention"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail is False"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8, 0, and a q_lora_rank, are needed"),
        ({"linear_lower_bound": 1.0}, "linear_lower_bound is 1.0, a number below zero"),
        ({"linear_attn_config": {"safe_gate": False}}, "safe_gate is False"),
        ({"hc_mult": 9}, "hc_mult is 9"),
    ],
)
def test_what_is_wrong_of_a_config_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build_program({**TEXT, "model_type": "glm5_next_text", **changes})


@pytest.mark.parametrize("field", TEXT)
def test_a_damaged_config_gives_a_program_or_one_line(field: str) -> None:
    values: tuple[Any, ...] = (None, True, -1, 0, 1.5, "x", [1], 1 << 40, {})
    for value in values:
        try:
            build_program({**TEXT, "model_type": "glm5_next_text", field: value})
        except ModelError as error:
            assert "\n" not in str(error)
