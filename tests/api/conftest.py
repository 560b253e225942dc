"""One tiny checkpoint for all tests of the API."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from manyhands.testing.tiny import EOS, make_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, random weights, a byte tokenizer; greedy answers run to their length, whatever this CPU's rounding."""
    folder = make_tiny("qwen3", tmp_path_factory.mktemp("api") / "qwen3", layers=6, seed=21)
    tensors = load_file(folder / "model.safetensors")
    for name in {"lm_head.weight", "model.embed_tokens.weight"} & set(tensors):
        tensors[name][EOS] = 0  # a logit of 0 is never the largest
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
