"""Kimi K3 against plain torch (tests/kimi_k3.py): logits in fp32 by every back end, cuts and steps, and what goes with it."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.cpu import CpuEnds, CpuSpan
from manyhands.engine.library import Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.span import Piece
from manyhands.engine.torch import TorchEnds, TorchSpan
from manyhands.errors import ModelError
from manyhands.program.families import build_program, read_program
from tests.kimi_k3 import CONFIG, Reference, config_of, make_kimi_k3, tensors_of

PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(40)]
TOLERANCE = 2e-5  # of the largest logit: fp32 against float64; seen are 0.3e-5 to 1.1e-5
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "layers that end within a block, no limit of ups": {"attn_res_block_size": 5, "activation_situ_linear_beta": None},
    "no residuals": {"attn_res_block_size": None},
    "one block": {"attn_res_block_size": 9, "num_shared_experts": 1},
    "a block a layer": {"attn_res_block_size": 1, "routed_scaling_factor": 1.0, "num_experts_per_token": 8},
}


def native(
    folder: Path,
    ids: Sequence[int],
    *,
    back_end: str = "",
    cuts: Sequence[int] = (),
    chunk: int = 64,
    kept: Precision = "fp32",
) -> NDArray[np.float32]:
    """Logits [T, vocab] of steps of `chunk` rows through spans that begin at `cuts`."""
    program, team, name = read_program(folder), Team(2), back_end or library.supported()[0]
    bounds = [0, *cuts, len(program.layers)]
    with MappedTensors(folder, lambda *_: None) as tensors:
        ends = CpuEnds(program, tensors.read, kept, team, name)
        spans = [CpuSpan(program, Span(first, end), tensors.read, kept, team, name) for first, end in pairwise(bounds)]
    caches, found = [span.new_cache(len(ids)) for span in spans], []
    for start in range(0, len(ids), chunk):
        some = ids[start : start + chunk]
        rows: Any = ends.embed(some)
        for span, cache in zip(spans, caches, strict=True):
            rows = span.step(rows, [Piece(cache, start, len(some))], 2)
        found.append(ends.logits(rows, len(some), 2))
    return np.concatenate(found)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("back_end", library.supported())
def test_logits_are_those_of_the_published_arithmetic(variant: str, back_end: str, tmp_path: Path) -> None:
    config = config_of(**VARIANTS[variant])
    theirs = Reference(config, tensors_of(config)).logits(PROMPT).numpy()
    ours = native(make_kimi_k3(tmp_path, **VARIANTS[variant]), PROMPT, back_end=back_end)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("kept", ["bf16", "fp32", "w8", "w4"])
def test_bits_depend_neither_on_cuts_nor_on_steps(kept: Precision, tmp_path: Path) -> None:
    """Rows between layers have the streams of all blocks: also where a span begins or ends within one."""
    folder = make_kimi_k3(tmp_path, torch.bfloat16, hidden_size=128)
    whole = native(folder, PROMPT, kept=kept)
    for cuts, chunk in (((4,), 64), ((1, 5, 8), 64), ((2, 3), 7), ((), 1)):
        assert native(folder, PROMPT, cuts=cuts, chunk=chunk, kept=kept).tobytes() == whole.tobytes()


def test_torch_computes_layers_of_attention_the_same(tmp_path: Path) -> None:
    """It computes no states: a model all of whose layers have latent attention."""
    linear = {**CONFIG["linear_attn_config"], "full_attn_layers": list(range(1, 10)), "kda_layers": []}
    folder = make_kimi_k3(tmp_path, linear_attn_config=linear)
    config = config_of(linear_attn_config=linear)
    program, tensors = read_program(folder), tensors_of(config)
    ends, span = TorchEnds(program, tensors.__getitem__), TorchSpan(program, Span(0, 9), tensors.__getitem__)
    piece = Piece(span.new_cache(len(PROMPT)), 0, len(PROMPT))
    ours = ends.logits(span.step(ends.embed(torch.tensor(PROMPT)), [piece]))
    theirs = Reference(config, tensors).logits(PROMPT)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_res_block_size": 0}, "attn_res_block_size is 0, a whole number from 1"),
        ({"num_hidden_layers": 64, "attn_res_block_size": 1}, "at most 63 blocks of the 64 layers"),
        ({"activation_situ_beta": 0}, "activation_situ_beta is 0"),
        ({"activation_situ_beta": None}, "activation_situ_beta is None"),
        ({"routed_expert_hidden_size": 0}, "routed_expert_hidden_size is 0"),
        ({"latent_moe_use_norm": 1}, "latent_moe_use_norm is 1, true or false"),
        ({"mla_use_output_gate": "yes"}, "mla_use_output_gate is 'yes', true or false"),
        ({"inside": {"gate_lower_bound": 0.5}}, "gate_lower_bound is 0.5, a number below zero"),
        ({"inside": {"use_full_rank_gate": 3}}, "use_full_rank_gate is 3, true or false"),
        ({"inside": {"num_heads": 33}}, "num_heads is 33, at most head_dim 32"),
        ({"dense_ffn_hidden": 12}, "dense_ffn_hidden"),
    ],
)
def test_what_is_wrong_of_a_config_is_named(changes: dict[str, Any], said: str) -> None:
    inside = changes.pop("inside", {})
    config = config_of(**changes)
    config["linear_attn_config"] = {**CONFIG["linear_attn_config"], **inside}
    if changes.get("num_hidden_layers"):
        config["linear_attn_config"].update(full_attn_layers=list(range(1, 65)), kda_layers=[])
    with pytest.raises(ModelError, match=said):
        build_program(config)


@pytest.mark.parametrize("field", CONFIG)
def test_a_damaged_config_gives_a_program_or_one_line(field: str) -> None:
    values: tuple[Any, ...] = (None, True, -1, 0, 1.5, "x", [1], 1 << 40, {})
    for value in values:
        try:
            build_program({**CONFIG, field: value})
        except ModelError as error:
            assert "\n" not in str(error)
