"""A span that has just been loaded is measured, whatever it keeps of a session."""

from pathlib import Path

import pytest

from manyhands.core import Span
from manyhands.member.speed import decode_layer_s
from manyhands.testing.tiny import make_tiny
from manyhands.worker.execute import SpanModel


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_next", "granitemoehybrid_mamba"])
def test_a_step_is_measured(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family, seed=3)
    model = SpanModel(folder, Span(1, 4), "bf16", False, 1)
    assert decode_layer_s(model, Span(1, 4)) > 0
    assert decode_layer_s(model, Span(2, 3)) > 0
