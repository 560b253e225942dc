"""Tiny models as GLM-5.3-Flash's checkpoint is, of transformers' class, which AutoModelForCausalLM does not know."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, Glm5NextForConditionalGeneration

from manyhands.testing.tiny import make_tiny

TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 0,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    "layer_types": [
        "linear_attention",
        "indexed_attention",
        "linear_attention",
        "indexed_attention",
        "linear_attention",
    ],
    "index_topk": 72,
    "index_head_dim": 24,
    "index_n_heads": 5,
    "index_kpool": 8,
    "swiglu_limit": 0.7,
    "linear_head_dim": 20,
    "linear_num_heads": 3,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 5,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "projection_intermediate_size": 16,
}


def stock(**overrides: Any) -> Any:
    """transformers' model, each tensor random by its name."""
    config = AutoConfig.for_model("glm5_next", text_config={**TEXT, **overrides}, vision_config=VISION)
    config._attn_implementation = "eager"
    model = Glm5NextForConditionalGeneration(config).eval()
    for number, (name, tensor) in enumerate(sorted(model.state_dict().items())):
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
        near_one = name.endswith(("norm.weight", "layernorm.weight", "hc.scale"))
        tensor.copy_(
            1 + 0.2 * noise if near_one else noise * (1.6 / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 0.4)
        )
    return model


def published(model: Any) -> dict[str, Tensor]:
    """The tensors of its text part as the publisher's checkpoints have them, which transformers reads."""
    out = dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        name = name.replace(".forget_gate.", ".").replace(".attn_hc.", ".hc_attn_").replace(".ffn_hc.", ".hc_ffn_")
        path, _, part = name.rpartition(".")
        if ".visual." in name:
            continue
        if name.endswith(".conv1d.weight"):
            parts = zip("qkv", tensor.chunk(3), strict=True)
            out |= {name.replace("conv1d", f"{kind}_conv1d"): each.clone() for kind, each in parts}
        elif part == "gate_up_proj":
            for i, both in enumerate(tensor):
                out |= {
                    f"{path}.{i}.{kind}_proj.weight": half.clone()
                    for kind, half in zip(("gate", "up"), both.chunk(2), strict=True)
                }
        elif part == "down_proj" and path.endswith(".experts"):
            out |= {f"{path}.{i}.down_proj.weight": one.clone() for i, one in enumerate(tensor)}
        else:
            out[name] = tensor.clone()
    return out


def make(folder: Path, model: Any, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A checkpoint of the model in `folder`."""
    make_tiny("llama", folder)
    save_file({name: tensor.to(dtype) for name, tensor in published(model).items()}, folder / "model.safetensors")
    text = {**TEXT, **overrides, "model_type": "glm5_next_text"}
    whole = {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "text_config": text}
    (folder / "config.json").write_text(json.dumps({**whole, "vision_config": VISION}))
    return folder


def first_layers(layers: int) -> dict[str, Any]:
    """Fields of a model of the first layers alone."""
    kinds = {name: TEXT[name][:layers] for name in ("layer_types", "mlp_layer_types")}
    return {"num_hidden_layers": layers, **kinds}
