"""GGUF files of families like DeepSeek's, of Jamba, Gemma 3n and Apertus: the ids of the checkpoints that they were made of."""

from pathlib import Path

import numpy as np
import pytest

from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.testing.gguf import write_gguf
from tests.engine.test_gguf import logits
from tests.engine.test_gguf_hybrids import numbers
from tests.gguf_files import tiny_gguf

EXACT = (
    "glm_moe_dsa",
    "glm_moe_dsa_shared",
    "hy_v4",
    "mistral4_air",
    "deepseek_v32",
    "mistral4",
    "deepseek_v4",
    "mimo_v2_flash",
    "mimo_v2_flash_fused",
    "gemma3n_text",
)
# Of what the checkpoint stores the file has exp, products or factors, rounded.
ROUNDED = ("dots3_note_text", "glm5_next", "kimi_linear", "kimi_k3", "kimi_k3_plain", "jamba", "apertus")


@pytest.mark.parametrize("family", [*EXACT, *ROUNDED])
def test_ids_are_those_of_the_checkpoint_that_a_file_was_made_of(family: str, tmp_path: Path) -> None:
    file, folder = tiny_gguf(family, tmp_path / "tiny.gguf", layers=4)
    ours, theirs = logits(gguf_folder(file, tmp_path)), logits(folder)
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))
    if family in EXACT:
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("glm_moe_dsa", "Q8_0"),
        ("mistral4", "Q4_0"),
        ("dots3_note_text", "Q8_0"),
        ("hy_v4", "Q4_0"),
        ("glm5_next", "Q8_0"),
        ("kimi_linear", "Q8_0"),
        ("kimi_k3", "MXFP4"),
        ("deepseek_v4", "Q8_0"),
        ("mimo_v2_flash", "Q5_0"),
        ("jamba", "Q4_1"),
        ("gemma3n_text", "Q8_0"),
        ("apertus", "Q5_1"),
    ],
)
def test_blocks_are_the_numbers_that_they_store(family: str, dtype: str, tmp_path: Path) -> None:
    """Routers, kernels and rates are stored in F32, as llama.cpp's quantiser leaves them; mixes of streams are in blocks in
    files of GLM-5.3-Flash."""
    mixes = () if family == "glm5_next" else ("_fn.weight",)
    plain = ("ffn_gate_inp.weight", "ssm_a", "_ape.weight", *mixes, "indexer.proj.weight", "altup_router.weight")

    def pick(name: str, shape: tuple[int, ...]) -> str:
        whole = len(shape) > 1 and shape[-1] % 32 == 0
        return dtype if whole and not name.endswith(plain) else "F32"

    file, _ = tiny_gguf(family, tmp_path / "a.gguf", pick, layers=4)
    found = read_gguf(file)
    wanted = "_exps" if family not in ("gemma3n_text", "apertus") else "ffn_down"
    assert {tensor.dtype for tensor in found.tensors if wanted in tensor.name} == {dtype}
    other = write_gguf(tmp_path / "b.gguf", found.facts, numbers(file))
    ours, expected = (logits(gguf_folder(path, tmp_path / "home")) for path in (file, other))
    np.testing.assert_array_equal(ours, expected)
