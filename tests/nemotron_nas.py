"""Tiny models as Llama Nemotron Super's checkpoint is, and what they compute, in plain torch: transformers has no
class for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from manyhands.testing.tiny import make_tiny
from tests.kimi_k3 import tensors_of


def block(group: int | str | None, mult: float | str | None) -> dict[str, Any]:
    """A layer of `group` heads for a key head, or "linear", or none; of a block so wide, or "linear", or none."""
    attention = {"n_heads_in_group": group if isinstance(group, int) else None, "no_op": group is None}
    ffn = {"ffn_mult": mult if isinstance(mult, float) else None, "no_op": mult is None, "sparsify": None}
    more = {"num_sink_tokens": None, "sparsify": None, "unshifted_sink": False, "window_length": None}
    attention |= {"replace_with_linear": group == "linear", "use_prefill_window_in_sink_attention": False, **more}
    return {"attention": attention, "ffn": {**ffn, "replace_with_linear": mult == "linear"}}


# Of every kind: usual ones, no attention, a product in its place, no block, a product in place of a block.
KINDS = ((2, 1.3), (4, 5.25), (None, 2.0), ("linear", 2.0), (1, None), (None, "linear"), (2, "linear"), (2, 1.0))
CONFIG: dict[str, Any] = {
    "architectures": ["DeciLMForCausalLM"],
    "attention_bias": False,
    "block_configs": [block(*kind) for kind in KINDS],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": None,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "nemotron-nas",
    "num_attention_heads": 4,
    "num_hidden_layers": len(KINDS),
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 264,
}


def make_nemotron_nas(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A checkpoint in `folder`."""
    make_tiny("llama", folder)  # for its tokenizer
    config = {**CONFIG, **overrides}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 257, "bos_token_id": 256}))
    save_file({name: tensor.to(dtype) for name, tensor in tensors_of(config).items()}, folder / "model.safetensors")
    return folder


class Reference:
    """Logits of a model [T, vocab], of ids from position 0 on, in float64."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], frequencies: Sequence[float]) -> None:
        """`frequencies`: of the rotary embedding."""
        self._c, self._t = config, {name: tensor.double() for name, tensor in tensors.items()}
        self._rates = torch.tensor(list(frequencies), dtype=torch.float64)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Layer after layer."""
        x = self._t["model.embed_tokens.weight"][list(ids)]
        for i, kind in enumerate(self._c["block_configs"]):
            path, attention, ffn = f"model.layers.{i}", kind["attention"], kind["ffn"]
            if not attention["no_op"]:
                h = self._norm(f"{path}.input_layernorm", x)
                is_linear = attention["replace_with_linear"]
                x = x + (self._linear(f"{path}.self_attn.linear_attn", h) if is_linear else self._attention(path, h))
            if not ffn["no_op"]:
                h = self._norm(f"{path}.post_attention_layernorm", x)
                is_linear = ffn["replace_with_linear"]
                x = x + (self._linear(f"{path}.mlp.linear_mlp", h) if is_linear else self._block(f"{path}.mlp", h))
        return self._linear("lm_head", self._norm("model.norm", x))

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._t[f"{name}.weight"])

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        size: Tensor = (rows.square().mean(-1, keepdim=True) + self._c["rms_norm_eps"]).sqrt()
        return rows / size * self._t[f"{name}.weight"]

    def _block(self, path: str, rows: Tensor) -> Tensor:
        gate, up = (self._linear(f"{path}.{name}_proj", rows) for name in ("gate", "up"))
        return self._linear(f"{path}.down_proj", functional.silu(gate) * up)

    def _attention(self, path: str, rows: Tensor) -> Tensor:
        count, heads = len(rows), self._c["num_attention_heads"]
        query, key, value = (self._linear(f"{path}.self_attn.{name}_proj", rows).view(count, -1, 16) for name in "qkv")
        query, key = self._turned(query), self._turned(key)
        key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / 4
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self._linear(f"{path}.self_attn.o_proj", torch.einsum("hqk,khd->qhd", weights, value).flatten(1))

    def _turned(self, rows: Tensor) -> Tensor:
        angles = torch.arange(len(rows), dtype=torch.float64)[:, None, None] * self._rates
        first, second = rows.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )
