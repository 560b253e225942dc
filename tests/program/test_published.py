"""Fields of published configs that no recipe needs: served as they stand, refused where they ask for something else."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from manyhands.checkpoint.config_fields import parse_config
from manyhands.errors import ModelError
from manyhands.program.families import FAMILIES, build_program
from manyhands.program.families.slopes import bloom_slopes, mpt_slopes
from manyhands.program.fields import MOST_EXPERTS
from manyhands.program.ops import Attention, Experts, Program, Rope, Rotary
from manyhands.program.tensors import ends_tensors, layer_tensors
from manyhands.testing.tiny import NAMED_ANEW, tiny_config
from tests.engine.conftest import NATIVE

# Fields of published configs that transformers does not read, as they stand there: they say what is computed anyway.
SPOKEN: dict[str, dict[str, Any]] = {
    "cohere2": {  # Command R7B, Command A
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
        "_sliding_window_pattern": 4,
    },
    "afmoe": {  # Trinity
        "load_balance_coeff": 0.001,
        "n_group": 1,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "route_norm": True,
        "score_func": "sigmoid",
        "topk_group": 1,
        "use_grouped_mm": True,
    },
    "apertus": {"hidden_dropout": 0.0, "mlp_bias": False, "post_norm": False, "qk_norm": True},
    "axk1": {  # A.X-K1
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "axk2": {  # A.X-K2-Light
        "attention_output_gate": True,
        "first_k_dense_replace": 1,
        "gated_norm": True,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "bailing_hybrid": {  # Ling-3.0-tiny, Ling-3.0-flash
        "expert_swiglu_limit_list": [0, 0, 0],
        "gated_attention_proj_granularity_type": "head_wise",
        "group_norm_size": 1,
        "linear_silu": True,
        "max_window_layers": 20,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 32,
        "mtp_loss_scaling_factor": 0,
        "mtp_use_kda": False,
        "no_kda_lora": True,
        "num_kv_heads_for_linear_attn": 0,
        "output_dropout": 0.0,
        "partial_rotary_factor": 0.5,
        "rope_interleave": True,
        "rotary_dim": 8,
        "router_dtype": "fp32",
        "scale_router_input": False,
        "score_function": "sigmoid",
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "share_expert_swiglu_limit_list": None,
        "topk_method": "noaux_tc",
        "up_proj_norm": False,
        "use_bias": False,
        "use_kda_lora": False,
        "use_mla_nope": False,
        "use_nGPT": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "value_norm": False,
    },
    "hy_v4": {  # Hy4-preview
        "enable_ihc": True,
        "enable_lm_head_fp32": True,
        "gated_mla": True,
        "gating_type": "elementwise",
        "head_dim": 64,
        "layer_types": ["deepseek_sparse_attention"] * 3,
        "learnable_sink": True,
        "mtp_loss_factor": 0.1,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "use_dsa": True,
        "use_mla": True,
    },
    "kimi_linear": {  # Kimi-Linear-48B-A3B
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "head_dim": 20,
            "kda_layers": [1, 3],
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    },
    "longcat_flash": {  # LongCat-Flash-Chat
        "attention_method": "MLA",
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "num_hidden_layers": 6,
        "router_bias": False,
        "zero_expert_type": "identity",
    },
    "olmo": {"clip_qkv": None, "pretraining_tp": 1},
    "olmo_hybrid": {"linear_a_log_max": 1.0, "linear_dt_min": 0.1, "rope_theta": None},
    "bamba": {"attn_rotary_emb": 8, "mamba_d_head": 16, "z_loss_coefficient": 0.0, "partial_rotary_factor": 0.5},
    "exaone_moe": {  # K-EXAONE
        "is_moe_layer": [False, True, True],
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "sliding_window_pattern": "LLLG",
        "topk_method": "noaux_tc",
    },
    "cohere": {"model_max_length": 131072},  # Command R
    "mamba": {  # mamba-130m-hf
        "d_inner": 96,
        "d_model": 64,
        "fused_add_norm": True,
        "n_layer": 3,
        "pad_vocab_size_multiple": 8,
        "rms_norm": True,
        "ssm_cfg": {},
    },
    "mamba2": {"norm_before_gate": True, "rms_norm": True},  # Mamba-Codestral
    "internlm3": {"attention_bias": True, "mlp_bias": True},
    "jamba": {"num_logits_to_keep": 1, "sliding_window": None, "use_mamba_kernels": True},  # Jamba Mini and Large
    "iquestcoder": {"clip_qkv": None, "max_window_layers": 80, "sliding_window": None, "use_sliding_window": False},
    "minimax_m3_vl_text": {  # MiniMax-M3
        "attention_output_gate": False,
        "hidden_act": "swigluoai",
        "moe_layer_freq": [0, 1, 1],
        "n_shared_experts": 1,
        "num_mtp_modules": 7,
        "qk_norm_type": "per_head",
        "scoring_func": "sigmoid",
        "sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 1],
            "sparse_block_size": 64,
            "sparse_disable_index_value": [0, 1, 1],
            "sparse_index_dim": 40,
            "sparse_init_block": 0,
            "sparse_local_block": 0,
            "sparse_num_index_heads": 2,
            "sparse_score_type": "max",
            "sparse_topk_blocks": 1,
            "use_sparse_attention": True,
        },
        "swiglu_beta": 1.0,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "mellum": {
        "mtp_layer_types": ["sliding_attention"],
        "mtp_mlp_layer_types": ["sparse"],
        "num_nextn_predict_layers": 1,
    },
    "falcon_h1": {"attn_layer_indices": None, "mamba_d_head": 12, "mamba_use_mlp": True, "mlp_expansion_factor": 8},
    "gemma2": {"sliding_window_size": 24},  # Gemma 2 9B and 27B
    "gemma3n_text": {  # Gemma 3n E2B and E4B
        "altup_coef_clip": 120.0,
        "altup_lr_multiplier": 1.0,
        "query_pre_attn_scalar": 256,
        "rope_scaling": None,
    },
    "gemma4_text": {  # Gemma 4 26B-A4B
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma4_unified_text": {  # Gemma 4 12B
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 262144,
    },
    "glm4_moe_lite": {  # GLM-4.7-Flash
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "topk_method": "noaux_tc",
    },
    "gpt_neox": {  # GPT-NeoX-20B, h2oGPT
        "attention_probs_dropout_prob": 0,
        "hidden_dropout_prob": 0,
        "custom_pipelines": {"text-generation": {"impl": "h2oai_pipeline.H2OTextGenerationPipeline"}},
    },
    "granitemoehybrid": {  # Granite 4.0 micro
        "init_method": "mup",
        "normalization_function": "rmsnorm",
        "num_experts_per_tok": 0,
        "mamba_d_head": 64,
    },
    "hy_v3": {
        "enable_moe_fp32_combine": True,
        "expert_hidden_dim": 32,
        "first_k_dense_replace": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "num_nextn_predict_layers": 1,
        "qk_norm": True,
        "route_norm": True,
    },
    "mimo_v2_flash": {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_chunk_size": 23,
        "hybrid_layer_pattern": [0, 1, 1],
        "layernorm_epsilon": 1e-5,
        "moe_layer_freq": [0, 1, 1],
        "partial_rotary_factor": 0.334,
        "rope_theta": 5000000,
        "scoring_func": "sigmoid",
        "sliding_window_size": 23,
        "swa_head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 10000,
        "swa_v_head_dim": 16,
        "topk_method": "noaux_tc",
    },
    "solar_open": {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "use_qk_norm": False},
    "llama": {  # SmolLM2
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    },
    "llama4_text": {"attn_temperature_tuning": 4, "for_llm_compressor": False},
    "nemotron_h": {  # Nemotron-H 8B, Nemotron Nano 9B v2, Nemotron 3 Nano
        "attention_head_dim": 32,
        "mamba_num_groups": 2,
        "norm_eps": 1e-5,
        "num_query_groups": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "time_step_limit": [0.0, math.inf],
        "time_step_min": 0.001,
    },
    "phimoe": {"hidden_dropout": 0.0, "input_jitter_noise": 0.01},  # Phi-3.5-MoE
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},  # Phi-4-mini
    "qwen2": {"use_mrope": False},  # Qwen2.5-0.5B, DeepSeek-R1-Distill-Qwen
    "qwen3_moe": {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},  # Qwen3-Coder
    "qwen3_5_text": {  # Qwen3.5-0.8B to 27B
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish",
    },
    "qwen4_exp_text": {  # Qwen3.8-Flash-Next
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "mtp": {"hybrid": True, "layer_types": ["full_attention"], "num_hidden_layers": 1},
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    },
    "lfm2": {"tie_embedding": True, "conv_dim_out": 64, "num_heads": 4},
    "laguna": {  # Laguna XS.2
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "moe_router_logit_softcapping": 0.0,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "qkv_bias": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 4096,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        "swa_attention_sink_enabled": False,
    },
    "lfm3": {"rms_norm_eps": 1e-5},  # which transformers also calls norm_eps
    "qwen3_next": {"full_attention_interval": 4, "use_sliding_window": False},
    "smollm3": {"max_window_layers": 28},
    "falcon": {"apply_residual_connection_post_layernorm": False, "ff_factor": 4},
    "bloom": {  # BLOOM-560M
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "n_inner": None,
        "offset_alibi": 100,
        "pretraining_tp": 1,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "slow_but_exact": False,
        "gradient_checkpointing": True,  # left there by training
        "unk_token_id": 0,
    },
    "mpt": {  # MPT-7B
        "emb_pdrop": 0,
        "embedding_fraction": 1.0,
        "expansion_ratio": 4,
        "init_config": {"name": "kaiming_normal_", "verbose": 0},
        "init_device": "cpu",
        "learned_pos_emb": True,
        "logit_scale": None,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "fc_type": "torch",  # this and the next of later versions, as PhoGPT-4B
        "ffn_config": {"ffn_type": "mptmlp", "fc_type": "torch"},
        "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "verbose": 0,
    },
    "gpt2": {  # GPT-2, of which -medium, -xl and DistilGPT2 have fields of their own
        "_num_labels": 1,
        "n_special": 0,
        "output_past": True,
        "predict_special_tokens": True,
        "n_ctx": 1024,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
    },
    "gpt_bigcode": {  # StarCoder
        "inference_runner": 0,
        "max_batch_size": None,
        "max_sequence_length": None,
        "pad_key_length": True,
        "pre_allocate_kv_cache": False,
        "validate_runner_input": True,
    },
    "gpt_neo": {"attention_layers": ["global", "local", "global"], "gradient_checkpointing": False},  # GPT-Neo
    "opt": {  # OPT-6.7B, Galactica
        "_remove_final_layer_norm": False,
        "activation_dropout": 0.0,
        "layerdrop": 0.0,
        "learned_embeddings": True,
        "scale_embeddings": False,
        "output_projection": True,  # OPT-13B
        "prefix": "</s>",
    },
    "biogpt": {"type_vocab_size": 2},
    "gptj": {  # GPT-J-6B
        "gradient_checkpointing": False,
        "n_ctx": 2048,
        "rotary": True,
        "scale_attn_weights": True,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
    },
    "stablelm": {"num_heads": 4, "rotary_scaling_factor": 1.0},
    "starcoder2": {
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": 1e-05,
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    },
}


# Whole configs as they are on the hub (but those of Gemma 4 E2B and E4B, put together from public code), with the billions
# of parameters that it says of them (without layers that only guess; of multimodal models those of the text part, as
# transformers counts them).
WHOLE: list[dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())


def tiny(family: str) -> dict[str, Any]:
    """The config.json of a tiny model."""
    config: dict[str, Any] = json.loads(tiny_config(family, layers=3, context=512).to_json_string())
    return config


@pytest.mark.parametrize("published", WHOLE, ids=lambda published: str(published["model"]))
def test_a_published_config_has_the_published_number_of_parameters(published: dict[str, Any]) -> None:
    config = {name: value for name, value in published.items() if name not in ("model", "parameters")}
    program = build_program(parse_config(json.dumps(config).encode()))
    assert billions(program) == pytest.approx(published["parameters"], rel=1e-3)
    assert program.context == {**config, **config.get("text_config", {})}["max_position_embeddings"]


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_bitnet_2b_has_the_parameters_that_its_publisher_says(mode: str) -> None:
    """2.4 billion; its config is put together from public code."""
    stored = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": mode}
    sizes = {"rope_theta": 500000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    config = {**CONFIG_MAPPING["bitnet"]().to_dict(), **sizes, "quantization_config": stored}
    del config["rope_parameters"]
    assert billions(build_program(config)) == pytest.approx(2.4, rel=0.01)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        ({"model_type": "mamba", "num_hidden_layers": 24}, 0.129),  # mamba-130m-hf
        (  # Falcon-Mamba-7B, whose intermediate_size is not expand * hidden_size
            {"model_type": "falcon_mamba", "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 65024}
            | {"expand": 16, "intermediate_size": 8192, "time_step_rank": 256, "tie_word_embeddings": False},
            7.27,
        ),
    ],
)
def test_models_of_mamba_have_the_parameters_that_their_publishers_say(
    config: dict[str, Any], published: float
) -> None:
    program = build_program({"hidden_size": 768, "vocab_size": 50280, **config})
    assert billions(program) == pytest.approx(published, rel=0.005)
    assert program.context == 1 << 20


def billions(program: Program) -> float:
    """Parameters of a model, without what only guesses."""
    shapes = ends_tensors(program, embed=True, head=True)
    for layer in program.layers:
        shapes |= layer_tensors(layer)
    return sum(map(math.prod, shapes.values())) / 1e9


# Families whose defaults in transformers are those of a checkpoint, with the billions that its name or publisher says.
@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("axk1", 519),  # A.X-K1
        ("falcon", 7),  # Falcon-7B
        ("gptj", 6.05),  # GPT-J-6B
        ("mpt", 1.31),  # MPT-1B, as far as its defaults go
        ("gpt2", 0.124),  # GPT-2, the smallest
        ("gpt_neo", 1.316),  # GPT-Neo-1.3B
        ("opt", 0.125),  # OPT-125M
        ("biogpt", 0.347),  # BioGPT
        ("mamba2", 7.29),  # Mamba-Codestral-7B
        ("beam", 501),  # Beam-1.0-501B-A23B
        ("bailing_hybrid", 124),  # Ling-3.0-flash
        ("deepseek_v4", 284),  # DeepSeek-V4-Flash
        ("gemma3n_text", 6.87),  # the text part of gemma-3n-E4B, with keys of layers that share those of others
        ("kimi_linear", 48),  # Kimi-Linear-48B-A3B
        ("laguna", 33),  # Laguna-XS.2
        ("jamba", 52),  # Jamba-v0.1, Jamba-1.5-Mini
        ("lfm3", 1.7),  # LFM3-1.7B
        ("iquestcoder", 40),  # IQuest-Coder-V1-40B
        ("jais2", 8),  # Jais-2-8B
        ("llama4_text", 109),  # Llama-4-Scout-17B-16E, with its tower
        ("mellum", 12),  # Mellum2-12B-A2.5B
        ("mimo_v2_flash", 309),  # MiMo-V2-Flash
        ("longcat_flash", 560),  # LongCat-Flash-Chat
        ("mistral4", 119),  # Mistral-Small-4-119B
        ("mistral_large4_text", 1050),  # Mistral-Large-4-1T-A52B, without its tower
        ("muse_glimmer_text", 28.1),  # Muse-Glimmer-30B without its tower of 1.9
        ("muse_spark_text", 816),  # Muse-Spark-Open-816B-A42B
        ("phimoe", 42),  # Phi-3.5-MoE
        ("solar_open", 100),  # Solar-Open-100B
        ("step3p5", 196),  # Step-3.5-Flash, which has more heads in layers with a window
    ],
)
def test_the_defaults_of_a_family_have_the_published_number_of_parameters(family: str, published: float) -> None:
    config = json.loads(CONFIG_MAPPING[family]().to_json_string())
    assert billions(build_program(config)) == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("family", SPOKEN)
def test_a_published_field_that_says_what_is_computed_anyway_changes_nothing(family: str) -> None:
    config = {**tiny(family), "sliding_window_pattern": 4} if family == "cohere2" else tiny(family)
    assert build_program({**config, **SPOKEN[family]}) == build_program(config)


@pytest.mark.parametrize("inner", [{"num_attention_groups": 1}, {"head_dim": 16}, {"sinks": True}])
def test_layers_with_a_window_that_differ_in_more_than_heads_are_refused(inner: dict[str, Any]) -> None:
    name, value = next(iter(inner.items()))
    with pytest.raises(ModelError, match=f"attention_other_setting: {name} is {value!r}"):
        build_program({**tiny("step3p5"), "attention_other_setting": inner})


@pytest.mark.parametrize("numbers", ["9" * 5000, [[1]], 7])  # Python makes no whole number of the first
def test_numbers_of_layers_that_are_none_are_refused(numbers: object) -> None:
    with pytest.raises(
        ModelError, match=r"moe_layers_enum is .*, numbers of layers are needed, with commas between them"
    ):
        build_program({**tiny("step3p5"), "moe_layers_enum": numbers})


@pytest.mark.parametrize("name", ["kda_layers", "full_attn_layers"])
def test_a_list_of_layers_of_kimi_linear_is_read_with_the_other_alone(name: str) -> None:
    """Its class in transformers computes the default of both where one is missing."""
    plain = {field: value for field, value in tiny("kimi_linear").items() if field != "layer_types"}
    both = {"kda_layers": [], "full_attn_layers": [], name: [1, 2, 3]}
    assert build_program({**plain, "linear_attn_config": both}).layers
    with pytest.raises(ModelError, match="each layer from 1 to 3 once is needed"):
        build_program({**plain, "linear_attn_config": {name: [1, 2, 3]}})


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_windows_of_no_length_are_none(family: str) -> None:
    plain = {name: value for name, value in tiny(family).items() if name not in ("layer_types", "max_window_layers")}
    first = {} if family == "qwen3_moe" else {"max_window_layers": 1}
    wanted = {**plain, "use_sliding_window": True, **first}
    without = build_program({**plain, "use_sliding_window": False, "sliding_window": None})
    assert (
        build_program({**wanted, "sliding_window": None}) == without != build_program({**wanted, "sliding_window": 8})
    )


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("glm4_moe_lite", "first_k_dense_replace", 2),
        ("glm4_moe_lite", "head_dim", 32),
        ("gemma3n_text", "activation_sparsity_pattern", [0.5, 0.0]),
        ("gemma3n_text", "activation_sparsity_pattern", [0.5, 0.0, 1.0]),
        ("gemma3n_text", "activation_sparsity_pattern", [0.5, 0.0, -0.5]),
        ("gemma3n_text", "activation_sparsity_pattern", [0.5, 0.0, 0.99999]),
        ("gemma3n_text", "activation_sparsity_pattern", [0.5, 0.0, True]),
        ("gemma3n_text", "activation_sparsity_pattern", [0.5, 0.0, math.nan]),
        ("gemma3n_text", "activation_sparsity_pattern", 0.95),
        ("gemma3n_text", "altup_active_idx", 4),
        ("gemma3n_text", "altup_num_inputs", 0),
        ("gemma3n_text", "altup_num_inputs", 65),
        ("gemma3n_text", "hidden_activation", "xielu"),
        ("gemma3n_text", "hidden_size_per_layer_input", 0),
        ("gemma3n_text", "hidden_size_per_layer_input", 1 << 16),
        ("gemma3n_text", "intermediate_size", [64, 64]),
        ("gemma3n_text", "intermediate_size", [64, 64, 0]),
        ("gemma3n_text", "intermediate_size", [64, 64, "64"]),
        ("gemma3n_text", "laurel_rank", 0),
        ("gemma3n_text", "num_key_value_heads", 3),
        ("gemma3n_text", "num_kv_shared_layers", 2),
        ("gemma3n_text", "num_kv_shared_layers", 3),
        ("gemma3n_text", "num_kv_shared_layers", -1),
        ("gemma3n_text", "use_bidirectional_attention", True),
        ("gemma3n_text", "vocab_size_per_layer_input", 0),
        ("gemma4_text", "use_bidirectional_attention", "all"),
        ("gemma4_text", "num_kv_shared_layers", 2),
        ("gemma4_text_e4b", "hidden_size_per_layer_input", 1 << 16),
        ("gemma4_text_e4b", "hidden_size_per_layer_input", -1),
        ("gemma4_text_e4b", "num_kv_shared_layers", 2),
        ("gemma4_text_e4b", "num_kv_shared_layers", 3),
        ("gemma4_text_e4b", "use_double_wide_mlp", 1),
        ("gemma4_text_e4b", "vocab_size_per_layer_input", 263),
        ("gemma4_unified_text", "enable_moe_block", True),
        ("gemma4_unified_text", "hidden_size_per_layer_input", 8),
        ("gemma4_unified_text", "num_kv_shared_layers", 1),
        ("gemma4_unified_text", "per_layer_config", {"0": {"head_dim": 8}}),
        ("gemma4_unified_text", "use_bidirectional_attention", "all"),
        ("granitemoehybrid", "normalization_function", "layernorm"),
        ("cohere2", "layer_switch", 3),
        ("cohere2", "order_of_interleaved_layers", "global_attn_first"),
        ("cohere2", "use_embedding_sharing", False),
        ("cohere2", "use_parallel_block", False),
        ("deepseek_v32", "first_k_dense_replace", -1),
        ("deepseek_v32", "index_head_dim", 7),
        ("deepseek_v32", "index_topk", 0),
        ("deepseek_v32", "indexer_rope_interleave", True),
        ("deepseek_v32", "indexer_types", ["full"] * 3),
        ("deepseek_v32", "layer_types", ["full_attention"] * 3),
        ("deepseek_v32", "moe_router_dtype", "bfloat16"),
        ("deepseek_v32", "q_lora_rank", None),
        ("deepseek_v32", "rope_interleave", False),
        ("deepseek_v4", "attention_bias", True),
        ("deepseek_v4", "compress_rate_hca", 0),
        ("deepseek_v4", "compress_rates", {"heavily_compressed_attention": 4}),
        ("deepseek_v4", "compress_rates", [4, 128]),
        ("deepseek_v4", "compress_rates", {"full": 4}),
        ("deepseek_v4", "compress_rope_theta", "fast"),
        ("deepseek_v4", "hc_mult", 9),
        ("deepseek_v4", "hc_mult", 0),
        ("deepseek_v4", "hc_eps", -1.0),
        ("deepseek_v4", "hc_sinkhorn_iters", 0),
        ("deepseek_v4", "head_dim", 0),
        ("deepseek_v4", "hidden_act", "mish"),
        ("deepseek_v4", "index_head_dim", 7),
        ("deepseek_v4", "index_n_heads", 0),
        ("deepseek_v4", "index_topk", 0),
        ("deepseek_v4", "intermediate_size", 33),
        ("deepseek_v4", "layer_types", ["sliding_attention"] * 2),
        ("deepseek_v4", "layer_types", ["full_attention"] * 3),
        ("deepseek_v4", "mlp_bias", True),
        ("deepseek_v4", "mlp_layer_types", ["sparse"] * 3),
        ("deepseek_v4", "n_routed_experts", 1025),
        ("deepseek_v4", "n_shared_experts", 2),
        ("deepseek_v4", "norm_topk_prob", False),
        ("deepseek_v4", "num_experts_per_tok", 9),
        ("deepseek_v4", "num_hash_layers", -1),
        ("deepseek_v4", "num_key_value_heads", 2),
        ("deepseek_v4", "num_local_experts", 7),
        ("deepseek_v4", "o_groups", 3),
        ("deepseek_v4", "o_lora_rank", 0),
        ("deepseek_v4", "partial_rotary_factor", "half"),
        ("deepseek_v4", "q_lora_rank", 1.5),
        ("deepseek_v4", "qk_rope_head_dim", 6),
        ("deepseek_v4", "rope_parameters", [1]),
        ("deepseek_v4", "rope_theta", 0),
        ("deepseek_v4", "scoring_func", "softmax"),
        ("deepseek_v4", "sliding_window", 0),
        ("deepseek_v4", "swiglu_limit", 0.0),
        ("deepseek_v4", "topk_method", "greedy"),
        ("deepseek_v4", "window_kind", "wide"),
        ("glm_moe_dsa", "index_topk_pattern", "FFX"),
        ("glm_moe_dsa", "index_topk_pattern", "FF"),
        ("glm_moe_dsa", "index_topk_pattern", {"0": "F"}),
        ("glm_moe_dsa", "indexer_rope_interleave", False),
        ("glm_moe_dsa", "indexer_types", ["full", "shared", "none"]),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("dots1", "scoring_func", "softmax"),
        ("ernie4_5_moe", "moe_use_aux_free", False),
        ("ernie4_5_moe", "use_bias", True),
        ("afmoe", "num_expert_groups", 2),
        ("afmoe", "score_func", "softmax"),
        ("bitnet", "head_dim", 32),
        ("codegen", "n_head", 2),
        ("falcon", "alibi", True),
        ("falcon", "num_kv_heads", 3),
        ("falcon", "num_ln_in_parallel_attn", 3),
        ("falcon", "parallel_attn", False),
        ("bloom", "apply_residual_connection_post_layernorm", True),
        ("bloom", "hidden_size", 65),
        ("bloom", "n_inner", 100),
        ("mpt", "ffn_config", {"ffn_type": "mptgeglu"}),
        ("mpt", "norm_type", "rmsnorm"),
        ("opt", "scale_embeddings", True),
        ("mpt", "d_model", 65),
        ("mpt", "expansion_ratio", 2),
        ("mpt", "logit_scale", 0.5),
        ("mpt", "no_bias", False),
        ("mpt", "attn_config", [1]),
        ("gpt2", "n_embd", 66),
        ("gpt2", "rope_theta", 1e4),
        ("gpt_bigcode", "n_embd", 66),
        ("gpt_neo", "attention_layers", ["global", "local", "local"]),
        ("gpt_neo", "attention_types", [[["global", "local"], 1]]),
        ("gpt_neo", "attention_types", [[["global"], 1 << 40]]),
        ("gpt_neo", "attention_types", [[["global", "local", "local"], 3]]),
        ("gpt_neo", "attention_types", [[["sliding"], 3]]),
        ("gpt_neo", "attention_types", [["global", 3]]),
        ("gpt_neo", "attention_types", "global"),
        ("opt", "_remove_final_layer_norm", True),
        ("opt", "do_layer_norm_before", False),
        ("opt", "word_embed_proj_dim", 32),
        ("gptj", "n_embd", 65),
        ("gptj", "rope_theta", 1e6),
        ("gptj", "rotary_dim", 7),
        ("gptj", "rotary_dim", 18),
        ("bitnet", "mlp_bias", True),
        ("mamba", "d_model", 65),
        ("mamba", "hidden_act", "gelu"),
        ("mamba", "rms_norm", False),
        ("mamba", "ssm_cfg", {"layer": "Mamba2"}),
        ("mamba", "state_size", 0),
        ("mamba", "time_step_rank", "half"),
        ("mamba2", "expand", 3),
        ("mamba2", "intermediate_size", 100),
        ("mamba2", "n_groups", 3),
        ("mamba2", "time_step_limit", [0.001, 0.1]),
        ("cohere", "use_qk_norm", 1),
        ("cohere2_moe", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("cohere2_moe", "expert_selection_fn", "tanh"),
        ("cohere2_moe", "shared_expert_combination_strategy", "product"),
        ("cohere2_moe", "use_parallel_block", False),
        ("cohere2_moe", "first_k_dense_replace", 4),
        ("granite_swa", "layer_rope_theta", [0, 1e4]),
        ("granite_swa", "layer_rope_theta", [0, 1e4, 0.5]),
        ("internlm3", "bias", False),
        ("jamba", "attn_layer_offset", 3),
        ("jamba", "attn_layer_period", 0),
        ("jamba", "expert_layer_offset", 2),
        ("jamba", "mamba_d_conv", 33),
        ("jamba", "mamba_d_state", 0),
        ("jamba", "mamba_dt_rank", "half"),
        ("jamba", "mamba_expand", 0),
        ("jamba", "num_experts_per_tok", 5),
        ("jamba", "sliding_window", 64),
        ("iquestcoder", "clip_qkv", 8.0),
        ("iquestcoder", "use_sliding_window", True),
        ("mellum", "rope_theta", 1000.0),
        ("exaone_moe", "is_moe_layer", [True, True, True]),
        ("exaone_moe", "scoring_func", "softmax"),
        ("hy_v3", "expert_hidden_dim", 16),
        ("hy_v3", "first_k_dense_replace", 2),
        ("hy_v3", "qk_norm", False),
        ("hy_v4", "enable_ihc", False),
        ("hy_v4", "gating_type", "headwise"),
        ("hy_v4", "hc_mult", 9),
        ("hy_v4", "hidden_act", "gelu"),
        ("hy_v4", "index_head_dim", 7),
        ("hy_v4", "indexer_types", ["shared", "full", "full"]),
        ("hy_v4", "indexer_types", ["full"]),
        ("hy_v4", "layer_types", ["full_attention"] * 3),
        ("hy_v4", "learnable_sink", False),
        ("hy_v4", "q_lora_rank", None),
        ("hy_v4", "swiglu_limit", 0.0),
        ("bailing_hybrid", "architectures", ["BailingMoeV2_5ForCausalLM"]),
        ("bailing_hybrid", "expert_swiglu_limit_list", [0, 4.0]),
        ("bailing_hybrid", "expert_swiglu_limit_list", [0, 0, -4.0]),
        ("bailing_hybrid", "expert_swiglu_limit_list", 4.0),
        ("bailing_hybrid", "gated_attention_proj_granularity_type", "element_wise"),
        ("bailing_hybrid", "kda_lower_bound", 0.0),
        ("bailing_hybrid", "linear_attention", "gla"),
        ("bailing_hybrid", "linear_conv_kernel_dim", None),
        ("bailing_hybrid", "linear_head_dim", None),
        ("bailing_hybrid", "linear_num_heads", None),
        ("bailing_hybrid", "moe_shared_expert_intermediate_size", 33),
        ("bailing_hybrid", "no_kda_lora", False),
        ("bailing_hybrid", "num_key_value_heads", 2),
        ("bailing_hybrid", "rotary_dim", 16),
        ("bailing_hybrid", "share_expert_swiglu_limit_list", [5.0]),
        ("bailing_hybrid", "share_expert_swiglu_limit_list", [5.0, 0, 0]),
        ("bailing_hybrid", "short_conv_kernel_size", 33),
        ("bailing_hybrid", "tie_word_embeddings", True),
        ("mimo_v2_flash", "add_full_attention_sink_bias", True),
        ("mimo_v2_flash", "attention_chunk_size", 8),
        ("mimo_v2_flash", "hybrid_layer_pattern", [0, 2, 1]),
        ("mimo_v2_flash", "layernorm_epsilon", 1e-6),
        ("mimo_v2_flash", "n_shared_experts", 1),
        ("mimo_v2_flash", "num_key_value_heads", 4),
        ("mimo_v2_flash", "rope_parameters", {"full_attention": {"rope_type": "linear", "factor": 2.0}}),
        ("mimo_v2_flash", "swa_num_key_value_heads", 1),
        ("mimo_v2_flash", "swa_rope_theta", 1000),
        ("qwen4_exp_text", "attn_output_gate", False),
        ("qwen4_exp_text", "eos_token_id", None),
        ("qwen4_exp_text", "eos_token_id", 264),
        ("qwen4_exp_text", "hc_count", 1),
        ("qwen4_exp_text", "hc_count", 9),
        ("qwen4_exp_text", "hc_lowrank", 0),
        ("qwen4_exp_text", "heads_per_ngram", 33),
        ("qwen4_exp_text", "heads_per_ngram", 0),
        ("qwen4_exp_text", "indexer_budget", 18),
        ("qwen4_exp_text", "indexer_budget", None),
        ("qwen4_exp_text", "indexer_compress_ratio", 3),
        ("qwen4_exp_text", "indexer_head_dim", 4),
        ("qwen4_exp_text", "indexer_kv_heads", 2),
        ("qwen4_exp_text", "indexer_n_heads", 0),
        ("qwen4_exp_text", "layer_types", ["sliding_attention"] * 3),
        ("qwen4_exp_text", "make_ngram_vocab_size_divisible_by", 0),
        ("qwen4_exp_text", "mamba_ssm_dtype", "bfloat16"),
        ("qwen4_exp_text", "ngram_size", 1),
        ("qwen4_exp_text", "ngram_size", 6),
        ("qwen4_exp_text", "ngram_vocab_size_base", 1),
        ("qwen4_exp_text", "output_gate_type", "gelu"),
        ("qwen4_exp_text", "ple_conv_kernel_size", 12),
        ("qwen4_exp_text", "ple_embed_dim", 33),
        ("qwen4_exp_text", "ple_layer_ids", [2]),
        ("qwen4_exp_text", "ple_layer_ids", [0]),
        ("qwen4_exp_text", "ple_layer_ids", [4]),
        ("qwen4_exp_text", "ple_layer_ids", 1),
        ("qwen4_exp_text", "seed", -1),
        ("qwen4_exp_text", "split_ngram_parts", 7),
        ("kimi_linear", "kda_layers", [1, 2]),
        ("kimi_linear", "layer_types", ["sliding_attention"] * 3),
        ("kimi_linear", "linear_attn_config", [1]),
        ("kimi_linear", "mla_use_nope", False),
        ("kimi_linear", "mlp_layer_types", ["dense", "sparse"]),
        ("kimi_linear", "moe_router_activation_func", "softmax"),
        ("kimi_linear", "num_expert_group", 3),
        ("kimi_linear", "num_key_value_heads", 2),
        ("kimi_linear", "tie_word_embeddings", True),
        ("kimi_linear", "use_grouped_topk", False),
        ("llama4_text", "attention_chunk_size", 0),
        ("llama4_text", "attn_scale", -0.1),
        ("llama4_text", "attn_temperature_tuning", 2),
        ("llama4_text", "floor_scale", 0),
        ("llama4_text", "layer_types", ["sliding_attention"] * 3),
        ("llama4_text", "moe_layers", "all"),
        ("llama4_text", "no_rope_layers", [1, 0]),
        ("longcat_flash", "attention_method", "GQA"),
        ("longcat_flash", "ffn_hidden_size", 0),
        ("longcat_flash", "head_dim", 16),
        ("longcat_flash", "mla_scale_q_lora", False),
        ("longcat_flash", "moe_topk", 13),
        ("longcat_flash", "ngram_vocab_size_ratio", 78),  # LongCat-Flash-Lite
        ("longcat_flash", "num_hidden_layers", 3),
        ("longcat_flash", "num_layers", None),
        ("longcat_flash", "q_lora_rank", None),
        ("longcat_flash", "router_bias", True),
        ("longcat_flash", "zero_expert_num", 1024),
        ("longcat_flash", "zero_expert_type", "zero"),
        ("mistral4", "n_group", 2),
        ("mistral_large4_text", "final_logit_softcapping", 0.0),
        ("mistral_large4_text", "index_head_dim", 7),
        ("mistral_large4_text", "index_topk", 0),
        ("mistral_large4_text", "index_topk_pattern", "FF"),
        ("mistral_large4_text", "indexer_types", ["shared", "full", "full"]),
        ("mistral_large4_text", "kv_source_layers", [0, 0, 2]),
        ("mistral_large4_text", "kv_source_layers", [0, 1]),
        ("mistral_large4_text", "layer_types", ["full_attention"] * 3),
        ("mistral_large4_text", "n_group", 2),
        ("mistral_large4_text", "n_routed_experts", 1),
        ("mistral_large4_text", "no_rope_layer_interval", 0),
        ("mistral_large4_text", "no_rope_layers", [1, 1]),
        ("mistral_large4_text", "norm_topk_prob", False),
        ("mistral_large4_text", "num_experts", 4),
        ("mistral_large4_text", "num_key_value_heads", 2),
        ("mistral_large4_text", "q_lora_rank", 32),
        ("mistral_large4_text", "topk_group", 2),
        ("solar_open", "first_k_dense_replace", 1),
        ("solar_open", "use_qk_norm", True),
        ("apertus", "hidden_act", "silu"),
        ("apertus", "mlp_bias", True),
        ("apertus", "post_norm", True),
        ("apertus", "qk_norm", False),
        ("axk1", "mlp_layer_types", ["dense", "sparse"]),
        ("axk1", "moe_layer_freq", 0),
        ("axk1", "q_lora_rank", None),
        ("axk1", "scoring_func", "softmax"),
        ("axk1", "topk_method", "greedy"),
        ("axk2", "attention_output_gate", False),
        ("axk2", "gated_norm", False),
        ("axk2", "gated_norm_rank", 0),
        ("axk2", "index_head_dim", 7),
        ("axk2", "layer_types", ["full_attention"] * 3),
        ("axk2", "n_group", 2),
        ("axk2", "n_group", 3),
        ("axk2", "n_group", 8),
        ("axk2", "n_group", "all"),
        ("axk2", "q_lora_rank", None),
        ("axk2", "scoring_func", "softmax"),
        ("axk2", "topk_group", 1),
        ("axk1", "topk_method", "group_limited_greedy"),
        ("muse_glimmer_text", "attn_logit_softcapping", 30.0),
        ("muse_glimmer_text", "final_logit_softcapping", 0.0),
        ("muse_glimmer_text", "layer_rope_theta", [10000.0, 0]),
        ("muse_glimmer_text", "layer_rope_theta", [10000.0, 0, 5e5]),  # transformers computes what 1e4 gives
        ("muse_glimmer_text", "layer_rope_theta", [10000.0, 0, -1]),
        ("muse_glimmer_text", "layer_rope_theta", [10000.0, 0, 1e99]),
        ("muse_glimmer_text", "layer_rope_theta", [10000.0, 0, None]),
        ("muse_glimmer_text", "layer_rope_theta", 10000.0),
        ("muse_glimmer_text", "output_multiplier", 0.0),
        ("muse_glimmer_text", "qk_scale_factor", "x"),
        ("muse_glimmer_text", "query_pre_attn_scalar", 256),
        ("muse_spark_text", "layer_rope_theta", [10000.0, 0, 500000.0]),
        ("muse_spark_text", "mlp_layer_types", ["sparse", "dense"]),
        ("muse_spark_text", "moe_hidden_size", 0),
        ("muse_spark_text", "norm_topk_prob", False),
        ("muse_spark_text", "num_experts_per_tok", 9),
        ("muse_spark_text", "residual_gate_temperature", 0.0),
        ("muse_spark_text", "tie_word_embeddings", True),
        ("nanochat", "final_logit_softcapping", 0.0),
        ("olmo", "clip_qkv", -8.0),
        ("olmo", "rms_norm_eps", 1e-5),
        ("bamba", "attn_rotary_emb", 16),
        ("bamba", "mamba_d_head", 64),
        ("bamba", "partial_rotary_factor", 1.0),
        ("bamba", "time_step_limit", [0.001, 0.1]),
        ("falcon_h1", "attn_layer_indices", [1]),
        ("falcon_h1", "mamba_d_head", 64),
        ("falcon_h1", "mamba_n_heads", 7),
        ("falcon_h1", "mamba_use_mlp", False),
        ("falcon_h1", "mlp_multipliers", [1.0]),
        ("falcon_h1", "ssm_multipliers", 2.0),
        ("falcon_h1", "time_step_limit", [0.001, 0.1]),
        ("gemma2", "sliding_window_size", 4096),
        ("gpt_neox", "rope_theta", 500000.0),
        ("hunyuan_v1_dense", "use_cla", True),
        ("hunyuan_v1_moe", "moe_topk", [1, 2, 1]),
        ("hunyuan_v1_moe", "num_shared_expert", [2, 2, 2]),
        ("kimi_k2", "n_group", 8),
        ("lfm2", "block_dim", 2048),
        ("lfm2", "block_use_swiglu", False),
        ("lfm2", "block_norm_eps", 1e-6),
        ("lfm2", "block_ffn_dim_multiplier", 1e9),
        ("lfm2", "block_ffn_dim_multiplier", 1e-9),
        ("lfm2", "tie_embedding", False),
        ("lfm2", "use_pos_enc", False),
        ("beam", "layer_types", ["chunked_attention"] * 3),
        ("beam", "n_group", 3),
        ("beam", "num_key_value_heads", 3),
        ("beam", "rope_parameters", {"sliding_attention": None}),
        ("beam", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("beam", "rope_theta", 1e4),
        ("beam", "scoring_func", "softmax"),
        ("beam", "sliding_window", 0),
        ("cohere_compass_text", "layer_types", ["chunked_attention"] * 3),
        ("cohere_compass_text", "rope_parameters", {}),
        ("cohere_compass_text", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("cohere_compass_text", "rope_parameters", {"full_attention": None}),
        ("flint", "layer_types", ["sliding_attention"]),
        ("flint", "num_local_experts", 7),
        ("flint", "shared_expert_intermediate_size", 0),
        ("flint", "sliding_window", 0),
        ("flint", "use_sliding_window", True),
        ("kolibri1", "attention_bias", True),
        ("kolibri1", "num_experts", 7),
        ("kolibri1", "num_experts_per_tok", 9),
        ("kolibri1", "mlp_only_layers", [0]),
        ("kolibri1", "sliding_window", None),
        ("step3p5", "att_impl_type", "MFA"),
        ("step3p5", "attention_other_setting", [6]),
        ("step3p5", "gating", "per-element"),
        ("step3p5", "hidden_act", "gelu"),
        ("step3p5", "layer_types", ["chunked_attention"] * 3),
        ("step3p5", "moe_layers_enum", "1,-2"),
        ("step3p5", "num_sliding_attention_heads", 5),
        ("step3p5", "per_layer_config", {}),
        ("step3p5", "query_pre_attn_scalar", -1),
        ("step3p5", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        ("step3p5", "rope_parameters", {"full_attention": {"rope_type": "default"}, "sliding_attention": None}),
        ("step3p5", "rope_theta", [5e6, 1e4, 1e4]),
        ("step3p5", "sliding_window", 0),
        ("step3p5", "swiglu_limits", [7.0]),
        ("step3p5", "swiglu_limits", ["seven"] * 3),
        ("step3p5", "swiglu_limits_shared", [-1.0] * 3),
        ("step3p5", "use_head_wise_attn_gate", False),
        ("step3p5", "use_rope_layers", [True, False, True]),
        ("step3p5", "yarn_only_types", ["sliding_attention"]),
        ("laguna", "decoder_sparse_step", 2),
        ("laguna", "gating", False),
        ("laguna", "gating", "per-layer"),
        ("laguna", "gating_types", ["per-head", "per-element", "per-head"]),
        ("laguna", "layer_types", ["chunked_attention"] * 3),
        ("laguna", "mlp_layer_types", ["dense"]),
        ("laguna", "mlp_only_layers", [1]),
        ("laguna", "moe_apply_router_weight_on_input", True),
        ("laguna", "moe_router_logit_softcapping", 30.0),
        ("laguna", "moe_router_use_sigmoid", False),
        ("laguna", "norm_topk_prob", False),
        ("laguna", "num_attention_heads_per_layer", [4, 6]),
        ("laguna", "num_attention_heads_per_layer", [4, 6, 3]),
        ("laguna", "num_attention_heads_per_layer", [4, 6, 0]),
        ("laguna", "num_attention_heads_per_layer", []),
        ("laguna", "partial_rotary_factor", 1.0),
        ("laguna", "qkv_bias", True),
        ("laguna", "rope_parameters", {"rope_type": "default"}),
        ("laguna", "rope_parameters", {"full_attention": {"rope_theta": 5e5}, "sliding_attention": None}),
        ("laguna", "rope_parameters", {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}),
        ("laguna", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("laguna", "rope_theta", 1e4),
        ("laguna", "swa_attention_sink_enabled", True),
        ("lfm3", "conv_L_cache", 33),
        ("lfm3", "full_attn_idxs", [1]),
        ("lfm3", "head_dim", 0),
        ("lfm3", "layer_types", ["conv", "conv"]),
        ("lfm3", "layer_types", ["conv", "linear_attention", "full_attention"]),
        ("lfm3", "partial_rotary_factor", 0.5),
        ("lfm3", "rms_norm_eps", 1e-6),
        ("lfm3", "rope_parameters", {"rope_type": "default"}),
        ("lfm3", "rope_parameters", {"full_attention": {}, "sliding_attention": None}),
        ("lfm3", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("lfm3", "use_attention_gate", 1),
        ("lfm3", "use_sandwich_norm", "no"),
        ("llama", "rope_interleaved", True),
        ("minimax", "layer_types", ["linear_attention"]),
        ("minimax", "num_experts_per_tok", 5),
        ("minimax", "rotary_dim", 16),
        ("minimax", "use_qk_norm", True),
        ("minimax_m2", "attn_type_list", [1, 0, 1]),
        ("minimax_m2", "use_qk_norm", False),
        ("minimax_m3_vl_text", "attention_output_gate", True),
        ("minimax_m3_vl_text", "hidden_act", "gelu"),
        ("minimax_m3_vl_text", "index_block_size", 100),
        ("minimax_m3_vl_text", "index_block_size", 32),
        ("minimax_m3_vl_text", "index_head_dim", 31),
        ("minimax_m3_vl_text", "index_local_blocks", 2),
        ("minimax_m3_vl_text", "index_n_heads", 4),
        ("minimax_m3_vl_text", "index_topk_blocks", 1 << 16),
        ("minimax_m3_vl_text", "layer_types", ["sliding_attention"] * 3),
        ("minimax_m3_vl_text", "mlp_layer_types", ["moe"] * 3),
        ("minimax_m3_vl_text", "moe_layer_freq", [1, 1, 1]),
        ("minimax_m3_vl_text", "n_shared_experts", 2),
        ("minimax_m3_vl_text", "rotary_dim", 16),
        ("minimax_m3_vl_text", "sparse_attention_config", [1]),
        ("minimax_m3_vl_text", "swiglu_beta", 0.5),
        ("minimax_m3_vl_text", "use_gemma_norm", False),
        ("nemotron_h", "attention_bias", True),
        ("nemotron_h", "attention_head_dim", 128),
        ("nemotron_h", "hybrid_override_pattern", "M?"),
        ("nemotron_h", "layers_block_type", ["mamba", "ssm"]),
        ("nemotron_h", "layer_types", ["mamba"]),
        ("nemotron_h", "mamba_num_heads", 7),
        ("nemotron_h", "mamba_ssm_cache_dtype", "float16"),
        ("nemotron_h", "n_group", 3),
        ("nemotron_h", "n_shared_experts", 2),
        ("nemotron_h", "num_hidden_layers", 7),
        ("nemotron_h", "residual_in_fp32", True),
        ("nemotron_h", "rms_norm_eps", 1e-6),
        ("nemotron_h", "sliding_window", 64),
        ("nemotron_h", "tie_word_embeddings", True),
        ("nemotron_h", "time_step_limit", [0.001, 0.1]),
        ("olmo_hybrid", "layer_types", ["linear_attention"] * 3),
        ("olmo_hybrid", "linear_allow_neg_eigval", 1),
        ("olmo_hybrid", "linear_conv_kernel_dim", 33),
        ("olmo_hybrid", "linear_num_value_heads", 3),
        ("olmo_hybrid", "sliding_window", 64),
        ("olmoe", "clip_qkv", 0),
        ("phi3", "lm_head_bias", True),
        ("phimoe", "num_experts_per_tok", 3),
        ("phimoe", "router_jitter_noise", -0.1),
        ("qwen2", "use_mrope", True),
        ("qwen3_5_moe_text", "norm_topk_prob", False),
        ("qwen3_5_text", "attn_output_gate", False),
        ("qwen3_5_text", "mamba_ssm_dtype", "bfloat16"),
        ("qwen3_5_text", "mlp_only_layers", [1]),
        ("qwen3_5_text", "output_gate_type", "sigmoid"),
        ("qwen3_next", "linear_num_value_heads", 3),
        ("qwen3_moe", "shared_expert_intermediate_size", 64),
        ("qwen3_moe", "use_qk_norm", False),
        ("stablelm", "rotary_scaling_factor", 2.0),
        ("vaultgemma", "hidden_activation", "mish"),
        ("vaultgemma", "layer_types", ["full_attention"]),
        ("vaultgemma", "query_pre_attn_scalar", 0),
        ("vaultgemma", "use_bidirectional_attention", True),
        ("starcoder2", "norm_type", "rms_norm"),
    ],
)
def test_the_same_field_with_another_value_is_refused(family: str, field: str, value: object) -> None:
    with pytest.raises(ModelError, match=re.escape(f"{field} is {value!r}")):
        build_program({**tiny(family), field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", False),
        ("alibi_bias_max", 16),
        ("attn_type", "multiquery_attention"),
        ("clip_qkv", -6.0),
        ("kv_n_heads", 1),
        ("prefix_lm", True),
        ("qk_gn", True),
        ("qk_ln", True),
        ("rope", True),
        ("sliding_window_size", 2048),
        ("softmax_scale", -1.0),
    ],
)
def test_what_attention_of_mpt_does_not_compute_is_refused(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=re.escape(f"attn_config: {field} is {value!r}")):
        build_program({**tiny("mpt"), "attn_config": {field: value}})


def test_what_attention_of_later_mpt_says_is_off_changes_nothing() -> None:
    rope = {"rope": False, "rope_impl": "dail", "rope_theta": 10000, "rope_dail_config": {"type": "original"}}
    off = {**rope, "qk_gn": False, "sliding_window_size": -1, "kv_n_heads": None, "clip_qkv": 0}
    assert build_program({**tiny("mpt"), "attn_config": off}) == build_program({**tiny("mpt"), "attn_config": {}})


def test_slopes_do_not_depend_on_the_last_bits_of_the_c_librarys_powers() -> None:
    """They are rounded to fp32, by which two units of the last place of a double do not show."""
    found = np.array(sum((mpt_slopes(1 << power) for power in range(13)), ()))
    apart = [np.nextafter(np.nextafter(found, to), to).astype(np.float32) for to in (0.0, 1.0)]
    assert (apart[0] == apart[1]).all()


def test_no_more_kinds_of_gpt_neos_layers_are_listed_than_tell_that_they_are_too_many() -> None:
    """A config of a megabyte would have had a gigabyte of them."""
    with pytest.raises(ModelError, match=r"attention_types is .* 3 layers are needed, these are 9"):
        build_program({**tiny("gpt_neo"), "attention_types": [[["global"] * 1000, 3]] * 1000})


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    """Of bloom its own function gives them times a position, of mpt those of a distance."""
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert np.allclose(bloom_slopes(heads), theirs, rtol=1e-6)
    assert np.allclose(mpt_slopes(heads), -build_mpt_alibi_tensor(heads, 2)[:, 0, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_type_list", [0, 1]),
        ("layer_types", ["full_attention"] * 3),
        ("layernorm_mlp_alpha", 2.5),
        ("postnorm", False),
        ("rotary_dim", 21),
        ("shared_intermediate_size", 64),
    ],
)
def test_fields_of_minimax_as_they_were_published_are_refused_too(field: str, value: object) -> None:
    config = {**tiny("minimax_m1"), "model_type": "minimax_m1", "attn_type_list": [1, 0, 1]}
    assert build_program(config).layers == build_program({**tiny("minimax_m1"), "model_type": "minimax"}).layers
    with pytest.raises(ModelError, match=re.escape(f"{value!r}")):
        build_program({**config, field: value})


V4_LEGACY: list[dict[str, Any]] = [  # fields, and what they stand for
    {"compress_ratios": [0, 4, 128, 4], "layer_types": None},
    {"compress_ratios": [128, 128, 0]},
    {"num_hash_layers": 1, "mlp_layer_types": None},
    {"num_hash_layers": 9, "mlp_layer_types": None, "layer_types": None},
    {"compress_rate_csa": 8, "compress_rate_hca": 64},
    {"qk_rope_head_dim": 8, "partial_rotary_factor": None},
    {"qk_rope_head_dim": 16, "partial_rotary_factor": None, "rope_parameters": {"rope_theta": 1e4}},
    {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 99.0},
    {"num_local_experts": 4, "n_routed_experts": None, "intermediate_size": 48, "moe_intermediate_size": None},
]


@pytest.mark.parametrize("legacy", V4_LEGACY, ids=str)
def test_fields_of_v4_as_they_were_published_are_what_transformers_makes_of_them(legacy: dict[str, Any]) -> None:
    """Lists of numbers, counts of layers, tables without labels: the Program of what transformers writes."""
    given = {**tiny("deepseek_v4"), **legacy}
    given = {name: value for name, value in given.items() if value is not None}
    given.pop("qk_rope_head_dim") if "qk_rope_head_dim" not in legacy else None
    written = json.loads(CONFIG_MAPPING["deepseek_v4"].from_dict(given).to_json_string())
    assert build_program(given) == build_program(written)


def test_a_window_of_mimo_counts_a_rows_own_position() -> None:
    """sliding_window_size does not, and goes before sliding_window; without lists the published pattern holds."""
    config = {name: value for name, value in tiny("mimo_v2_flash").items() if not name.endswith("layer_types")}
    config |= {"num_hidden_layers": 7, "sliding_window": 8, "sliding_window_size": 16}
    found = [layer.attention for layer in build_program(config).layers]
    assert [attend.window for attend in found if isinstance(attend, Attention)] == [None, 17, 17, 17, 17, None, 17]
    theirs = CONFIG_MAPPING["mimo_v2_flash"](**config)
    assert theirs.sliding_window == 17
    assert [kind == "full_attention" for kind in theirs.layer_types] == [i in (0, 5) for i in range(7)]


@pytest.mark.parametrize(("dense", "first"), [(0, 1), (3, 1), (3, 2), (8, 3)])
def test_layers_of_cohere2_moe_without_lists_are_those_of_transformers(dense: int, first: int) -> None:
    """Those in front have a pattern of their own; the others are counted from the first of them."""
    config = {name: value for name, value in tiny("cohere2_moe").items() if not name.endswith("layer_types")}
    config |= {"num_hidden_layers": 8, "first_k_dense_replace": dense, "prefix_dense_sliding_window_pattern": first}
    theirs = CONFIG_MAPPING["cohere2_moe"](**config)
    layers = build_program(config).layers
    found = [layer.attention for layer in layers]
    windows = [attend.window is not None for attend in found if isinstance(attend, Attention)]
    assert windows == [kind == "sliding_attention" for kind in theirs.layer_types[:8]]
    sparse = [any(isinstance(op, Experts) for op in layer.ops) for layer in layers]
    assert sparse == [kind == "sparse" for kind in theirs.mlp_layer_types]
    turns = [any(isinstance(op, Rotary) for op in layer.ops) for layer in layers]
    assert turns == [window or (first == 1 and i < dense) for i, window in enumerate(windows)]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"first_k_dense_replace": 3},
        {"first_k_dense_replace": 2, "moe_layer_freq": 3},
        {"mlp_layer_types": ["sparse", "dense"] * 4, "first_k_dense_replace": 5},
    ],
)
def test_layers_of_axk1_are_those_of_transformers(given: dict[str, Any]) -> None:
    """Which have experts; a list goes before numbers."""
    config = {name: value for name, value in tiny("axk1").items() if name != "mlp_layer_types"}
    config |= {"num_hidden_layers": 8, **given}
    sparse = [any(isinstance(op, Experts) for op in layer.ops) for layer in build_program(config).layers]
    assert sparse == [kind == "sparse" for kind in CONFIG_MAPPING["axk1"](**config).mlp_layer_types]


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_axk1_without_groups_ranks_experts_by_any_method(method: str) -> None:
    config = {**tiny("axk1"), "n_group": 1, "topk_group": 1}
    assert build_program({**config, "topk_method": method}) == build_program(config)


def test_layers_of_llama4_are_those_of_transformers() -> None:
    """Which turn, which see chunks alone, which have experts; with lists and without."""
    given = {"num_hidden_layers": 8, "attention_chunk_size": 7}
    bare = {name: value for name, value in tiny("llama4_text").items() if not name.endswith("_layers")}
    del bare["layer_types"]
    variants: list[dict[str, Any]] = [
        {"no_rope_layer_interval": 3, "interleave_moe_layer_step": 3},
        {"no_rope_layers": [], "moe_layers": None},
        {"no_rope_layers": [0, 1] * 4, "moe_layers": [1, 2, 11], "interleave_moe_layer_step": 0},
        {"layer_types": ["chunked_attention", "full_attention"] * 4, "moe_layers": []},
    ]
    for more in variants:
        config = {**bare, **given, **more}
        theirs, layers = CONFIG_MAPPING["llama4_text"](**config), build_program(config).layers
        turns = [any(isinstance(op, Rotary) for op in layer.ops) for layer in layers]
        assert turns == list(map(bool, theirs.no_rope_layers[:8]))
        attends = [op for layer in layers for op in layer.ops if isinstance(op, Attention)]
        chunks = [kind == "chunked_attention" for kind in theirs.layer_types[:8]]
        assert [(op.window, op.is_chunked) for op in attends] == [
            (7, True) if is_on else (None, False) for is_on in chunks
        ]
        sparse = [any(isinstance(op, Experts) for op in layer.ops) for layer in layers]
        assert sparse == [i in theirs.moe_layers for i in range(8)]


@pytest.mark.parametrize("family", ["gemma2", "lfm3", "vaultgemma"])
def test_windows_without_a_length_are_refused(family: str) -> None:
    with pytest.raises(ModelError, match=r"layer_types is .*sliding_attention needs sliding_window"):
        build_program({**tiny(family), "sliding_window": None})
    full = {**tiny(family), "layer_types": ["full_attention"] * 3}
    assert build_program({**full, "sliding_window": None}) == build_program(full)


def test_layers_of_lfm3_without_a_list_are_those_of_transformers() -> None:
    config = {name: value for name, value in tiny("lfm3").items() if name not in ("layer_types", "sliding_window")}
    config |= {"num_hidden_layers": 10}
    theirs = CONFIG_MAPPING["lfm3"](**config)
    found = [layer.attention for layer in build_program(config).layers]
    windows = {"conv": None, "full_attention": (0, None), "sliding_attention": (1, theirs.sliding_window)}
    turns = [{op.rope for op in layer.ops if isinstance(op, Rotary)} for layer in build_program(config).layers]
    assert [
        (*rope, op.window) if isinstance(op, Attention) else None for op, rope in zip(found, turns, strict=True)
    ] == [windows[kind] for kind in theirs.layer_types]


def test_a_table_of_lfm3_is_read_where_layers_have_its_type() -> None:
    """Of others transformers takes none; a base frequency outside of tables is for those that say none."""
    config = {**tiny("lfm3"), "layer_types": ["conv", "conv", "sliding_attention"], "rope_theta": 333.0}
    config["rope_parameters"] = {"full_attention": {"rope_type": "none"}, "sliding_attention": {}}
    (rope,) = build_program(config).ropes
    assert rope == build_program({**config, "rope_parameters": {"sliding_attention": {"rope_theta": 333.0}}}).ropes[0]
    assert not build_program({**config, "layer_types": ["conv"] * 3}).ropes
    with pytest.raises(ModelError, match="rope_type is 'none'"):
        build_program({**config, "layer_types": ["full_attention", "conv", "conv"]})


@pytest.mark.parametrize(
    ("fields", "tables"),
    [
        ({}, 1),
        ({"rope_theta": None}, 0),  # Olmo-Hybrid-7B
        ({"rope_theta": 777.0}, 1),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "rope_theta": 777.0}, 0),
        ({"rope_parameters": {"rope_theta": 777.0}, "rope_theta": None}, 1),
    ],
)
def test_heads_of_olmo_hybrid_turn_where_there_is_a_base_frequency(fields: dict[str, Any], tables: int) -> None:
    config = {**tiny("olmo_hybrid"), "rope_parameters": None, **fields}
    assert (CONFIG_MAPPING["olmo_hybrid"].from_dict(config).rope_parameters["rope_theta"] is not None) == bool(tables)
    program = build_program(config)
    assert len(program.ropes) == tables
    assert any(isinstance(op, Rotary) for layer in program.layers for op in layer.ops) == bool(tables)


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (
            {"full_attn_layers": [3], "kda_layers": [1]},
            r"kda_layers is \[1\], with full_attn_layers each layer from 1 to 3",
        ),
        ({"full_attn_layers": [3], "kda_layers": [1, 2, 3]}, "kda_layers is .*, with full_attn_layers each"),
        ({"full_attn_layers": [0], "kda_layers": [1, 2]}, "kda_layers is .*, with full_attn_layers each"),
        ({"kda_layers": "all"}, "kda_layers is 'all', a list of whole numbers"),
        ({"head_dim": 0}, "head_dim is 0, a whole number"),
        ({"short_conv_kernel_size": 33}, "short_conv_kernel_size is 33, a whole number from 1 to 32"),
        ({"gate_rank": 8}, "gate_rank is 8, a field that"),
    ],
)
def test_what_is_wrong_of_linear_attention_of_kimi_linear_is_named(inside: dict[str, Any], said: str) -> None:
    config = {**tiny("kimi_linear"), "layer_types": None, "linear_attn_config": inside}
    with pytest.raises(ModelError, match=rf"^config\.json: linear_attn_config: {said}"):
        build_program(config)


@pytest.mark.parametrize("family", ["bailing_hybrid", "kimi_linear"])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("max_position_embeddings", "model_max_length"),
        ("n_group", "num_expert_group"),
        ("n_shared_experts", "num_shared_experts"),
        ("norm_topk_prob", "moe_renormalize"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("num_local_experts", "num_experts"),
    ],
)
def test_fields_of_kimi_linear_and_ling_go_by_either_name(family: str, name: str, own: str) -> None:
    config = tiny(family)
    value = config.pop(own)
    assert build_program({**config, name: value}) == build_program({**config, own: value})
    assert build_program({**config, own: value, name: value}) == build_program({**config, own: value})
    with pytest.raises(ModelError, match=f"^config.json: {own} is 1.5, "):
        build_program({**config, own: 1.5})
    with pytest.raises(ModelError, match=rf"^config.json: {name} is {value}, only 1\.5 is supported"):
        build_program({**config, own: 1.5, name: value})


def test_chunks_without_a_length_are_refused() -> None:
    with pytest.raises(ModelError, match=r"layer_types is .*chunked_attention needs attention_chunk_size"):
        build_program({**tiny("llama4_text"), "attention_chunk_size": None})


def test_llama4_has_experts_one_by_one_in_compressed_tensors() -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    quantised = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    }
    program = build_program({**tiny("llama4_text"), "quantization_config": quantised})
    names = layer_tensors(program.layers[1])
    assert names["model.layers.1.feed_forward.experts.7.gate_proj.weight"] == (96, 64)
    assert not any(name.endswith("gate_up_proj") for name in names)


def test_layers_of_granite_share_a_table_where_their_base_is_one() -> None:
    config = {**tiny("granite_swa"), "layer_rope_theta": [5e5, 0, 1e4]}
    program = build_program(config)
    assert [rope.frequencies[1] for rope in program.ropes] == [
        rope_of(config, base).frequencies[1] for base in (1e4, 5e5)
    ]
    found = [[op.rope for op in layer.ops if isinstance(op, Rotary)] for layer in program.layers]
    assert found == [[1, 1], [], [0, 0]]


def rope_of(config: dict[str, Any], base: float) -> Rope:
    """The one table of the same model with one base frequency."""
    return build_program({**config, "layer_rope_theta": [base] * 3}).ropes[0]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"no_rope_layer_interval": 2},
        {"no_rope_layers": [0, 1, 1]},
        {"no_rope_layers": [0, 2, 0, 1], "no_rope_layer_interval": 1},
    ],
    ids=str,
)
def test_which_layers_of_mistral_large4_turn_is_what_transformers_says(given: dict[str, Any]) -> None:
    """Nothing turns in the others, of an indexer neither; what turns has the checkpoint's factors of frequencies."""
    config = {name: value for name, value in tiny("mistral_large4_text").items() if name != "no_rope_layers"} | given
    theirs = CONFIG_MAPPING["mistral_large4_text"](**config).no_rope_layers
    for turns, layer in zip(theirs, build_program(config).layers, strict=False):
        found = {op.target: op.exponents and op.exponents.name for op in layer.ops if isinstance(op, Rotary)}
        assert found == (dict.fromkeys(("q", "r", "iq", "ik"), "lerope.alpha") if turns else {})
        assert layer.cache_widths == ((16, 8, 32) if turns else (16, 0, 32))


