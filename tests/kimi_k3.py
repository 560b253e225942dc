"""Tiny models as Kimi K3's checkpoint is, and what they compute, in plain torch: no published library has a class for them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from manyhands.program.families import build_program
from manyhands.program.tensors import ends_tensors, layer_tensors
from manyhands.testing.tiny import make_tiny

CONFIG: dict[str, Any] = {  # of text_config, as published, with other sizes
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 4,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 24,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 9],
        "gate_lower_bound": -5.0,
        "head_dim": 32,
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "num_heads": 3,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": 512,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 24,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_hidden_layers": 9,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "routed_expert_hidden_size": 32,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "v_head_dim": 16,
    "vocab_size": 264,
}


def config_of(**overrides: Any) -> dict[str, Any]:
    """CONFIG with other fields; None takes one away."""
    return {name: value for name, value in {**CONFIG, **overrides}.items() if value is not None}


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of a model, by the published names; each depends on its own name alone."""
    program = build_program(config)
    shapes = ends_tensors(program, embed=True, head=True)
    for layer in program.layers:
        shapes |= layer_tensors(layer)
    return {name: _drawn(name, shape) for name, shape in shapes.items()}


def _drawn(name: str, shape: Sequence[int]) -> Tensor:
    """A tensor that depends on its name and shape alone: norms near one, biases and rates small."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if name.endswith(("norm.weight", "layernorm.weight")):
        noise = 1 + 0.2 * noise
    elif name.endswith(("A_log", "dt_bias", "correction_bias")):
        noise = 0.5 * noise
    else:
        noise = noise * (1.6 / shape[-1] ** 0.5)
    return noise


def make_kimi_k3(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A checkpoint as moonshotai/Kimi-K3's: the text part in a config of its own, its tensors under a prefix."""
    make_tiny("llama", folder)  # for its tokenizer
    (folder / "model.safetensors").unlink()
    config = config_of(**overrides)
    whole = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": config}
    (folder / "config.json").write_text(json.dumps({**whole, "eos_token_id": 257, "bos_token_id": 256}))
    named = {f"language_model.{name}": tensor.to(dtype) for name, tensor in tensors_of(config).items()}
    save_file(named, folder / "model.safetensors")
    return folder


