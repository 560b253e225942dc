"""The text part of multimodal checkpoints against transformers: fp32 logits of the native engine, cut, and greedy ids."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from manyhands.engine.library import Team
from tests.multimodal import CONTEXT, KINDS, make_multimodal
from tests.text_parts import PROMPT, greedy

UNSCALED = (
    "aya_vision",
    "cohere2_vision",
)  # there the text model's logit_scale is left out, which its publisher applies
NEVER_TIED = ("nemotron_h_omni",)


@pytest.mark.parametrize(
    ("kind", "tied"), [(kind, tied) for kind in KINDS for tied in (True, False) if not (tied and kind in NEVER_TIED)]
)
def test_text_is_computed_as_transformers_computes_it(kind: str, tied: bool, tmp_path: Path, team: Team) -> None:
    folder = make_multimodal(kind, tmp_path, tied=tied)
    program, ids, ours = greedy(folder, team)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        theirs = model.eval()(torch.tensor([ids[:-1]]), use_cache=False).logits[0].numpy()
    if kind in UNSCALED:
        theirs *= model.config.text_config.logit_scale
    most = 2e-4 if program.has_states else 2e-5  # states sum up roundings
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < most
    assert ids[len(PROMPT) :] == theirs.argmax(-1)[len(PROMPT) - 1 :].tolist()
    assert program.context == CONTEXT
