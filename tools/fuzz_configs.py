"""Random configurations of every family: our engines against transformers, and the back ends against each other. For the night.

    PYTHONPATH=src .venv/bin/python -m tools.fuzz_configs --count 300 --seed 1

Each draw makes a tiny checkpoint with random sizes and options, whose config.json may have another form (fuzz_forms.py), and
compares logits of one pass and greedy ids (prompt in chunks, then one by one) of the torch engine in fp32 with transformers; of
families with states those of the native engine. It must have the same bits on every back end that the machine has, in any
precision and with any caches, whatever the cut and the life of the session (fuzz_sessions.py); in fp32 it is compared with
transformers too.
Configurations that transformers itself refuses are counted apart. Prints one JSON line for each draw that fails, with what is
needed to draw it again, and a summary with the back ends as the last line; exits with 1 if any failed.
"""

import argparse
import contextlib
import copy
import io
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from manyhands.engine import library
from manyhands.errors import ModelError
from manyhands.program.ops import Attention
from manyhands.testing.tiny import EVERY_FAMILY, NAMED_ANEW, write_tiny
from manyhands.testing.tiny_configs import LFM3_KINDS, NEMOTRON_KINDS
from manyhands.testing.tiny_v4 import V4_KINDS
from tests.engine.oracle import NativePair, Pair, pair_in
from tools.fuzz_forms import TYPES, config_of, rewritten, scaling
from tools.fuzz_sessions import on_all, precisions

TOLERANCE = 1e-4  # of the largest logit; wrong arithmetic shows as 1e-2 and more
STEEPEST = 1e-2  # a difference that may come from rounding
NEAREST = 1e-5  # of a row's highest score: a choice of positions that a smaller difference decides is not compared
MOST_PARAMETERS = 8_000_000  # of a model whose absent fields may be large by default
CHUNKED_TOLERANCE = 1e-3  # transformers sums linear attention over chunks of 64 positions
Options = dict[str, Any]


def maybe(draw: random.Random, options: Options) -> Options:
    """Each option with an even chance, its value drawn from a list."""
    return {name: draw.choice(values) for name, values in options.items() if draw.random() < 0.5}