class Reference:
    """Logits of a model [T, vocab], of ids from position 0 on, in float64, one position after the other for states."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._c, self._t = config, {name: tensor.double() for name, tensor in tensors.items()}
        self._eps: float = config["rms_norm_eps"]

    def logits(self, ids: Sequence[int]) -> Tensor:
        """From layer to layer, as the technical report and the published code have them."""
        block, rows = self._c.get("attn_res_block_size", 0), self._t["model.embed_tokens.weight"][list(ids)]
        stored: list[Tensor] = []
        for i in range(self._c["num_hidden_layers"]):
            path, begins = f"model.layers.{i}", block > 0 and i % block == 0
            mixed = self._residual(f"{path}.self_attention_res", rows, stored) if stored else rows
            stored += [rows] if begins else []
            attention = self._delta if i + 1 in self._c["linear_attn_config"]["kda_layers"] else self._latent
            given = attention(f"{path}.self_attn", self._norm(f"{path}.input_layernorm", mixed))
            rows = given if begins else rows + given
            mixed = self._residual(f"{path}.mlp_res", rows, stored) if block else rows
            inner = self._norm(f"{path}.post_attention_layernorm", mixed)
            is_dense = i < self._c["first_k_dense_replace"]
            rows = rows + (self._block(f"{path}.mlp", inner) if is_dense else self._experts(path, inner))
        rows = self._residual("model.output_attn_res", rows, stored) if block else rows
        return self._linear("lm_head", self._norm("model.norm", rows))

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._t[f"{name}.weight"])

    def _norm(self, name: str, rows: Tensor, eps: float | None = None) -> Tensor:
        size = (rows.square().mean(-1, keepdim=True) + (self._eps if eps is None else eps)).sqrt()
        return rows / size * self._t[f"{name}.weight"]

    def _residual(self, path: str, rows: Tensor, stored: list[Tensor]) -> Tensor:
        each = torch.stack([*stored, rows])
        scores = self._linear(f"{path}_proj", self._norm(f"{path}_norm", each))
        return (scores.softmax(0) * each).sum(0)

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, linear = self._c["activation_situ_beta"], self._c.get("activation_situ_linear_beta")
        up = linear * torch.tanh(up / linear) if linear else up
        found: Tensor = beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up
        return found

    def _block(self, path: str, rows: Tensor) -> Tensor:
        gate, up = (self._linear(f"{path}.{name}_proj", rows) for name in ("gate", "up"))
        return self._linear(f"{path}.down_proj", self._situ(gate, up))

    def _experts(self, path: str, rows: Tensor) -> Tensor:
        path = f"{path}.block_sparse_moe"
        scores = self._linear(f"{path}.gate", rows).sigmoid()
        ranks = scores + self._t[f"{path}.gate.e_score_correction_bias"]
        chosen = ranks.topk(self._c["num_experts_per_token"], -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self._c["routed_scaling_factor"]
        latent = self._linear(f"{path}.routed_expert_down_proj", rows)
        total = torch.zeros_like(latent)
        for t, (numbers, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for number, share in zip(numbers, shares, strict=True):
                expert = f"{path}.experts.{number}"
                inner = self._situ(self._linear(f"{expert}.w1", latent[t]), self._linear(f"{expert}.w3", latent[t]))
                total[t] += share * self._linear(f"{expert}.w2", inner)
        total = self._norm(f"{path}.routed_expert_norm", total)
        return self._linear(f"{path}.routed_expert_up_proj", total) + self._block(f"{path}.shared_experts", rows)

    def _latent(self, path: str, rows: Tensor) -> Tensor:
        c, count = self._c, len(rows)
        plain, turned, value, heads = (
            c[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_attention_heads")
        )
        low = self._norm(f"{path}.q_a_layernorm", self._linear(f"{path}.q_a_proj", rows), 1e-6)
        query = self._linear(f"{path}.q_b_proj", low).view(count, heads, plain + turned)
        both = self._linear(f"{path}.kv_a_proj_with_mqa", rows)
        latent, shared = torch.split(both, [c["kv_lora_rank"], turned], -1)
        expanded = self._linear(f"{path}.kv_b_proj", self._norm(f"{path}.kv_a_layernorm", latent, 1e-6))
        key, values = torch.split(expanded.view(count, heads, plain + value), [plain, value], -1)
        key = torch.cat([key, shared[:, None].expand(-1, heads, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * (plain + turned) ** -0.5
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
        return self._linear(f"{path}.o_proj", out * self._linear(f"{path}.g_proj", rows).sigmoid())

    def _delta(self, path: str, rows: Tensor) -> Tensor:
        c = self._c["linear_attn_config"]
        heads, width, taps, count = c["num_heads"], c["head_dim"], c["short_conv_kernel_size"], len(rows)
        each = []
        for name in "qkv":
            columns = functional.pad(self._linear(f"{path}.{name}_proj", rows).T, (taps - 1, 0))
            mixed = functional.conv1d(columns[None], self._t[f"{path}.{name}_conv1d.weight"], groups=heads * width)
            each.append(functional.silu(mixed[0].T).view(count, heads, width))
        query, key = (rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt() for rows in each[:2])
        query, value = query * width**-0.5, each[2]
        rates = self._t[f"{path}.A_log"][:heads].exp()[:, None]
        forget = self._linear(f"{path}.f_b_proj", self._linear(f"{path}.f_a_proj", rows)) + self._t[f"{path}.dt_bias"]
        decay = (c["gate_lower_bound"] * torch.sigmoid(rates * forget.view(count, heads, width))).exp()
        strength = self._linear(f"{path}.b_proj", rows).sigmoid()
        state, out = torch.zeros(heads, width, width, dtype=torch.float64), list[Tensor]()
        for t in range(count):
            state = state * decay[t][..., None]
            error = (value[t] - torch.einsum("hkv,hk->hv", state, key[t])) * strength[t][:, None]
            state = state + torch.einsum("hk,hv->hkv", key[t], error)
            out.append(torch.einsum("hkv,hk->hv", state, query[t]))
        gate = self._linear(f"{path}.g_proj", rows).view(count, heads, width).sigmoid()
        whole = self._norm(f"{path}.o_norm", torch.stack(out)) * gate
        return self._linear(f"{path}.o_proj", whole.flatten(1))
