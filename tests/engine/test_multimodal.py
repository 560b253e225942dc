"""The text part of multimodal checkpoints against transformers: fp32 logits of the native engine, cut, and greedy ids."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.verify import ignore
from manyhands.core import Span
from manyhands.engine.cpu import CpuEnds, CpuSpan, Piece
from manyhands.engine.library import Team
from manyhands.engine.mapped import MappedTensors
from manyhands.program.families import read_program
from manyhands.program.tensors import ends_tensors, layer_tensors, with_stacked_experts
from tests.multimodal import CONTEXT, KINDS, LAYERS, make_multimodal

UNSCALED = (
    "aya_vision",
    "cohere2_vision",
)  # there the text model's logit_scale is left out, which its publisher applies
NEVER_TIED = ("nemotron_h_omni",)
PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(40)]


@pytest.mark.parametrize(
    ("kind", "tied"), [(kind, tied) for kind in KINDS for tied in (True, False) if not (tied and kind in NEVER_TIED)]
)
def test_text_is_computed_as_transformers_computes_it(kind: str, tied: bool, tmp_path: Path, team: Team) -> None:
    folder = make_multimodal(kind, tmp_path, tied=tied)
    program = with_stacked_experts(read_program(folder), {entry.name: entry.shape for entry in read_entries(folder)})
    needed = ends_tensors(program, embed=True, head=True)
    for layer in program.layers:
        needed |= layer_tensors(layer)
    assert {entry.name: entry.shape for entry in read_entries(folder)} == needed
    with MappedTensors(folder, ignore) as tensors:
        ends = CpuEnds(program, tensors.read, "fp32", team)
        spans = [CpuSpan(program, span, tensors.read, "fp32", team) for span in (Span(0, 1), Span(1, LAYERS))]
    caches, ids, ours = [span.new_cache() for span in spans], list(PROMPT), []
    for start, count in ((0, 33), (33, 7), *((40 + i, 1) for i in range(64))):
        rows = ends.embed(ids[start : start + count])
        for span, cache in zip(spans, caches, strict=True):
            rows = span.step(rows, [Piece(cache, start, count)], 2)
        ours.append(ends.logits(rows, count, 2))
        if start + count == len(ids):
            ids.append(int(ours[-1][-1].argmax()))
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        theirs = model.eval()(torch.tensor([ids[:-1]]), use_cache=False).logits[0].numpy()
    if kind in UNSCALED:
        theirs *= model.config.text_config.logit_scale
    most = 2e-4 if program.has_states else 2e-5  # states sum up roundings
    assert np.abs(np.concatenate(ours) - theirs).max() / np.abs(theirs).max() < most
    assert ids[len(PROMPT) :] == theirs.argmax(-1)[len(PROMPT) - 1 :].tolist()
    assert program.context == CONTEXT