_BOOL = [False, True]
_WINDOWS: Options = {"use_sliding_window": _BOOL, "sliding_window": [1, 5, 16], "max_window_layers": [0, 1, 3]}
_LINEAR: Options = {
    "linear_num_key_heads": [1, 2],
    "linear_num_value_heads": [2, 6],
    "linear_key_head_dim": [8, 33],
    "linear_value_head_dim": [7, 32, 50],
    "linear_conv_kernel_dim": [2, 5],
    "full_attention_interval": [2, 3, 9],
}
_INDEXED: Options = {
    "index_topk": [4, 11, 30, 64],
    "index_n_heads": [16, 40],
    "index_head_dim": [16, 33, 40],
    "attention_bias": _BOOL,
    "n_shared_experts": [1, 2],
}
_STATES: Options = {
    "conv_kernel": [2, 4, 5],
    "layer_norm_epsilon": [1e-5, 1e-2],
    "state_size": [1, 7, 16, 33],
    "use_bias": _BOOL,
    "use_conv_bias": _BOOL,
}
OWN: dict[str, Options] = {
    "llama": {"attention_bias": _BOOL, "mlp_bias": _BOOL, "hidden_act": ["silu", "gelu", "relu"]},
    "qwen2": _WINDOWS,
    "qwen3": {"attention_bias": _BOOL, **_WINDOWS},
    "mistral": {"sliding_window": [None, 1, 7]},
    "ministral3": {"sliding_window": [None, 1, 7], "head_dim": [16, 20]},
    "gemma2": {
        "attn_logit_softcapping": [None, 1.0, 50.0],
        "query_pre_attn_scalar": [4, 100],
        "sliding_window": [2, 30],
    },
    "vaultgemma": {
        "attention_bias": _BOOL,
        "attn_logit_softcapping": [None, 1.0, 50.0],
        "final_logit_softcapping": [None, 4.0],
        "query_pre_attn_scalar": [4, 100],
        "sliding_window": [2, 30],
    },
    "gemma3_text": {"attention_bias": _BOOL, "sliding_window": [2, 30], "final_logit_softcapping": [None, 4.0]},
    "gemma3n_text": {
        "altup_correct_scale": _BOOL,
        "altup_num_inputs": [1, 2, 4, 7],
        "attention_bias": _BOOL,
        "final_logit_softcapping": [4.0, 30.0],
        "hidden_size_per_layer_input": [1, 12, 33],
        "laurel_rank": [1, 12, 64],
        "sliding_window": [2, 30],
        "vocab_size_per_layer_input": [60, 512],
    },
    "gemma4_text": {
        "head_dim": [16, 24],
        "global_head_dim": [32, 72, 512],
        "enable_moe_block": _BOOL,
        "attention_k_eq_v": _BOOL,
        "attention_bias": _BOOL,
        "sliding_window": [2, 30],
        "final_logit_softcapping": [None, 4.0],
    },
    "gemma4_text_e4b": {
        "head_dim": [16, 24],
        "global_head_dim": [32, 72, 512],
        "attention_k_eq_v": _BOOL,
        "attention_bias": _BOOL,
        "sliding_window": [2, 30],
        "final_logit_softcapping": [None, 4.0],
        "use_double_wide_mlp": _BOOL,
    },
    "gemma4_unified_text": {
        "head_dim": [16, 24],
        "global_head_dim": [32, 72, 512],
        "attention_k_eq_v": _BOOL,
        "attention_bias": _BOOL,
        "hidden_activation": ["gelu_pytorch_tanh", "silu"],
        "sliding_window": [2, 30],
        "final_logit_softcapping": [None, 4.0],
    },
    "phi3": {"sliding_window": [None, 6], "partial_rotary_factor": [0.5, 1.0]},
    "minicpm3": {"q_lora_rank": [16, 40], "attention_bias": _BOOL, "scale_depth": [0.5, None], "scale_emb": [1, 3.3]},
    "mixtral": {"num_local_experts": [3, 8], "num_experts_per_tok": [1, 2, 3], "sliding_window": [None, 6]},
    "qwen2_moe": {"norm_topk_prob": _BOOL, "qkv_bias": _BOOL, "decoder_sparse_step": [1, 2], "num_experts": [4, 9]},
    "qwen3_moe": {"norm_topk_prob": _BOOL, "attention_bias": _BOOL, "num_experts_per_tok": [1, 4]},
    "gpt_oss": {
        "swiglu_limit": [0.3, 7.0],
        "sliding_window": [1, 12],
        "num_experts_per_tok": [1, 4],
        "attention_bias": _BOOL,
    },
    "glm4": {"attention_bias": _BOOL, "partial_rotary_factor": [0.25, 1.0]},
    "olmo2": {"attention_bias": _BOOL},
    "olmo3": {"attention_bias": _BOOL, "sliding_window": [1, 20]},
    "deepseek_v3": {
        "q_lora_rank": [None, 24],
        "rope_interleave": _BOOL,
        "n_group": [1, 4],
        "norm_topk_prob": _BOOL,
        "routed_scaling_factor": [0.3, 1.0],
        "first_k_dense_replace": [0, 1, 4],
        "n_shared_experts": [1, 3],
    },
    "deepseek_v32": _INDEXED,
    "deepseek_v4": {
        "hc_eps": [1e-6, 1e-3],
        "hc_mult": [1, 2, 4],
        "hc_sinkhorn_iters": [1, 3, 20],
        "index_head_dim": [16, 33, 40],
        "index_n_heads": [16, 40],
        "index_topk": [1, 3, 9, 64],
        "num_experts_per_tok": [1, 4],
        "o_groups": [1, 2, 4],
        "o_lora_rank": [1, 24],
        "routed_scaling_factor": [0.3, 2.5],
        "scoring_func": ["sqrtsoftplus", "sigmoid"],
        "sliding_window": [1, 5, 60],
        "swiglu_limit": [0.2, 10.0],
    },
    "glm_moe_dsa": {**_INDEXED, "n_group": [1, 4]},
    "mistral_large4_text": {
        **_INDEXED,
        "final_logit_softcapping": [1.0, 30.0],
        "first_k_dense_replace": [0, 1, 4],
        "hidden_act": ["silu", "gelu"],
        "no_rope_layer_interval": [1, 2],
        "num_experts_per_tok": [1, 4],
        "routed_scaling_factor": [0.3, 2.5],
    },
    "glm4_moe_lite": {"q_lora_rank": [None, 24], "rope_interleave": _BOOL, "n_shared_experts": [1, 2]},
    "youtu": {"q_lora_rank": [None, 24], "rope_interleave": _BOOL, "attention_bias": _BOOL},
    "cohere": {"attention_bias": _BOOL, "logit_scale": [0.1, 2.0], "use_qk_norm": _BOOL},
    "cohere2_moe": {
        "attention_bias": _BOOL,
        "expert_selection_fn": ["softmax", "sigmoid"],
        "first_k_dense_replace": [0, 1],
        "logit_scale": [0.1, 2.0],
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 4],
        "num_shared_experts": [0, 2],
        "prefix_dense_intermediate_size": [None, 50],
        "prefix_dense_sliding_window_pattern": [1, 2],
        "rms_norm_eps": [None, 1e-4],
        "shared_expert_combination_strategy": ["average", "sum"],
        "sliding_window": [3, 50],
    },
    "cwm": {"mlp_bias": _BOOL, "sliding_window": [1, 20]},
    "flex_olmo": {"attention_bias": _BOOL, "norm_topk_prob": _BOOL, "num_experts_per_tok": [1, 5]},
    "granite_swa": {
        "attention_bias": _BOOL,
        "mlp_bias": _BOOL,
        "sliding_window": [1, 20],
        "logits_scaling": [0.5, 8.0],
    },
    "granitemoe_swa": {"attention_bias": _BOOL, "sliding_window": [1, 20], "shared_intermediate_size": [0, 40]},
    "granitemoeshared": {
        "attention_bias": _BOOL,
        "num_experts_per_tok": [1, 4],
        "residual_multiplier": [0.2, 1.0],
        "shared_intermediate_size": [0, 40],
    },
    "hyperclovax": {
        "attention_bias": _BOOL,
        "attention_multiplier": [None, 0.1],
        "logits_scaling": [0.125, 2.0],
        "mlp_bias": _BOOL,
        "residual_multiplier": [0.2, 1.0],
        "use_post_norm": _BOOL,
    },
    "iquestcoder": {"attention_bias": _BOOL, "mlp_bias": _BOOL},
    "jais2": {"attention_bias": _BOOL, "mlp_bias": _BOOL, "hidden_act": ["relu2", "gelu"]},
    "mellum": {
        "attention_bias": _BOOL,
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 4],
        "sliding_window": [1, 20],
    },
    "cohere_compass_text": {
        "attention_bias": _BOOL,
        "logit_scale": [None, 0.1, 2.0],
        "rope_parameters": [
            {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
            {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "sliding_attention": None},
        ],
        "sliding_window": [3, 50],
    },
    "cohere2": {"attention_bias": _BOOL, "logit_scale": [0.1, 2.0], "sliding_window": [3, 50]},
    "granite": {"attention_bias": _BOOL, "residual_multiplier": [0.2, 1.0], "logits_scaling": [0.5, 8.0]},
    "bamba": {
        "attn_layer_indices": [None, [0], [0, 1]],
        "mamba_n_groups": [1, 4],
        "mamba_d_state": [9, 33],
        "mamba_d_conv": [2, 5],
        "mamba_conv_bias": _BOOL,
        "mamba_proj_bias": _BOOL,
        "attention_bias": _BOOL,
        "mlp_bias": _BOOL,
    },
    "inkling_text": {
        "head_dim": [8, 20, 33],
        "swa_head_dim": [8, 33],
        "swa_num_attention_heads": [2, 6],
        "swa_num_key_value_heads": [1, 2],
        "sliding_window_size": [1, 5, 16, 80],
        "d_rel": [1, 5, 16, 40],
        "rel_extent": [1, 7, 64, 200],
        "log_scaling_n_floor": [None, 1, 7, 1000],
        "log_scaling_alpha": [0.0, 0.1, 3.0],
        "conv_kernel_size": [2, 5],
        "n_shared_experts": [1, 3],
        "num_experts_per_tok": [1, 3, 8],
        "route_scale": [1.0, 8.0],
        "logits_mup_width_multiplier": [1.0, 24.0],
        "unpadded_vocab_size": [None, 260],
        "hidden_act": ["silu", "gelu"],
    },
    "falcon_h1": {
        "head_dim": [8, 20],
        "mamba_n_heads": [4, 16],
        "mamba_n_groups": [1, 4],
        "mamba_d_state": [9, 33],
        "mamba_d_conv": [2, 5],
        "mamba_rms_norm": _BOOL,
        "mamba_norm_before_gate": _BOOL,
        "mamba_conv_bias": _BOOL,
        "mamba_proj_bias": _BOOL,
        "projectors_bias": _BOOL,
        "attention_bias": _BOOL,
        "mlp_bias": _BOOL,
        "hidden_act": ["silu", "gelu"],
        "ssm_in_multiplier": [1.0, 0.3],
        "attention_in_multiplier": [1.0, 0.3],
        "key_multiplier": [0.1, 2.0],
    },
    "granitemoehybrid": {
        "attention_bias": _BOOL,
        "position_embedding_type": [None, "rope"],
        "logits_scaling": [0.5, 8.0],
    },
    "granitemoehybrid_mamba": {
        "mamba_n_groups": [1, 4],
        "mamba_d_state": [9, 33],
        "mamba_conv_bias": _BOOL,
        "mamba_proj_bias": _BOOL,
        "num_local_experts": [0, 5],
        "position_embedding_type": [None, "rope"],
    },
    "stablelm": {"use_parallel_residual": _BOOL, "qk_layernorm": _BOOL, "use_qkv_bias": _BOOL},
    "phi": {"qk_layernorm": _BOOL, "hidden_act": ["gelu_new", "gelu", "relu"]},
    "gpt_neox": {"use_parallel_residual": _BOOL, "attention_bias": _BOOL, "rotary_pct": [0.25, 0.5, 1.0]},
    "ernie4_5": {"use_bias": _BOOL},
    "nemotron": {"attention_bias": _BOOL, "mlp_bias": _BOOL, "hidden_act": ["relu2", "gelu"]},
    "nemotron_h": {
        "n_groups": [1, 4],
        "ssm_state_size": [9, 33],
        "mamba_head_dim": [7, 32],
        "conv_kernel": [2, 5],
        "use_conv_bias": _BOOL,
        "use_bias": _BOOL,
        "mlp_bias": _BOOL,
        "mlp_hidden_act": ["relu2", "gelu", "silu"],
        "n_group": [1, 2],
        "num_experts_per_tok": [1, 4],
        "norm_topk_prob": _BOOL,
        "moe_latent_size": [None, 20],
        "routed_scaling_factor": [0.3, 2.5],
    },
    "smollm3": {"attention_bias": _BOOL, "no_rope_layer_interval": [1, 2], "mlp_bias": _BOOL},
    "starcoder2": {"use_bias": _BOOL, "sliding_window": [None, 4]},
    "muse_glimmer_text": {
        "attention_bias": _BOOL,
        "final_logit_softcapping": [2.0, 30.0],
        "output_multiplier": [0.2, 1.0],
        "post_norm_eps": [1e-8, 0.1],
        "qk_scale_factor": [0.5, 3.87],
        "sliding_window": [1, 9],
    },
    "muse_spark_text": {
        "attention_bias": _BOOL,
        "final_logit_softcapping": [2.0, 30.0],
        "moe_hidden_size": [1, 24, 100],
        "num_experts_per_tok": [1, 8],
        "output_multiplier": [0.2, 1.0],
        "post_norm_eps": [1e-8, 0.1],
        "qk_scale_factor": [0.5, 5.47],
        "residual_gate_temperature": [0.01, 2.0],
        "routed_scaling_factor": [0.3, 2.5],
        "sliding_window": [1, 9],
    },
    "afmoe": {
        "attention_bias": _BOOL,
        "mup_enabled": _BOOL,
        "sliding_window": [1, 20],
        "global_attn_every_n_layers": [1, 2],
        "num_dense_layers": [0, 2, 4],
        "num_experts_per_tok": [1, 4],
        "num_shared_experts": [1, 2],
        "route_scale": [0.3, 2.5],
    },
    "exaone_moe": {
        "sliding_window": [1, 9],
        "sliding_window_pattern": [1, 2],
        "n_group": [1, 4],
        "first_k_dense_replace": [0, 3],
        "num_shared_experts": [1, 2],
        "norm_topk_prob": _BOOL,
        "routed_scaling_factor": [0.3, 1.0],
    },
    "hy_v3": {
        "attention_bias": _BOOL,
        "mlp_bias": _BOOL,
        "num_experts_per_tok": [1, 3],
        "num_shared_experts": [1, 2],
        "router_scaling_factor": [0.3, 2.8],
    },
    "axk2": {
        **_INDEXED,
        "gated_norm_rank": [1, 40],
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 3],
        "routed_scaling_factor": [0.3, 2.5],
    },
    "dots3_note_text": {
        **_INDEXED,
        "first_k_dense_replace": [0, 1, 3],
        "moe_layer_freq": [1, 2],
        "n_group": [1, 2],
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 3],
        "routed_scaling_factor": [0.3, 2.5],
        "shared_experts_intermediate_size": [8, 33],
        "sliding_window": [1, 20],
        "swa_kv_lora_rank": [8, 40],
        "swa_q_lora_rank": [12, 70],
        "swa_v_head_dim": [7, 32],
        "rope_theta": [1e3, 8e6],
        "swa_rope_theta": [1e3, 5e4],
        "use_dsa": _BOOL,
        "use_sliding_window": [True, True, False],
    },
    "hy_v4": {
        **_INDEXED,
        "hc_eps": [1e-6, 1e-2],
        "hc_magnitude": [0.5, 3.0],
        "hc_mult": [1, 2, 3],
        "n_group": [1, 2],
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 3],
        "routed_scaling_factor": [0.3, 2.5],
        "swiglu_limit": [0.2, 10.0],
    },
    "mimo_v2_flash": {
        "attention_bias": _BOOL,
        "attention_value_scale": [None, 0.3],
        "head_dim": [20, 48],
        "v_head_dim": [8, 24],
        "sliding_window": [1, 20],
        "n_group": [1, 2],
        "norm_topk_prob": _BOOL,
        "routed_scaling_factor": [0.3, 2.5],
    },
    "mistral4": {
        "q_lora_rank": [None, 24],
        "attention_bias": _BOOL,
        "rope_interleave": _BOOL,
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 4],
        "n_shared_experts": [1, 2],
        "routed_scaling_factor": [0.3, 2.5],
        "first_k_dense_replace": [0, 3],
    },
    "llama4_text": {
        "attention_bias": _BOOL,
        "attention_chunk_size": [1, 5, 64],
        "attn_scale": [0.0, 1.5],
        "floor_scale": [1, 7],
        "interleave_moe_layer_step": [1, 3],
        "no_rope_layer_interval": [1, 2],
        "num_experts_per_tok": [1, 5],
        "use_qk_norm": _BOOL,
    },
    "phimoe": {
        "attention_bias": _BOOL,
        "lm_head_bias": _BOOL,
        "num_local_experts": [2, 40],
        "router_jitter_noise": [0.0, 0.01, 9.0],
        "sliding_window": [1, 9],
    },
    "apertus": {"attention_bias": _BOOL},
    "axk1": {
        "attention_bias": _BOOL,
        "first_k_dense_replace": [0, 1, 4],
        "moe_layer_freq": [1, 2],
        "n_group": [1, 4],
        "n_shared_experts": [1, 3],
        "norm_topk_prob": _BOOL,
        "q_lora_rank": [24, 40],
        "rope_interleave": _BOOL,
        "routed_scaling_factor": [0.3, 1.0],
    },
    "nanochat": {
        "attention_bias": _BOOL,
        "final_logit_softcapping": [None, 1.0, 50.0],
        "hidden_act": ["relu2", "gelu"],
    },
    "olmo": {"clip_qkv": [None, 0.5], "attention_bias": _BOOL, "hidden_act": ["silu", "gelu"]},
    "solar_open": {
        "attention_bias": _BOOL,
        "n_group": [1, 4],
        "norm_topk_prob": _BOOL,
        "n_shared_experts": [1, 2],
        "routed_scaling_factor": [0.3, 2.5],
    },
    "kimi_k2": {"q_lora_rank": [None, 24], "n_group": [1, 2], "routed_scaling_factor": [0.3, 2.8]},
    "deepseek_v2": {
        "topk_method": ["greedy", "group_limited_greedy"],
        "n_group": [1, 4, 8],
        "topk_group": [1, 2, 4],
        "q_lora_rank": [None, 24],
        "attention_bias": _BOOL,
        "num_experts_per_tok": [1, 3],
        "routed_scaling_factor": [0.3, 16.0],
        "first_k_dense_replace": [0, 1, 4],
        "n_shared_experts": [1, 3],
    },
    "glm4_moe": {
        "use_qk_norm": _BOOL,
        "attention_bias": _BOOL,
        "n_group": [1, 2],
        "norm_topk_prob": _BOOL,
        "routed_scaling_factor": [0.3, 2.5],
        "first_k_dense_replace": [0, 3],
        "partial_rotary_factor": [0.5, 1.0],
    },
    "dots1": {
        "attention_bias": _BOOL,
        "n_group": [1, 4],
        "norm_topk_prob": _BOOL,
        "sliding_window": [None, 1, 9],
        "max_window_layers": [0, 1, 9],
        "n_shared_experts": [1, 2],
    },
    "ernie4_5_moe": {
        "moe_k": [1, 3],
        "moe_num_shared_experts": [0, 1, 2],
        "moe_layer_start_index": [0, 2],
        "moe_layer_end_index": [-1, 1, 2, 9],
        "moe_layer_interval": [1, 2],
    },
    "jamba": {
        "expert_layer_offset": [0, 1],
        "mamba_conv_bias": _BOOL,
        "mamba_d_conv": [1, 2, 5],
        "mamba_d_state": [1, 7, 16, 33],
        "mamba_dt_rank": [3, 40, "auto"],
        "mamba_expand": [1, 3],
        "mamba_proj_bias": _BOOL,
        "num_experts": [1, 3, 8],
        "num_experts_per_tok": [1, 3],
    },
    "bailing_hybrid": {
        "attention_bias": _BOOL,
        "first_k_dense_replace": [0, 1, 4],
        "hidden_act": ["silu", "gelu"],
        "kda_lower_bound": [-0.1, -1.0, -20.0],
        "kda_safe_gate": _BOOL,
        "linear_head_dim": [5, 7, 33, 64],
        "linear_num_heads": [1, 2, 5],
        "n_group": [1, 2, 4],
        "n_shared_experts": [1, 3],
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 3],
        "routed_scaling_factor": [0.3, 2.5],
        "short_conv_kernel_size": [1, 2, 5],
        "topk_group": [1, 2],
    },
    "kimi_linear": {
        "attention_bias": _BOOL,
        "first_k_dense_replace": [0, 1, 4],
        "hidden_act": ["silu", "gelu"],
        "linear_conv_kernel_dim": [1, 2, 5],
        "linear_head_dim": [5, 7, 33, 64],
        "linear_num_heads": [1, 2, 5],
        "n_group": [1, 2],
        "n_shared_experts": [1, 3],
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 3],
        "q_lora_rank": [None, 24],
        "routed_scaling_factor": [0.3, 2.5],
    },
    "longcat_flash": {
        "attention_bias": _BOOL,
        "moe_topk": [2, 5],
        "n_routed_experts": [2, 5, 8],
        "q_lora_rank": [24, 40],
        "routed_scaling_factor": [0.3, 2.5],
        "zero_expert_num": [0, 3, 30],
    },
    "lfm2": {"conv_bias": _BOOL, "conv_L_cache": [1, 3, 6], "block_auto_adjust_ff_dim": _BOOL},
    "beam": {
        "attention_bias": _BOOL,
        "final_logit_softcapping": [None, 5.0],
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 4],
        "rope_parameters": [
            {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
            {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "sliding_attention": None},
        ],
        "routed_scaling_factor": [0.3, 2.5],
        "sliding_window": [1, 9],
    },
    "flint": {
        "attention_bias": _BOOL,
        "decoder_sparse_step": [1, 2],
        "mlp_only_layers": [[], [0, 3]],
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 4],
        "shared_expert_intermediate_size": [1, 40],
        "sliding_window": [1, 9],
    },
    "kolibri1": {
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 4],
        "shared_expert_intermediate_size": [1, 40],
        "sliding_window": [1, 9],
    },
    "step3p5": {
        "attention_bias": _BOOL,
        "mlp_bias": _BOOL,
        "moe_router_scaling_factor": [0.3, 2.5],
        "num_experts_per_tok": [1, 4],
        "query_pre_attn_scalar": [0.5, 100],
        "share_expert_dim": [1, 40],
        "sliding_window": [1, 9],
    },
    "laguna": {
        "attention_bias": _BOOL,
        "gating": [True, "per-head", "per-element"],
        "moe_routed_scaling_factor": [0.3, 2.5],
        "num_experts_per_tok": [1, 4],
        "shared_expert_intermediate_size": [1, 40],
        "sliding_window": [1, 9],
    },
    "lfm3": {
        "attention_bias": _BOOL,
        "conv_bias": _BOOL,
        "conv_L_cache": [1, 2, 12],
        "sliding_window": [1, 9],
        "use_attention_gate": _BOOL,
        "use_sandwich_norm": _BOOL,
    },
    "olmo_hybrid": {
        **{name: values for name, values in _LINEAR.items() if name != "full_attention_interval"},
        "attention_bias": _BOOL,
        "linear_allow_neg_eigval": _BOOL,
        "linear_key_head_dim": [None, 8, 33],
        "rope_parameters": [{"rope_theta": None}],
    },
    "lfm2_moe": {"conv_bias": _BOOL, "use_expert_bias": _BOOL, "norm_topk_prob": _BOOL, "num_dense_layers": [0, 3]},
    "qwen3_5_text": {**_LINEAR, "attention_bias": _BOOL},
    "qwen3_5_moe_text": {**_LINEAR, "num_experts_per_tok": [1, 3]},
    "qwen3_next": {**_LINEAR, "norm_topk_prob": _BOOL, "mlp_only_layers": [[], [0, 3]]},
    "qwen4_exp_text": {
        **_LINEAR,
        "attention_bias": _BOOL,
        "heads_per_ngram": [1, 3],
        "hc_count": [2, 3, 4, 7],
        "hc_lowrank": [1, 12, 40],
        "indexer_n_heads": [5, 9],
        "ngram_size": [2, 3, 5],
        "ngram_vocab_size_base": [2, 50, 1000],
        "norm_topk_prob": _BOOL,
        "num_experts_per_tok": [1, 3],
        "output_gate_type": [None, "sigmoid"],
        "ple_conv_kernel_size": [1, 2, 4],
        "seed": [0, 99],
    },
    "hunyuan_v1_moe": {"attention_bias": _BOOL, "num_experts": [2, 5], "moe_topk": [1, 2]},
    "hunyuan_v1_dense": {"attention_bias": _BOOL},
    "olmoe": {"clip_qkv": [None, 0.5], "attention_bias": _BOOL, "norm_topk_prob": _BOOL, "num_experts_per_tok": [1, 5]},
    "minimax": {
        "block_size": [1, 7, 64],
        "full_attn_alpha_factor": [0.3, 1.0, 3.5],
        "hidden_act": ["silu", "gelu"],
        "linear_attn_beta_factor": [0.3, 1.0],
        "mlp_alpha_factor": [1.0, 3.5],
        "num_experts_per_tok": [1, 4],
        "sliding_window": [None, 1, 9],
    },
    "minimax_m2": {"num_experts_per_tok": [1, 3], "rotary_dim": [None, 8]},
    "minimax_m3_vl_text": {
        "dense_intermediate_size": [50, 131],
        "index_block_size": [64, 128],
        "index_local_blocks": [0, 1],
        "index_topk_blocks": [1, 2, 3],
        "num_experts_per_tok": [1, 4],
        "routed_scaling_factor": [0.3, 2.5],
        "shared_intermediate_size": [1, 40],
        "swiglu_alpha": [0.5, 1.702],
        "swiglu_limit": [0.3, 7.0],
    },
    "granitemoe": {"attention_bias": _BOOL, "residual_multiplier": [0.2, 1.0], "num_experts_per_tok": [1, 4]},
    "seed_oss": {"attention_bias": _BOOL, "attention_out_bias": _BOOL, "mlp_bias": _BOOL},
    "exaone4": {"sliding_window": [1, 9], "sliding_window_pattern": [1, 2, 4]},
    "arcee": {"attention_bias": _BOOL, "mlp_bias": _BOOL, "hidden_act": ["relu2", "gelu"]},
    "bitnet": {"attention_bias": _BOOL, "hidden_act": ["relu2", "silu"], "rms_norm_eps": [1e-5, 1e-2]},
    **{family: {**_STATES, "time_step_rank": [3, 40, "auto"]} for family in ("falcon_mamba", "mamba")},
    "mamba2": _STATES,
    "falcon": {"bias": _BOOL, "activation": ["gelu", "relu"], "num_ln_in_parallel_attn": [None, 1, 2]},
    "codegen": {"activation_function": ["gelu_new", "relu"]},
    "gptj": {"activation_function": ["gelu_new", "gelu"]},
    "mpt": {"attn_config": [{}, {"clip_qkv": 0.5}, {"softmax_scale": 0.2}]},
    "biogpt": {"scale_embedding": _BOOL, "hidden_act": ["gelu", "relu"]},
    "gpt2": {"scale_attn_weights": _BOOL, "scale_attn_by_inverse_layer_idx": _BOOL, "n_inner": [None, 33, 96]},
    "gpt_bigcode": {"scale_attn_weights": _BOOL, "multi_query": _BOOL, "n_inner": [None, 33, 96]},
    "gpt_neo": {"window_size": [1, 9, 64], "activation_function": ["gelu_new", "relu"]},
    "opt": {
        "enable_bias": _BOOL,
        "ffn_dim": [1, 50, 131],
        "layer_norm_elementwise_affine": _BOOL,
        "activation_function": ["relu", "gelu"],
    },
    "ministral": {"sliding_window": [1, 7]},
    "helium": {"attention_bias": _BOOL, "mlp_bias": _BOOL},
    "glm": {"attention_bias": _BOOL, "partial_rotary_factor": [0.25, 1.0]},
}
_ONE_TABLE = (
    "minimax",
    "llama",
    "ministral3",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmo2",
    "granite",
    "arcee",
    "bitnet",
    "exaone4",
    "falcon",
    "granitemoe",
    "olmoe",
    "seed_oss",
    "afmoe",
    "exaone_moe",
    "flint",
    "hy_v3",
    "kolibri1",
    "solar_open",
    "cohere",
    "cohere2_moe",
    "cwm",
    "flex_olmo",
    "granitemoeshared",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama4_text",
    "apertus",
    "muse_glimmer_text",
    "muse_spark_text",
    "nanochat",
    "olmo",
    "vaultgemma",
)
_LIMITS = ("swiglu_limits", "swiglu_limits_shared")
_FREE_HEADS = (
    "minimax",
    "llama",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "mixtral",
    "gpt_oss",
    "glm4",
    "ernie4_5",
    "arcee",
    "dots1",
    "ernie4_5_moe",
    "exaone4",
    "glm",
    "glm4_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "ministral",
    "seed_oss",
    "afmoe",
    "beam",
    "exaone_moe",
    "flint",
    "hy_v3",
    "kolibri1",
    "solar_open",
    "cohere2_moe",
    "cwm",
    "iquestcoder",
    "mellum",
    "muse_glimmer_text",
    "muse_spark_text",
    "llama4_text",
    "laguna",
    "step3p5",
    "lfm3",
    "vaultgemma",
)
_LATENT = (
    "bailing_hybrid",
    "hy_v4",
    "kimi_linear",
    "longcat_flash",
    "axk1",
    "axk2",
    "dots3_note_text",
    "minicpm3",
    "deepseek_v3",
    "deepseek_v2",
    "kimi_k2",
    "glm4_moe_lite",
    "mistral4",
    "mistral_large4_text",
    "youtu",
    "deepseek_v32",
    "glm_moe_dsa",
)


