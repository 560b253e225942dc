"""A model like another one, but with outlier channels, as large models have them: what makes 8 bits hard.

In rows that enter products of large models a few channels are tens of times the others (LLM.int8(), arXiv 2208.07339;
SmoothQuant, arXiv 2211.10438), in the gated block's inner rows too, and in keys (KIVI, arXiv 2402.02750). Here they are made
of the model itself: one channel in 64 is multiplied by 32, keys by 8, and what reads it divided by as much. Powers of two are
exact in bf16, so the model computes what it did before, to the bit but for denormals; only what rounds groups or rows of
numbers to a common scale sees another model.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FACTOR, KEYS, ONE_IN = 32.0, 8.0, 64


def with_outliers(folder: Path, out: Path) -> Path:
    """A llama or qwen2 checkpoint of one file in bf16, with outliers, in the folder `out`, which is made."""
    shutil.copytree(folder, out)
    file = out / "model.safetensors"
    with safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}
    config = json.loads((folder / "config.json").read_bytes())
    for layer in range(config["num_hidden_layers"]):
        _spread(tensors, f"model.layers.{layer}.", config, np.random.default_rng(layer))
    save_file(tensors, file, metadata={"format": "pt"})
    return out


def _chosen(random: np.random.Generator, count: int) -> list[int]:
    return list(map(int, random.choice(count, max(1, count // ONE_IN), replace=False)))


def _spread(tensors: dict[str, Tensor], layer: str, config: dict[str, int], random: np.random.Generator) -> None:
    """The outliers of one layer: both norms, the gated block's inner rows, keys."""
    channels = _chosen(random, config["hidden_size"])
    readers = {"input_layernorm": ("q", "k", "v"), "post_attention_layernorm": ("gate", "up")}
    for norm, names in readers.items():
        tensors[f"{layer}{norm}.weight"][channels] *= FACTOR
        for name in names:
            part = "self_attn" if len(name) == 1 else "mlp"
            tensors[f"{layer}{part}.{name}_proj.weight"][:, channels] /= FACTOR
    inner = _chosen(random, config["intermediate_size"])
    tensors[f"{layer}mlp.up_proj.weight"][inner] *= FACTOR
    tensors[f"{layer}mlp.down_proj.weight"][:, inner] /= FACTOR
    for heads, factor in (("num_key_value_heads", KEYS), ("num_attention_heads", 1 / KEYS)):
        weight = tensors[f"{layer}self_attn.{'k' if factor > 1 else 'q'}_proj.weight"]
        for row in _pair(config[heads], weight.shape[0]):
            weight[row] *= factor


def _pair(heads: int, rows: int) -> Iterator[int]:
    """The rows of one rotary pair of each head: numbers that are turned into each other grow together."""
    width = rows // heads
    for head in range(heads):
        yield from (head * width + 1, head * width + 1 + width // 2)
