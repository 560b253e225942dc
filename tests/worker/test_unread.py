"""GGUF files whose tensors the Program would leave out: loaded where they are spare, else refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.checkpoint.gguf import Gguf
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.core import Span
from manyhands.errors import ModelError
from manyhands.testing.gguf import Written, write_gguf
from manyhands.worker.runner import load_span
from tests.engine.test_gguf_scales import written
from tests.gguf_files import FAMILIES, tiny_gguf


def with_more(file: Path, *more: Written, **facts: Any) -> Path:
    """The same file with further tensors and other facts, those that are None left out."""
    found, raw = read_gguf(file), np.fromfile(file, np.uint8)
    tensors: list[Written] = [(one.name, one.dtype, one.shape, raw[one.start : one.end]) for one in found.tensors]
    changed = {name: value for name, value in {**found.facts, **facts}.items() if value is not None}
    return write_gguf(file.with_name("more.gguf"), changed, [*tensors, *more])


def load(file: Path, tmp_path: Path) -> None:
    load_span(gguf_folder(file, tmp_path / "home"), Span(0, 1), "bf16", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_that_converters_write_is_read_or_spare(family: str, tmp_path: Path) -> None:
    load(tiny_gguf(family, tmp_path / "f.gguf", layers=4)[0], tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_scales_beside_matrices_are_read(family: str, tmp_path: Path) -> None:
    load(written(family, tmp_path)[0], tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "size", "named"),
    [
        ("qwen2_moe", "attn_q_norm.weight", 16, "layers.0.self_attn.q_norm.weight"),
        ("deepseek_v3", "attn_q_norm.weight", 16, "layers.0.self_attn.q_norm.weight"),
        ("qwen3_moe", "ffn_gate.weight", 96, "layers.0.mlp.gate_proj.weight"),
    ],
)
def test_a_tensor_that_metadata_leave_out_is_refused_by_name(
    family: str, name: str, size: int, named: str, tmp_path: Path
) -> None:
    """A file with norms of heads in an architecture that has none was computed without them."""
    file = tiny_gguf(family, tmp_path / "f.gguf", layers=4)[0]
    more = with_more(file, (f"blk.0.{name}", "F32", (size,), np.ones(size, np.float32)))
    with pytest.raises(ModelError, match=f"{named} is not read by .* may change the model's arithmetic") as caught:
        load(more, tmp_path)
    assert "\n" not in str(caught.value)


def test_layers_that_metadata_do_not_count_are_refused(tmp_path: Path) -> None:
    file = tiny_gguf("llama", tmp_path / "f.gguf", layers=3)[0]
    with pytest.raises(ModelError, match=r"model.layers.2.* is not read by llama"):
        load(with_more(file, **{"llama.block_count": 2}), tmp_path)


def test_shared_experts_that_metadata_do_not_count_are_refused(tmp_path: Path) -> None:
    file = tiny_gguf("ernie4_5_moe", tmp_path / "f.gguf", layers=3)[0]
    found: Gguf = read_gguf(file)
    keys = ("expert_shared_count", "expert_shared_feed_forward_length")
    none = {f"{found.facts['general.architecture']}.{key}": 0 for key in keys}
    with pytest.raises(ModelError, match=r"shared_experts.* is not read by ernie4_5_moe"):
        load(with_more(file, **none), tmp_path)
