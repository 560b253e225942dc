"""Every family and variant against transformers: fp32 logits, greedy ids, chunks and cache against one pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from manyhands.core import Span
from manyhands.engine import torch as engine
from manyhands.engine.span import Piece
from manyhands.engine.torch import TorchEnds, TorchSpan
from manyhands.engine.torch_rows import run_row
from manyhands.errors import ModelError
from manyhands.program.ops import Constant, LatentAttention
from manyhands.testing.tiny import EVERY_FAMILY, WITH_STATES
from tests.engine.oracle import CONTEXT, Pair

PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(40)]
TOLERANCE = (
    4e-5  # of the largest logit: fp32 sums in other orders, over 4 layers; seen are 0.7e-6 to 2.7e-5, by family and CPU
)


def check(pair: Pair, count: int) -> None:
    """Logits of one pass are transformers', and so are `count` ids decoded by way of chunks and cache."""
    ids, last = pair.greedy(PROMPT, count, chunk=7)
    theirs = pair.theirs(ids)
    ours = pair.ours(ids, pair.span.new_cache(len(ids)))
    largest = theirs.abs().max()
    assert float((ours - theirs).abs().max() / largest) < TOLERANCE
    assert float((ours[-1] - last).abs().max() / largest) < TOLERANCE
    assert ids[len(PROMPT) :] == theirs.argmax(-1)[len(PROMPT) - 1 : -1].tolist()


@pytest.mark.parametrize("family", [family for family in EVERY_FAMILY if family not in WITH_STATES])
def test_a_family_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    check(Pair(tmp_path, family, {}), 64)


class _Placed(TorchFunctionMode):
    """Refuses tensors that are made anew without saying on which device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.arange, torch.zeros, torch.ones) or "device" in (kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["deepseek_v4", "gemma3n_text", "longcat_flash"])
def test_layers_make_nothing_beside_their_device(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other device than the CPU is here: streams of deepseek_v4 had numbers there whatever the device."""
    pair, run = Pair(tmp_path, family, {"layers": 3}), engine._Layer.__call__

    def placed(*args: Any) -> torch.Tensor:
        with _Placed():
            return run(*args)

    monkeypatch.setattr(engine._Layer, "__call__", placed)
    assert pair.ours(PROMPT, pair.span.new_cache(len(PROMPT))).isfinite().all()


