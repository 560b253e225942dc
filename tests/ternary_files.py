"""Tiny checkpoints of bitnet: packed as transformers packs them, or the weights that were trained; and its models of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BitNetQuantConfig, PreTrainedModel

from manyhands.testing.tiny import make_tiny
from tests.quantised_files import copy_with, write_tensors

with patch.object(torch, "compile", lambda function: function):  # to import a compiler takes seconds, and warns
    bitnet: Any = import_module("transformers.integrations.bitnet")

TRAINED: Final = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
PACKED: Final = {**TRAINED, "quantization_mode": "offline"}
DIVIDED: Final = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}


def is_matrix(name: str) -> bool:
    """Whether it is one of those that are -1, 0 or 1 times a scale."""
    return name.endswith("_proj.weight")


def ternary_tiny(
    out: Path, quantisation: dict[str, Any], *, family: str = "bitnet", dtype: torch.dtype = torch.float32, **sizes: Any
) -> Path:
    """A tiny model whose quantization_config this is; scales and unquantised matrices are in `dtype`."""
    plain = make_tiny(family, out.with_name(f"{out.name}-plain"), dtype="fp32", **sizes)
    stored = dict[str, Tensor]()
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not is_matrix(name) or quantisation == TRAINED:
            stored[name] = tensor.to(dtype if tensor.ndim == 2 else torch.float32)
            continue
        scale = tensor.abs().mean().reshape(1)
        codes = (tensor / scale).round().clamp(-1, 1)
        stored[name] = bitnet.pack_weights(codes)
        stored[f"{name}_scale"] = (1 / scale if quantisation == DIVIDED else scale).to(dtype)
    copy_with(plain, out, quantisation)
    write_tensors(out, stored)
    return out


def stock(folder: Path, quantisation: dict[str, Any]) -> PreTrainedModel:
    """transformers' model in fp32, with its linear layers of bitnet, as from_pretrained makes it where accelerate is there."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    kind = BitNetQuantConfig(**{name: value for name, value in quantisation.items() if name != "quant_method"})
    bitnet.replace_with_bitnet_linear(model, ["lm_head"], kind)
    model.to_empty(device="cpu")
    stored = load_file(folder / "model.safetensors")
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    if quantisation == PACKED:
        for name in [name for name in state if is_matrix(name)]:
            state[name] = bitnet.unpack_weights(state[name], torch.float32)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    lacking, surplus = model.load_state_dict(state, strict=False, assign=True)
    assert not lacking and not surplus
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its tables are no tensors of a checkpoint
    return model.eval()


@contextmanager
def computing(*, rounds: bool) -> Iterator[None]:
    """Within, transformers leaves rows as they are, unless it `rounds` them to 8 bits."""

    def as_it_is(self: Any, rows: Tensor, num_bits: int = 8) -> tuple[Tensor, Tensor]:
        return rows, torch.ones(1)

    if rounds:
        yield
        return
    with (
        patch.object(bitnet, "ActQuant", SimpleNamespace(apply=lambda rows: rows)),
        patch.object(bitnet.BitLinear, "activation_quant", as_it_is),
    ):
        yield