def test_what_turns_of_a_head_of_mistral4_is_its_rotary_part() -> None:
    config = tiny("mistral4")
    config["rope_parameters"]["partial_rotary_factor"] = 0.25
    with pytest.raises(ModelError, match=r"partial_rotary_factor = qk_rope_head_dim / qk_head_dim = 0.5 is needed"):
        build_program(config)


@pytest.mark.parametrize(("family", "switch"), [("stablelm", "qk_layernorm"), ("cohere", "use_qk_norm")])
def test_norms_of_heads_without_end_are_refused_before_they_are_listed(family: str, switch: str) -> None:
    """A config of a kilobyte made a Program of 2 GB."""
    sizes = {
        "num_hidden_layers": 1024,
        "hidden_size": 1 << 16,
        "num_attention_heads": 4096,
        "num_key_value_heads": 4096,
    }
    with pytest.raises(ModelError, match=f"num_attention_heads is 4096, with {switch} at most 65536 heads"):
        build_program({**tiny(family), **sizes, switch: True})


def test_decays_without_end_are_refused_before_they_are_listed() -> None:
    sizes = {"num_hidden_layers": 1024, "layer_types": None, "num_attention_heads": 4096, "num_key_value_heads": 4096}
    config = {name: value for name, value in {**tiny("minimax"), **sizes}.items() if value is not None}
    with pytest.raises(ModelError, match="num_attention_heads is 4096, at most 65536 heads in all layers"):
        build_program({**config, "head_dim": 8})