def options(draw: random.Random, family: str) -> Options:
    """Random keyword arguments for make_tiny."""
    hidden, counts = draw.choice([64, 96, 128]), [1, 2, 4, 8]
    counts += [3, 5, 6, 7] if family in _FREE_HEADS else [3, 6] if hidden == 96 else []
    heads = draw.choice(counts)
    out: Options = {
        "layers": draw.choice([1, 2, 4]),
        "hidden": hidden,
        "vocab": draw.choice([264, 275, 320]),
        "seed": draw.randrange(1 << 20),
        "intermediate_size": draw.choice([1, 50, 96, 131]),
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if family not in _LATENT:
        out["num_attention_heads"] = heads
        if family != "gpt_neox":
            out["num_key_value_heads"] = draw.choice([n for n in range(1, 9) if heads % n == 0])
    if family == "mimo_v2_flash":  # has twice as many in some layers
        out["num_key_value_heads"] = 1
    if family in _FREE_HEADS:
        out["head_dim"] = draw.choice([2, 8, 16, 20, 48, 66])
        out["hidden_size"] = draw.choice([n for n in (hidden, 8 * heads, 72, 200) if n % heads == 0])
    if family == "nemotron_h":
        out |= {"layers_block_type": draw.choices(NEMOTRON_KINDS, k=out["layers"]), "tie_word_embeddings": False}
    if family == "lfm3":
        tables = {kind: scaling(draw, out["head_dim"]) for kind in LFM3_KINDS[1:]}
        if draw.random() < 0.7:
            part = {"partial_rotary_factor": draw.choice([0.25, 0.5, 0.7, 1.0]), "factor": draw.choice([1.0, 3.0])}
            tables["full_attention"] = {"rope_type": "proportional", "rope_theta": 1e4, **part}
        out |= {"layer_types": draw.choices(LFM3_KINDS, k=out["layers"]), "rope_parameters": tables}
    if family == "laguna":
        each = [draw.choice([1, 2, 4]) * out["num_key_value_heads"] for _ in range(out["layers"])]
        out |= {"num_attention_heads_per_layer": each, "layer_types": draw.choices(TYPES, k=out["layers"])}
        out |= {"mlp_layer_types": draw.choices(["dense", "sparse"], k=out["layers"])}
        turned = draw.choice([0.5, 1.0]) if out["head_dim"] % 4 == 0 else 1.0
        tables = {kind: scaling(draw, int(turned * out["head_dim"])) for kind in TYPES}
        out["rope_parameters"] = {kind: {**tables[kind], "partial_rotary_factor": turned} for kind in TYPES}
    if family == "step3p5":
        out["num_sliding_attention_heads"] = draw.choice([1, 2, 4]) * out["num_key_value_heads"]
        out |= {name: draw.choices([0.0, None, 0.1, 7.0], k=out["layers"]) for name in _LIMITS}
        turned = draw.choice([0.5, 1.0]) if out["head_dim"] % 4 == 0 else 1.0
        tables = {kind: scaling(draw, int(turned * out["head_dim"])) for kind in TYPES}
        # transformers fails with longrope where layers differ in heads.
        plain = {"rope_type": "default", "rope_theta": 1e4}
        tables = {kind: plain if table["rope_type"] == "longrope" else table for kind, table in tables.items()}
        out["rope_parameters"] = {kind: {**tables[kind], "partial_rotary_factor": turned} for kind in TYPES}
    if family == "deepseek_v4":
        rates = {kind: draw.choice([1, 2, 4, 8, 16, 64]) for kind in V4_KINDS[:2]}
        out |= {"layer_types": draw.choices(V4_KINDS, k=out["layers"]), "compress_rates": rates}
        out |= {"mlp_layer_types": draw.choices(["hash_moe", "moe"], k=out["layers"]), "num_key_value_heads": 1}
        out |= {"head_dim": 64, "partial_rotary_factor": 0.25, "moe_intermediate_size": out["intermediate_size"]}
        out["num_attention_heads"] = draw.choice([2, 4, 8])
        out["rope_parameters"] = scaling(draw, 16)
    if family in ("beam", "cohere_compass_text", "flint", "kolibri1", "step3p5"):
        out["layer_types"] = draw.choices(TYPES, k=out["layers"])
    if family in ("axk2", "beam", "hy_v4", "muse_spark_text", "step3p5"):
        out["mlp_layer_types"] = draw.choices(["dense", "sparse"], k=out["layers"])
    if family in ("glm_moe_dsa", "hy_v4", "mistral_large4_text"):
        out["indexer_types"] = ["full", *draw.choices(["full", "shared"], k=out["layers"] - 1)]
    if family == "inkling_text":
        out["layer_types"] = draw.choices(["hybrid", "hybrid_sliding"], k=out["layers"])
        out["mlp_layer_types"] = draw.choices(["dense", "sparse"], k=out["layers"])
        out["tie_word_embeddings"] = False
    if family == "bailing_hybrid":
        kinds = draw.choices(["linear_attention", "full_attention"], k=out["layers"])
        out |= {"layer_types": kinds, "tie_word_embeddings": False}
    if family == "kimi_linear":
        kinds = draw.choices(["linear_attention", "full_attention"], k=out["layers"])
        out |= {"layer_types": kinds, "tie_word_embeddings": False}
        if draw.random() < 0.3:
            numbers = {kind: [i + 1 for i, one in enumerate(kinds) if one == kind] for kind in kinds}
            lists = zip(("kda_layers", "full_attn_layers"), ("linear_attention", "full_attention"), strict=True)
            listed = {name: numbers.get(kind, []) for name, kind in lists}
            sizes = {"num_heads": draw.choice([1, 3]), "head_dim": draw.choice([5, 16])}
            out["linear_attn_config"] = {**listed, **sizes, "short_conv_kernel_size": draw.choice([2, 4])}
            out["layer_types"] = None
    if family == "olmo_hybrid":  # transformers wants layers of each type
        kinds = ["linear_attention", "full_attention", *draw.choices(["linear_attention", "full_attention"], k=2)]
        out["layers"] = draw.choice([2, 3, 4])
        kinds = kinds[: out["layers"]]
        draw.shuffle(kinds)
        out |= {"layer_types": kinds, "rope_parameters": scaling(draw, hidden // heads)}
    if family.startswith("gemma4_"):  # of few gates one may cancel, and the norm behind magnifies what that rounds
        out["intermediate_size"] = max(50, out["intermediate_size"])
    if family == "gemma4_text_e4b":
        layers, own = out["layers"], draw.choice([12, 33])
        before = layers - draw.randint(0, layers - 1)
        kinds = [*draw.choices(TYPES, k=before - 1), "full_attention"]  # of the last layer
        kinds = [*kinds, *draw.choices(kinds, k=layers - before - 1), "full_attention"][:layers]
        out |= {"layer_types": kinds, "num_kv_shared_layers": layers - before, "hidden_size_per_layer_input": own}
    if family == "gemma3n_text":
        # Of few gates above the cut one may be so near to it that the norm behind is one of its rounding.
        layers, shares = out["layers"], [0.0, 0.0, 0.05, 0.5, 0.8]
        before = layers - draw.randint(0, layers - 1)  # those that share have types of these
        kinds = draw.choices(TYPES, k=before)
        out |= {"layer_types": [*kinds, *kinds, *draw.choices(kinds, k=layers)][:layers]}
        out |= {"num_kv_shared_layers": layers - before, "altup_active_idx": 0}
        out |= {"activation_sparsity_pattern": draw.choices(shares, k=layers)}
        out |= {"rope_parameters": {kind: scaling(draw, out["head_dim"]) for kind in TYPES}, "pad_token_id": 0}
        if draw.random() < 0.5:
            out["intermediate_size"] = draw.choices([50, 96, 131], k=layers)
        else:
            out["intermediate_size"] = max(50, out["intermediate_size"])
        if draw.random() < 0.5:
            out |= {"altup_num_inputs": 3, "altup_active_idx": draw.randint(0, 2)}
    if family == "qwen4_exp_text":
        kinds = draw.choices(["linear_attention", "full_attention"], k=out["layers"])
        words = [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention" and draw.random() < 0.6]
        out |= {"layer_types": kinds, "ple_layer_ids": words, "hidden_act": "silu"}
        fraction = draw.choice([0.25, 0.5])
        table = scaling(draw, int(fraction * hidden // 2))
        out["rope_parameters"] = {**table, "partial_rotary_factor": fraction}
        rate = draw.choice([1, 2, 8, 32])
        out |= {"indexer_compress_ratio": rate, "indexer_budget": rate * draw.choice([1, 3, 9, 40])}
        out |= {"indexer_head_dim": draw.choice([hidden // 2, 80]), "ple_embed_dim": draw.choice([24, 48, 96])}
    if family == "jamba":
        period = draw.choice([1, 2, 4, 9])
        out |= {"attn_layer_period": period, "attn_layer_offset": draw.randrange(period)}
    if family == "minimax":
        out["layer_types"] = draw.choices(["linear_attention", "full_attention"], k=out["layers"])
    if family == "minimax_m3_vl_text":
        out |= {"head_dim": draw.choice([8, 16, 48]), "index_n_heads": out["num_key_value_heads"]}
        share = draw.choice([0.5, 1.0])
        out["rotary_dim"] = turned = int(share * out["head_dim"])
        out["rope_parameters"] = {**scaling(draw, turned), "partial_rotary_factor": share}
        out["index_head_dim"] = draw.choice([turned, turned + 9, 64])
        out |= {"layer_types": draw.choices(["full_attention", "minimax_m3_sparse"], k=out["layers"])}
        out |= {"mlp_layer_types": draw.choices(["dense", "sparse"], k=out["layers"])}
    if family == "falcon":
        out |= {"ffn_hidden_size": out["intermediate_size"], "num_kv_heads": out["num_key_value_heads"]}
        if draw.random() < 0.4:
            one = draw.random() < 0.5
            out |= {"new_decoder_architecture": False, "multi_query": one, "parallel_attn": draw.random() < 0.5}
            out["num_kv_heads"] = 1 if one else heads
    if family in ("falcon_mamba", "mamba", "mamba2"):
        out |= {"num_attention_heads": None, "num_key_value_heads": None}
    if family == "mamba2":
        heads = draw.choice([2, 4, 8])
        out |= {"num_heads": heads, "head_dim": 2 * hidden // heads, "intermediate_size": 2 * hidden}
        out["n_groups"] = draw.choice([1, 2, heads])
    if family in ("codegen", "gptj"):
        heads = draw.choice([4, 8])
        out |= {"num_attention_heads": heads, "n_inner": out["intermediate_size"]}
        out["rotary_dim"] = draw.choice([2, 4, 8])
    if family == "helium":
        out["head_dim"] = hidden // heads
    if family in (*_ONE_TABLE, *_LATENT) and family not in ("dots3_note_text", "kimi_linear"):  # two tables; none
        out["rope_parameters"] = scaling(draw, hidden // heads)
    if family in ("muse_glimmer_text", "muse_spark_text"):
        bases = draw.choices([0, out["rope_parameters"]["rope_theta"]], k=out["layers"])
        out |= {"layer_rope_theta": bases, "layer_types": draw.choices(TYPES, k=out["layers"])}
        out["tie_word_embeddings"] &= family == "muse_glimmer_text"
    if family in ("granite_swa", "granitemoe_swa"):
        out["layer_rope_theta"] = draw.choices([0, 1e3, 1e4], k=out["layers"])
    if family == "ministral3":
        out["rope_parameters"] |= {"llama_4_scaling_beta": draw.choice([0.0, 0.1, 1.5])}
        out["rope_parameters"].setdefault("original_max_position_embeddings", draw.choice([1, 8, 16, 64]))
    if family == "mistral4":  # without a scaling its class in transformers fails, as all columns of a head turn
        unscaled = out["rope_parameters"]["rope_type"] == "default"
        out["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0} if unscaled else {}
        out["rope_parameters"] |= {"original_max_position_embeddings": draw.choice([8, 16, 64])}
        out["rope_parameters"] |= {"llama_4_scaling_beta": draw.choice([0.1, 1.5])}
    return out | maybe(draw, OWN.get(family, {}))


def write_form(folder: Path, form: Options, seed: int) -> None:
    """A checkpoint whose config.json is `form`, with the tensors that transformers wants for it. Raises what it raises, and
    ValueError for a model that is too large for a draw or computes no numbers."""
    theirs = NAMED_ANEW.get(form["model_type"], form["model_type"])
    config = CONFIG_MAPPING[theirs].from_dict({**copy.deepcopy(form), "model_type": theirs})
    with torch.device("meta"):
        size = sum(tensor.numel() for tensor in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters are more than {MOST_PARAMETERS}")
    model = write_tiny(config, folder, seed=seed, dtype="fp32")
    model.set_experts_implementation("eager")  # the other wants widths of 16 bytes
    model.set_attn_implementation("eager")  # as the oracle's, which fails where key heads do not divide the others
    with torch.inference_mode():
        if not model(torch.arange(40)[None], use_cache=False).logits.isfinite().all():
            raise ValueError("logits are not finite")
    (folder / "config.json").write_text(json.dumps(form))


def outcome(form: Options, seed: int) -> tuple[str, str]:
    """("ok" | "refused" | "invalid" | "crash" | "wrong" | "bits" | "near" | "steep", details) of one configuration. bits: back
    ends differ; near: transformers' logits do, and rounding decides a choice of positions; steep: they do, and in float64
    transformers differs from itself as much."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        try:
            write_form(Path(folder), form, seed)
        except Exception as error:  # transformers refuses configurations with many kinds of errors
            return "invalid", f"{type(error).__name__}: {str(error).strip()[-200:]}"
        try:
            return compared(pair_in(Path(folder)), seed)
        except ModelError as error:
            return "refused", str(error)
        except Exception as error:
            return "crash", repr(error)


def compared(pair: Pair, seed: int) -> tuple[str, str]:
    """The outcome of a checkpoint that transformers and we compute."""
    count, wanted = min(8, pair.program.context // 2), 33
    if any(isinstance(op, Attention) and op.index for layer in pair.program.layers for op in layer.ops):
        wanted = 200  # more than two blocks
    length = min(wanted, pair.program.context - count)
    prompt = [(seed + 37 * i * i) % 256 for i in range(length)]
    ids, last = pair.greedy(prompt, count, chunk=5)
    theirs, ours = pair.theirs(ids), pair.ours(ids, pair.span.new_cache(len(ids)))
    draw = random.Random(seed)
    precision = draw.choice(["fp32", *precisions(pair.folder)])
    more = min(draw.choice([0, 60, 150, 300]), pair.program.context - len(ids))
    native, differs = on_all(pair.folder, precision, [*ids, *(draw.randrange(256) for _ in range(more))], draw)
    if differs:
        return "bits", f"{precision}: {differs}"
    largest = theirs.abs().max()
    worst = float(torch.maximum((ours - theirs).abs().max(), (last - ours[-1]).abs().max()) / largest)
    if precision == "fp32":
        worst = max(worst, float((torch.from_numpy(native[: len(ids)]) - theirs).abs().max() / largest))
    if worst >= TOLERANCE and pair.least_gap(ids) < NEAREST:
        return "near", f"{worst:.3g}"
    most = CHUNKED_TOLERANCE if isinstance(pair, NativePair) else TOLERANCE
    if most <= worst < STEEPEST and float((theirs - pair.exact(ids)).abs().max() / largest) > worst / 4:
        return "steep", f"{worst:.3g}"
    return ("ok" if worst < most else "wrong"), f"{worst:.3g}"


def main() -> int:
    """Draws --count configurations from --seed on. See the module's text."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--count", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--family", choices=EVERY_FAMILY)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    tally: Counter[str] = Counter()
    for number in range(given.seed, given.seed + given.count):
        draw = random.Random(number)
        family = (given.family or draw.choice(EVERY_FAMILY)).removesuffix("_shared")  # of which the others draw
        chosen = options(draw, family)
        form = config_of(family, chosen)
        form = form if draw.random() < 0.3 else rewritten(draw, form)
        kind, details = outcome(form, chosen["seed"])
        tally[kind] += 1
        if kind != "ok":
            shown = {"seed": number, "family": family, "outcome": kind, "details": details, "config": form}
            sys.stdout.write(json.dumps(shown) + "\n")
    sys.stdout.write(json.dumps({**tally, "back_ends": library.supported()}) + "\n")
    return 1 if tally["wrong"] or tally["bits"] or tally["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
