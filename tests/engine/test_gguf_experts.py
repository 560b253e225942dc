"""GGUF files of models whose blocks are experts: blocks, and layers that are left out."""

from pathlib import Path

import numpy as np
import pytest

from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.testing.gguf import Written, write_gguf
from tests.engine.test_gguf import logits
from tests.engine.test_gguf_hybrids import numbers
from tests.gguf_experts import layer_ahead
from tests.gguf_files import tiny_gguf


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("glm4_moe", "Q8_0"),
        ("minimax_m2", "Q4_0"),
        ("ernie4_5_moe", "Q5_1"),
        ("hunyuan_v1_moe", "Q4_1"),
        ("dots1", "Q5_0"),
        ("olmoe", "Q8_0"),
        ("deepseek_v2", "Q8_0"),
    ],
)
def test_blocks_are_the_numbers_that_they_store(family: str, dtype: str, tmp_path: Path) -> None:
    """The router is stored in F32, as llama.cpp's quantiser leaves it."""

    def pick(name: str, shape: tuple[int, ...]) -> str:
        whole = len(shape) > 1 and shape[-1] % 32 == 0
        return dtype if whole and not name.endswith("ffn_gate_inp.weight") else "F32"

    file, _ = tiny_gguf(family, tmp_path / "a.gguf", pick, layers=3)
    found = read_gguf(file)
    assert {tensor.dtype for tensor in found.tensors if "_exps" in tensor.name} == {dtype}
    plain = write_gguf(tmp_path / "b.gguf", found.facts, numbers(file))
    ours, expected = (logits(gguf_folder(path, tmp_path / "home")) for path in (file, plain))
    np.testing.assert_array_equal(ours, expected)


def test_layers_of_glm_4_7_flash_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    """Newer files have them behind the others; those of GLM-4.5 are in every tiny one of glm4_moe."""
    file, _ = tiny_gguf("glm4_moe_lite", tmp_path / "a.gguf", layers=3)
    found, whole = read_gguf(file), numbers(file)
    ahead: list[Written] = [
        (name, "F32", array.shape, array)
        for name, array in layer_ahead([(name, array) for name, _, _, array in whole], 3, 64)
    ]
    facts = {**found.facts, "deepseek2.block_count": 4, "deepseek2.nextn_predict_layers": 1}
    longer = write_gguf(tmp_path / "b.gguf", facts, [*whole, *ahead])
    ours, expected = (logits(gguf_folder(path, tmp_path / "home")) for path in (longer, file))
    np.testing.assert_array_equal(ours, expected)