@pytest.mark.parametrize(
    "family",
    sorted(
        FAMILIES.keys()
        - {"beam", "cohere_compass_text", "glm5_next_text", "inkling_text", "jamba", "kimi_linear", "nemotron_h"}
        - {"codegen", "gptj", "nanbeige", "nemotron-nas", "falcon_mamba", "mamba", "mamba2"}
        - {"biogpt", "bloom", "mpt", "gpt2", "gpt_bigcode", "gpt_neo", "opt"}
    ),
)  # the first two name none outside of their tables, the others have no positions
def test_a_base_frequency_that_is_not_given_is_that_of_transformers(family: str) -> None:
    config = tiny(family)
    del config["rope_parameters"]
    config.pop("time_step_limit", None)  # has an infinity in a form that transformers reads from files alone
    theirs = CONFIG_MAPPING[NAMED_ANEW.get(family, family)](**config).rope_parameters
    base = next((theirs[kind] for kind in ("full_attention", "main", "indexed_attention") if kind in theirs), theirs)[
        "rope_theta"
    ]
    assert build_program(config).ropes == build_program({**config, "rope_theta": base}).ropes


@pytest.mark.parametrize("family", ["bitnet", "internlm3", "iquestcoder"])
def test_key_heads_that_are_not_counted_are_as_many_as_in_transformers(family: str) -> None:
    config = {name: value for name, value in tiny(family).items() if name != "num_key_value_heads"}
    config |= {"num_attention_heads": 40, "hidden_size": 640}
    count = CONFIG_MAPPING[family](**config).num_key_value_heads
    assert build_program(config) == build_program({**config, "num_key_value_heads": count})


