"""Tiny checkpoints of deepseek_v4 (tiny.py)."""

from typing import Any, Final

import torch
from transformers import PreTrainedModel

# Of layers, one after the other.
V4_KINDS: Final = ("compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention")


def v4_kinds(layers: int) -> dict[str, list[str]]:
    """What its config says of each layer."""
    experts = ["hash_moe" if i % 3 == 0 else "moe" for i in range(layers)]
    return {"layer_types": [V4_KINDS[i % 3] for i in range(layers)], "mlp_layer_types": experts}


def small_v4(hidden: int) -> dict[str, Any]:
    """What its config needs at a hidden size."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    index = {"index_n_heads": 16, "index_head_dim": hidden // 4, "index_topk": 8, "compress_rates": rates}
    heads = {
        "num_key_value_heads": 1,
        "head_dim": hidden // 2,
        "q_lora_rank": hidden // 2,
        "o_groups": 2,
        "o_lora_rank": 24,
    }
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden // 2,
        "swiglu_limit": 1.0,
    }
    other = {
        "rope_parameters": yarn,
        "partial_rotary_factor": 0.25,
        "sliding_window": 24,
        "intermediate_size": hidden // 2,
    }
    return {**index, **heads, **experts, **other}


def published_v4(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a deepseek_v4 as its publisher's checkpoints have them: experts by themselves, names without "model."."""
    out = dict[str, torch.Tensor]()
    for whole, tensor in model.state_dict().items():
        name = whole.removeprefix("model.")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".experts." in name:
            path, kind = name.rsplit(".", 1)
            names = ("w1", "w3") if kind == "gate_up_proj" else ("w2",)
            for expert, matrix in enumerate(tensor):
                for part, matrices in zip(names, matrix.chunk(len(names)), strict=True):
                    out[_renamed(f"{path}.{expert}.{part}.weight")] = matrices.clone()
            continue
        out[_renamed(name)] = tensor
    return out


_V4_NAMES: Final = (  # of transformers, and of its publisher
    ("embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("hc_head.hc_", "hc_head_"),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".compressor.indexer.scorer.", ".indexer."),
    (".compressor.indexer.q_b_proj.", ".indexer.wq_b."),
    (".compressor.indexer.", ".indexer.compressor."),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
    (".sinks", ".attn_sink"),
    (".position_bias", ".ape"),
    (".q_a_norm.", ".q_norm."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".q_a_proj.", ".wq_a."),
    (".q_b_proj.", ".wq_b."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".kv_proj.", ".wkv."),
    (".shared_experts.gate_proj.", ".shared_experts.w1."),
    (".shared_experts.up_proj.", ".shared_experts.w3."),
    (".shared_experts.down_proj.", ".shared_experts.w2."),
    (".gate_proj.", ".wgate."),
    (".e_score_correction_bias", ".bias"),
)


def _renamed(name: str) -> str:
    for theirs, published in _V4_NAMES:
        name = name.replace(theirs, published)
    return name