def test_a_constant_is_the_same_in_every_row() -> None:
    """Of models with states, which torch refuses: what the operation says all the same."""
    run: Any = SimpleNamespace(registers={"x": torch.zeros(3, 5)})
    run_row(Constant("c", (0.5, 0.1)), run)
    assert run.registers["c"].tolist() == torch.tensor([[0.5, 0.1]] * 3).tolist()


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0 + i for i in range(8)]}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases, one key head": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama, odd widths": (
        "llama",
        {"intermediate_size": 75, "head_dim": 18, "hidden_act": "gelu"},
    ),
    "llama, linear rope": ("llama", rope("linear", factor=3.0)),
    "llama, llama3 rope": ("llama", LLAMA3),
    "llama, dynamic rope": ("llama", rope("dynamic", factor=2.0)),
    "llama, yarn": ("llama", rope("yarn", **YARN)),
    "llama, yarn with its own factor": (
        "llama",
        rope("yarn", **YARN, attention_factor=1.3, beta_fast=20.0, beta_slow=2.0),
    ),
    "phi3, longrope": ("phi3", {**rope("longrope", **LONG), "original_max_position_embeddings": 256}),
    "phi3, window, partial": ("phi3", {"sliding_window": 12, "partial_rotary_factor": 0.5}),
    "mistral without window": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3, biases, windows": (
        "qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "gemma, one key head": ("gemma", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2, strong caps": ("gemma2", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma3, full layers": ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "mixtral, window": ("mixtral", {"sliding_window": 11, "num_experts_per_tok": 3}),
    "qwen2_moe, normalised": (
        "qwen2_moe",
        {"norm_topk_prob": True, "qkv_bias": False, "use_sliding_window": True, "sliding_window": 10},
    ),
    "qwen3_moe, normalised": ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    "gpt_oss, other clamps": ("gpt_oss", {"swiglu_limit": 0.5, "swiglu_alpha": 1.1, "attention_bias": False}),
    "deepseek_v3, direct queries": (
        "deepseek_v3",
        {"q_lora_rank": None, "attention_bias": True, "norm_topk_prob": False},
    ),
    "deepseek_v3, halves, groups": (
        "deepseek_v3",
        {"rope_interleave": False, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 0},
    ),
    "deepseek_v3, yarn": ("deepseek_v3", rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.2)),
    "gemma4, dense, values of their own": (
        "gemma4_text",
        {
            "enable_moe_block": False,
            "attention_k_eq_v": False,
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma4 unified, values of their own, biases, no cap": (
        "gemma4_unified_text",
        {
            "attention_k_eq_v": False,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "hidden_activation": "silu",
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "per_layer_config": {},
            "sliding_window": 3,
        },
    ),
    "gemma4 E4B, nothing shared": ("gemma4_text_e4b", {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}),
    "gemma4 E4B, one source, one key head": (
        "gemma4_text_e4b",
        {"layer_types": ["full_attention"] * 4, "num_kv_shared_layers": 3, "num_key_value_heads": 1},
    ),
    "gemma4 E4B, values of keys, experts": (
        "gemma4_text_e4b",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": None,
        },
    ),
    "gemma4, other tables": (
        "gemma4_text",
        {
            "top_k_experts": 3,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.3,
                    "rope_theta": 5e4,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma3n, another stream, biases, nothing shared": (
        "gemma3n_text",
        {
            "altup_active_idx": 2,
            "altup_num_inputs": 3,
            "altup_correct_scale": False,
            "attention_bias": True,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 2.0,
            "hidden_activation": "silu",
            "intermediate_size": 40,
            "tie_word_embeddings": False,
            "activation_sparsity_pattern": None,
        },
    ),
    "gemma3n, one stream, one key head, one source": (
        "gemma3n_text",
        {
            "altup_num_inputs": 1,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 3,
            "layer_types": ["full_attention"] * 4,
            "activation_sparsity_pattern": [0.01, 0.99, 0.0, 0.5],
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e5, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma3n, six streams": (
        "gemma3n_text",
        {"altup_num_inputs": 6, "altup_active_idx": 5, "laurel_rank": 1, "hidden_size_per_layer_input": 7},
    ),
    "glm4_moe_lite, halves": (
        "glm4_moe_lite",
        {"rope_interleave": False, "mlp_layer_types": ["sparse", "dense"] * 2, "n_shared_experts": 2},
    ),
    "longcat_flash, yarn, biases, few real experts": (
        "longcat_flash",
        {
            **rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.2),
            "attention_bias": True,
            "n_routed_experts": 3,
            "zero_expert_num": 9,
            "moe_topk": 7,
        },
    ),
    "longcat_flash, every expert real": (
        "longcat_flash",
        {"zero_expert_num": 0, "hidden_act": "gelu", "tie_word_embeddings": True, "pad_token_id": None},
    ),
    "youtu, direct queries": ("youtu", {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False}),
    "minicpm3, no scalings": ("minicpm3", {"scale_depth": None, "dim_model_base": None, "tie_word_embeddings": False}),
    "glm4 without biases": ("glm4", {"attention_bias": False, "partial_rotary_factor": 1.0}),
    "olmo2, biases": ("olmo2", {"attention_bias": True}),
    "olmo3, yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", **YARN},
                "sliding_attention": {"rope_type": "default"},
            }
        },
    ),
    "smollm3, windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False},
    ),
    "cohere2, other types": (
        "cohere2",
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 3, "logit_scale": 0.5},
    ),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "phi, norms of heads": ("phi", {"qk_layernorm": True, "num_key_value_heads": 4}),
    "gpt_neox, sequential": (
        "gpt_neox",
        {"num_key_value_heads": None, "use_parallel_residual": False, "rotary_pct": 1.0},
    ),
    "ernie4_5, biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "nemotron, biases": ("nemotron", {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 1.0}),
    "deepseek_v2, latent queries, yarn": (
        "deepseek_v2",
        {"q_lora_rank": 24, "routed_scaling_factor": 3.0, **rope("yarn", **YARN, mscale=0.7, mscale_all_dim=0.7)},
    ),
    "deepseek_v2, groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    ),
    "glm4_moe, groups": (
        "glm4_moe",
        {"use_qk_norm": False, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "attention_bias": False},
    ),
    "dots1, no windows": ("dots1", {"sliding_window": None, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    "ernie4_5_moe, some layers": (
        "ernie4_5_moe",
        {"moe_layer_end_index": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": False},
    ),
    "exaone4, full layers": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "cohere, norms of heads": ("cohere", {"use_qk_norm": True}),
    "cohere, biases": ("cohere", {"attention_bias": True, "logit_scale": 0.5, "tie_word_embeddings": False}),
    "cohere2_moe, sigmoids, sums, rms": (
        "cohere2_moe",
        {
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "num_shared_experts": 2,
            "rms_norm_eps": 1e-4,
            "first_k_dense_replace": 2,
            "prefix_dense_sliding_window_pattern": 2,
        },
    ),
    "cohere2_moe, sigmoids as they are, none shared": (
        "cohere2_moe",
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 0, "attention_bias": True},
    ),
    "cwm, biases, other types": (
        "cwm",
        {"mlp_bias": True, "layer_types": ["sliding_attention", "full_attention"] * 2, **rope("default")},
    ),
    "flex_olmo, normalised": ("flex_olmo", {"norm_topk_prob": True, "attention_bias": True, "num_experts_per_tok": 4}),
    "granite_swa, tables by layer": (
        "granite_swa",
        {
            "layer_rope_theta": [0, 10000, 500000.0, 10000],
            "mlp_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "granitemoe_swa, none shared, tables by layer": (
        "granitemoe_swa",
        {"layer_rope_theta": [0, 10000, 500000.0, 0], "shared_intermediate_size": 0, "attention_bias": True},
    ),
    "granitemoeshared, none shared": ("granitemoeshared", {"shared_intermediate_size": 0, "attention_bias": True}),
    "hyperclovax, not normed": (
        "hyperclovax",
        {"use_post_norm": False, "attention_multiplier": 0.3, "mlp_bias": True, "attention_bias": False},
    ),
    "internlm3, no biases": ("internlm3", {"qkv_bias": False, "bias": False}),
    "iquestcoder, biases": ("iquestcoder", {"attention_bias": True, "mlp_bias": True}),
    "jais2, no biases": ("jais2", {"attention_bias": False, "mlp_bias": False, "hidden_act": "gelu"}),
    "mellum, dense layers, yarn": (
        "mellum",
        {
            "mlp_layer_types": ["dense", "sparse"] * 2,
            "norm_topk_prob": False,
            "attention_bias": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 20000.0, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "hunyuan_v1_moe, lists": ("hunyuan_v1_moe", {"moe_topk": [3] * 4, **rope("default")}),
    "axk1, list of layers, all groups, yarn": (
        "axk1",
        {
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "topk_group": 2,
            "n_shared_experts": 2,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rope_interleave": False,
            **rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.0),
        },
    ),
    "axk2, biases, all groups, yarn": (
        "axk2",
        {
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "n_group": 2,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "hidden_act": "gelu",
            **rope("yarn", **YARN, mscale_all_dim=0.7),
        },
    ),
    "hy_v4, layers share a choice, biases, yarn": (
        "hy_v4",
        {
            "indexer_types": ["full", "shared", "shared", "full"],
            "index_topk": 200,
            "attention_bias": True,
            "n_shared_experts": 2,
            **rope("yarn", **YARN, mscale_all_dim=0.7),
        },
    ),
    "hy_v4, three streams, groups, a tied head": (
        "hy_v4",
        {
            "hc_mult": 3,
            "hc_magnitude": 0.7,
            "hc_eps": 0.01,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "rms_norm_eps": 0.01,
            "swiglu_limit": 0.3,
            "tie_word_embeddings": True,
        },
    ),
    "axk1, every other layer": ("axk1", {"first_k_dense_replace": 0, "moe_layer_freq": 2}),
    "muse_glimmer, biases, windows and positions apart, tied": (
        "muse_glimmer_text",
        {
            "attention_bias": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "layer_rope_theta": [0, 0.0, 5e4, 50000],
            "post_norm_eps": 0.1,
            "qk_scale_factor": 0.5,
            "rms_norm_eps": 0.01,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **YARN},
        },
    ),
    "muse_glimmer, strong cap, one key head, no windows": (
        "muse_glimmer_text",
        {
            "final_logit_softcapping": 2.0,
            "layer_types": ["full_attention"] * 4,
            "num_key_value_heads": 1,
        },
    ),
    "muse_spark, dense and sparse, biases, windows and positions apart": (
        "muse_spark_text",
        {
            "attention_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "layer_rope_theta": [5e5, 0, 5e5, 0],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "num_experts_per_tok": 1,
            "post_norm_eps": 0.1,
            "qk_scale_factor": 1.5,
            "residual_gate_temperature": 0.02,
            "rms_norm_eps": 0.01,
        },
    ),
    "muse_spark, all experts, one key head, strong cap": (
        "muse_spark_text",
        {
            "final_logit_softcapping": 2.0,
            "moe_hidden_size": 96,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 1,
            "qk_scale_factor": 1.5,
            "routed_scaling_factor": 0.7,
            **rope("yarn", **YARN),
        },
    ),
    "bitnet, biases, silu, tied, llama3 rope": (
        "bitnet",
        {"attention_bias": True, "hidden_act": "silu", "tie_word_embeddings": True, **LLAMA3},
    ),
    "bitnet, every head's own keys, another epsilon": ("bitnet", {"num_key_value_heads": 4, "rms_norm_eps": 0.01}),
    "falcon 7B, one key head": (
        "falcon",
        {"new_decoder_architecture": False, "tie_word_embeddings": False},
    ),
    "falcon, every head its own, one after the other, biases": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": 4,
            "parallel_attn": False,
            "bias": True,
            "activation": "relu",
        },
    ),
    "falcon 2, one norm, linear rope": ("falcon", {"num_ln_in_parallel_attn": 1, **rope("linear", factor=3.0)}),
    "gptj, tied, whole heads turn": (
        "gptj",
        {"tie_word_embeddings": True, "rotary_dim": 16, "activation_function": "gelu"},
    ),
    "codegen, eight heads": ("codegen", {"num_attention_heads": 8, "rotary_dim": 4}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.4}),
    "olmoe, clipped": ("olmoe", {"clip_qkv": 0.6}),
    "mpt, clipped": ("mpt", {"attn_config": {"clip_qkv": 0.3}}),
    "bloom, seven heads": ("bloom", {"num_attention_heads": 7, "hidden_size": 112}),
    "bloom, one head, untied": ("bloom", {"num_attention_heads": 1, "tie_word_embeddings": False}),
    "mpt, five heads, scores of their own scale": (
        "mpt",
        {"num_attention_heads": 5, "hidden_size": 80, "attn_config": {"softmax_scale": 0.2}},
    ),
    "mpt, one head, untied": ("mpt", {"num_attention_heads": 1, "tie_word_embeddings": False}),
    "gpt2, untied, scales by layer": (
        "gpt2",
        {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"},
    ),
    "gpt2, scores as they are, an odd block": ("gpt2", {"scale_attn_weights": False, "n_inner": 75}),
    "gpt2, four times as wide a block": ("gpt2", {"n_inner": None, "num_attention_heads": 8}),
    "gpt_bigcode, every head its own": ("gpt_bigcode", {"multi_query": False, "scale_attn_weights": False}),
    "gpt_bigcode, a narrow block": ("gpt_bigcode", {"n_inner": 33, "tie_word_embeddings": False}),
    "gpt_neo, windows of 1 and none": (
        "gpt_neo",
        {"window_size": 1, "attention_types": [[["local"], 1], [["global"], 3]], "intermediate_size": None},
    ),
    "opt, without biases and weights of norms": (
        "opt",
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
    "opt, untied": ("opt", {"tie_word_embeddings": False, "num_attention_heads": 8}),
    "biogpt, not scaled, relu": ("biogpt", {"scale_embedding": False, "hidden_act": "relu"}),
    "nanochat, biases, no cap, linear rope": (
        "nanochat",
        {
            "attention_bias": True,
            "final_logit_softcapping": None,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "head_dim": 24,
            **rope("linear", factor=3.0),
        },
    ),
    "nanochat, strong cap, one key head": ("nanochat", {"final_logit_softcapping": 2.0, "num_key_value_heads": 1}),
    "olmo, biases, tied": ("olmo", {"attention_bias": True, "tie_word_embeddings": True, **rope("linear", factor=3.0)}),
    "apertus, biases": ("apertus", {"attention_bias": True, **rope("default")}),
    "ministral, some windows": ("ministral", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "afmoe, biases, experts everywhere": (
        "afmoe",
        {"attention_bias": True, "mup_enabled": False, "num_dense_layers": 0, "tie_word_embeddings": True},
    ),
    "exaone_moe, lists": (
        "exaone_moe",
        {
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "head_dim": 24,
            "num_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "hy_v3, no biases": (
        "hy_v3",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "num_shared_experts": 1,
        },
    ),
    "mimo_v2_flash, lists, groups, values as they are": (
        "mimo_v2_flash",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "attention_bias": True,
            "attention_value_scale": None,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "llama4, biases, lists, one key head": (
        "llama4_text",
        {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "no_rope_layers": [0, 1, 1, 0],
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
            "moe_layers": [0, 2, 3],
            "num_experts_per_tok": 5,
            "attention_chunk_size": 7,
            "attn_scale": 0.7,
            "floor_scale": 3,
        },
    ),
    "llama4, as Scout": (
        "llama4_text",
        {
            "interleave_moe_layer_step": 1,
            "num_experts_per_tok": 1,
            **rope(
                "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=64
            ),
        },
    ),
    "llama4, as Maverick": ("llama4_text", {"num_experts_per_tok": 1, "use_qk_norm": False}),
    "llama4, dense, all layers turn": (
        "llama4_text",
        {
            "moe_layers": [],
            "no_rope_layers": [1] * 4,
            "layer_types": ["full_attention"] * 4,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
        },
    ),
    "mistral4, direct queries": (
        "mistral4",
        {
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
        },
    ),
    "mistral_large4_text, biases, dense layers, tied, no yarn": (
        "mistral_large4_text",
        {
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "no_rope_layers": [0, 1, 1, 0, 1],
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "index_topk": 512,
            "hidden_act": "gelu",
            "final_logit_softcapping": 1.5,
            "tie_word_embeddings": True,
            **rope("default", rope_theta=500.0),
        },
    ),
    "mistral_large4_text, shared choice, scale of scores": (
        "mistral_large4_text",
        {
            "indexer_types": ["full", "shared", "full", "shared"],
            "index_topk": 400,
            "no_rope_layer_interval": 1,
            "first_k_dense_replace": 2,
            **rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.7),
        },
    ),
    "phimoe, longrope, bias of the head, window": (
        "phimoe",
        {
            **rope("longrope", **LONG, original_max_position_embeddings=256, short_mscale=1.2, long_mscale=1.3),
            "lm_head_bias": True,
            "attention_bias": False,
            "sliding_window": 9,
            "router_jitter_noise": 0.01,
        },
    ),
    "solar_open, groups, yarn": (
        "solar_open",
        {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "attention_bias": False, **rope("yarn", **YARN)},
    ),
    "cohere_compass_text, sections, fields that stayed behind, biases": (
        "cohere_compass_text",
        {
            "attention_bias": True,
            "layer_types": ["full_attention"] * 4,
            "logit_scale": None,
            "pooling": "eos",
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [2, 3, 3]},
                "rope_theta": 777.0,
                "rope_type": "default",
            },
        },
    ),
    "flint, biases, no list of dense layers, yarn": (
        "flint",
        {
            "attention_bias": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 24,
            "num_key_value_heads": 1,
            **rope("yarn", **YARN),
        },
    ),
    "kolibri1, no layer with a window, normalised": (
        "kolibri1",
        {"layer_types": ["full_attention"] * 4, "norm_topk_prob": True, "hidden_act": "gelu"},
    ),
    "beam, other types turn, biases, one group, no soft cap": (
        "beam",
        {
            "attention_bias": True,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["sparse", "dense", "dense", "sparse"],
            "n_group": 1,
            "norm_topk_prob": False,
            "num_attention_heads": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
                "sliding_attention": None,
            },
            "routed_scaling_factor": 0.7,
        },
    ),
    "step3p5, biases, as many heads everywhere, other scale, nothing limited": (
        "step3p5",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_sliding_attention_heads": None,
            "query_pre_attn_scalar": 11.5,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "step3p5, as published": (
        "step3p5",
        {
            "attention_other_setting": {"num_attention_heads": 2},
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"],
            "moe_layers_enum": "2,3",
            "mlp_layer_types": None,
            "num_nextn_predict_layers": 2,
            "num_sliding_attention_heads": None,
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0],
            "rope_parameters": None,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 32.0,
            },
            "rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6, 1e4],
            "swiglu_limits": [0.0, 0.0, 0.0, 0.4, 0.0, 0.0],
            "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.2, 0.0, 0.0],
        },
    ),
    "laguna, a gate for each column, yarn, biases": (
        "laguna",
        {
            "gating": "per-element",
            "attention_bias": True,
            "layer_types": ["full_attention"] * 4,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "num_attention_heads_per_layer": [2, 4, 8, 2],
            "shared_expert_intermediate_size": 24,
            "moe_routed_scaling_factor": 2.5,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "partial_rotary_factor": 0.5, **YARN}
            },
        },
    ),
    "laguna, the same heads in all layers": (
        "laguna",
        {"gating": "per-head", "num_attention_heads_per_layer": None, "hidden_act": "gelu", "rms_norm_eps": 0.1},
    ),
    "lfm3, no convolutions": ("lfm3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "lfm3, other tables, gates of two heads, biases": (
        "lfm3",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_attention_heads": 2,
            "attention_bias": True,
            "use_sandwich_norm": False,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 5e4,
                    "partial_rotary_factor": 0.25,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
            },
        },
    ),
    "vaultgemma without caps, biases": (
        "vaultgemma",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "vaultgemma, strong caps, full layers": (
        "vaultgemma",
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "layer_types": ["full_attention"] * 4},
    ),
    "starcoder2, no biases": ("starcoder2", {"use_bias": False, "sliding_window": None}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_computes_what_transformers_computes(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    check(Pair(tmp_path, family, overrides), 16)


@pytest.mark.parametrize("family", ["gemma2", "gemma3n_text", "gemma4_text_e4b", "deepseek_v3"])
def test_cuts_company_and_rollback_change_nothing_but_rounding(family: str, tmp_path: Path) -> None:
    """Two spans, another session between the rows, wrong drafts rolled back: the logits of one pass."""
    pair = Pair(tmp_path, family, {})
    whole = pair.ours(PROMPT, pair.span.new_cache(40))
    spans = [TorchSpan(pair.program, span, pair.read) for span in (Span(0, 1), Span(1, 4))]
    own, other = ([span.new_cache(CONTEXT) for span in spans] for _ in range(2))
    out = []
    for start, ids, kept in [(0, PROMPT[:9], 9), (9, [1, 2, 3, 4], 0), (9, PROMPT[9:30], 21), (30, PROMPT[30:], 10)]:
        rows = pair.ends.embed(torch.tensor([5, 6, *ids]))
        for span, mine, strange in zip(spans, own, other, strict=True):
            rows = span.step(rows, [Piece(strange, start, 2), Piece(mine, start, len(ids))])
        out.append(pair.ends.logits(rows[2:])[:kept])
    assert float((torch.cat(out) - whole).abs().max() / whole.abs().max()) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gemma3n_text", "gpt_oss", "minicpm3"])
def test_bf16_stays_near_fp32(family: str, tmp_path: Path) -> None:
    """Roundings to bf16 cost what they must: logits within a few hundredths of the largest."""
    pair = Pair(tmp_path, family, {})
    span = TorchSpan(pair.program, Span(0, 4), pair.read, torch.bfloat16)
    ends = TorchEnds(pair.program, pair.read, torch.bfloat16)
    rows = span.step(ends.embed(torch.tensor(PROMPT)), [Piece(span.new_cache(40), 0, 40)])
    assert rows.dtype == torch.bfloat16
    theirs = pair.theirs(PROMPT)
    assert 1e-4 < float((ends.logits(rows) - theirs).abs().max() / theirs.abs().max()) < 0.08


def test_latent_attention_caches_latents(tmp_path: Path) -> None:
    """deepseek_v3 in its published sizes: 1,152 bytes a layer and position."""
    pair = Pair(tmp_path, "deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    attend = pair.program.layers[0].attention
    assert isinstance(attend, LatentAttention)
    assert 2 * sum(attend.cache_widths) == 1152
    cache = pair.span.new_cache(3)
    cache.reserve(1)
    assert [tensor.shape for tensor in cache.layers[0]] == [(3, 512), (3, 64)]


@pytest.mark.parametrize("damage", ["missing", "wrong shape"])
def test_a_checkpoint_that_lacks_something_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, "mixtral", {})
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"

    def read(wanted: str) -> torch.Tensor:
        if wanted != name:
            return pair.read(wanted)
        if damage == "missing":
            raise KeyError(wanted)
        return pair.read(wanted)[:-1]

    with pytest.raises(ModelError, match=name):
        TorchSpan(pair.program, Span(0, 4), read)
    TorchSpan(pair.program, Span(2, 4), read)