def test_the_width_of_a_block_of_lfm2_is_that_of_transformers() -> None:
    """block_ff_dim goes before intermediate_size."""
    for given in (
        {"block_ff_dim": 120},
        {"block_ff_dim": 120, "intermediate_size": 7},
        {"block_ffn_dim_multiplier": 1.7},
        {"block_auto_adjust_ff_dim": False},
        {"block_multiple_of": 7},
    ):
        config = {**tiny("lfm2"), **given}
        with torch.device("meta"):
            width = Lfm2MLP(CONFIG_MAPPING["lfm2"](**config)).w1.out_features
        shapes = layer_tensors(build_program(config).layers[0])
        assert shapes["model.layers.0.feed_forward.w1.weight"] == (width, 64), given


@pytest.mark.parametrize("family", ["arcee", "ernie4_5", "llama", "mistral", "nemotron", "seed_oss"])
def test_heads_whose_width_is_null_share_the_rows_as_in_transformers(family: str) -> None:
    """Also where the family has a width of its own for configs that do not say."""
    config = {**tiny(family), "head_dim": None}
    attend = build_program(config).layers[0].attention
    assert attend is not None and attend.width == CONFIG_MAPPING[family](**config).head_dim == 16


@pytest.mark.parametrize(
    ("family", "field"),
    [
        *((family, "num_key_value_heads") for family in ("dots1", "ernie4_5", "qwen2", "qwen3", "seed_oss", "smollm3")),
        *(
            (family, "rope_parameters")
            for family in ("gemma4_text", "gemma4_unified_text", "llama", "ministral3", "qwen3_next")
        ),
        ("flint", "mlp_only_layers"),
        ("gemma4_text", "per_layer_config"),
        ("gemma4_unified_text", "per_layer_config"),
        ("mimo_v2_flash", "routed_scaling_factor"),  # as published
    ],
)
def test_a_field_that_is_null_means_what_transformers_makes_of_it(family: str, field: str) -> None:
    config = {**tiny(family), field: None}
    theirs = CONFIG_MAPPING[family](**config).to_dict()
    stated = {**config, field: theirs.get(field) or {}}
    assert build_program(config) == build_program(stated)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        *((family, "rope_interleave") for family in ("axk1", "deepseek_v3", "mistral4", "youtu")),
        *((family, "norm_topk_prob") for family in ("axk1", "deepseek_v3", "kimi_k2", "mistral4")),
        ("falcon_h1", "mamba_norm_before_gate"),
        ("granitemoehybrid", "mamba_conv_bias"),
    ],
)
def test_a_switch_that_is_null_is_off_as_in_transformers(family: str, field: str) -> None:
    """Also where it is on unless a config says otherwise: transformers keeps the null and asks whether it is true."""
    config = {**tiny(family), field: None}
    config.pop("time_step_limit", None)  # has an infinity in a form that transformers reads from files alone
    assert CONFIG_MAPPING[NAMED_ANEW.get(family, family)](**config).to_dict()[field] is None
    assert build_program(config) == build_program({**config, field: False})


def test_experts_of_mistral_large_4_may_be_counted_as_mixtrals() -> None:
    """As transformers takes them, by its map of attributes."""
    config = tiny("mistral_large4_text")
    other = {**config, "num_local_experts": config["n_routed_experts"]}
    del other["n_routed_experts"]
    assert build_program(other) == build_program(config)


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def test_a_layer_with_more_experts_than_the_engine_takes_is_refused() -> None:
    """Before any of its weights is read: the engine would refuse the whole plan."""
    seen = set()
    for family in sorted(FAMILIES.keys() - {"glm5_next_text", "nanbeige", "nemotron-nas"}):
        config = tiny(family)
        inner = config.get("text_config") or config
        for field in EXPERT_COUNTS:
            if inner.get(field):
                inner[field] = MOST_EXPERTS + 1
                seen.add(family)
        if family in seen:
            with pytest.raises(ModelError, match=rf"experts.*{MOST_EXPERTS + 1}.*{MOST_EXPERTS}"):
                build_program(config)
    assert len(seen) > 30


def test_the_engine_takes_as_many_experts_as_recipes_do() -> None:
    assert f"enum {{ MOST_EXPERTS = {MOST_EXPERTS} }};" in (NATIVE / "kernels.h").read_text()
