"""What the configs of tiny models (tiny.py) need, family by family."""

from collections.abc import Callable, Mapping
from typing import Final

from manyhands.testing.tiny_inkling import inkling
from manyhands.testing.tiny_large4 import large4
from manyhands.testing.tiny_latent import WINDOW as WINDOW
from manyhands.testing.tiny_latent import Overrides as Overrides
from manyhands.testing.tiny_latent import (
    axk2,
    bailing,
    beside_shared,
    deepseek,
    deepseek_v2,
    dots3,
    experts,
    glm4_lite,
    hy_v4,
    indexed,
    kimi,
    kimi_linear,
    longcat,
    mistral4,
    mla,
    shared_choice,
)
from manyhands.testing.tiny_minimax import lightning, minimax, minimax_m3, published_lightning
from manyhands.testing.tiny_muse import glimmer, spark
from manyhands.testing.tiny_older import OLDER
from manyhands.testing.tiny_unturned import beam, compass, flint, kolibri
from manyhands.testing.tiny_v4 import small_v4

NEMOTRON_KINDS: Final = ("linear_attention", "moe", "full_attention", "mlp")  # of layers of nemotron_h
_QUARTER: Final = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
LFM3_KINDS: Final = ("conv", "sliding_attention", "full_attention")  # of layers of lfm3


def _gemma(hidden: int) -> Overrides:
    return {"head_dim": hidden // 2, "query_pre_attn_scalar": hidden // 2, "sliding_window": WINDOW}


def _gemma4(hidden: int) -> Overrides:
    heads = {"head_dim": hidden // 2, "global_head_dim": hidden, "num_global_key_value_heads": 1}
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": hidden // 2}
    return {**heads, **experts, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": WINDOW}


def _gemma4_e4b(hidden: int) -> Overrides:
    heads = {"head_dim": hidden // 2, "global_head_dim": hidden, "sliding_window": WINDOW}
    inputs = {"hidden_size_per_layer_input": hidden, "use_double_wide_mlp": True}
    return {**heads, **inputs, "final_logit_softcapping": 30.0}


def _gemma4_unified(hidden: int) -> Overrides:
    heads = {"head_dim": hidden // 2, "global_head_dim": hidden, "num_global_key_value_heads": 1}
    return {**heads, "attention_k_eq_v": True, "sliding_window": WINDOW, "final_logit_softcapping": 30.0}


def _llama3_rope(hidden: int) -> Overrides:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return {"tie_word_embeddings": True, "rope_parameters": rope}


def _ernie_moe(hidden: int) -> Overrides:
    return {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": hidden // 2, "moe_num_shared_experts": 1}


def _hunyuan(hidden: int) -> Overrides:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 10.0, "factor": 1.0}
    return {"head_dim": hidden // 2, "rope_parameters": rope, "tie_word_embeddings": True}


def _qwen2_moe(hidden: int) -> Overrides:
    return {**experts(hidden, 8), "shared_expert_intermediate_size": hidden, "mlp_only_layers": [1]}


def _qwen3_moe(hidden: int) -> Overrides:
    return {**experts(hidden, 8), "head_dim": hidden // 2, "mlp_only_layers": [2], "decoder_sparse_step": 1}


def _llama4(hidden: int) -> Overrides:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2}
    positions = {"no_rope_layer_interval": 3, "attention_chunk_size": WINDOW, "floor_scale": 16}
    return {**experts, **positions, "head_dim": hidden // 2, "intermediate_size_mlp": hidden}


def _solar(hidden: int) -> Overrides:
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "routed_scaling_factor": 1.5}
    return {**routing, "head_dim": hidden // 2, "moe_intermediate_size": hidden // 2, "attention_bias": True}


def _hy(hidden: int) -> Overrides:
    kinds = {"num_shared_experts": 2, "attention_bias": True, "mlp_bias": True}
    return {**experts(hidden, 8), **kinds, "head_dim": hidden // 2}


def _exaone_moe(hidden: int) -> Overrides:
    windows = {"sliding_window": WINDOW, "sliding_window_pattern": 3}
    return {**experts(hidden, 8), **windows, "n_group": 2, "topk_group": 1}


def _afmoe(hidden: int) -> Overrides:
    windows = {"sliding_window": WINDOW, "global_attn_every_n_layers": 3}
    return {**experts(hidden, 8), **windows, "head_dim": hidden // 2, "mup_enabled": True, "route_scale": 2.5}


def _mimo_flash(hidden: int) -> Overrides:
    widths = {"head_dim": hidden * 3 // 8, "v_head_dim": hidden // 4, "moe_intermediate_size": hidden // 2}
    rope = {
        kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.334}
        for kind, base in (("full_attention", 5e6), ("sliding_attention", 1e4))
    }
    windows = {"sliding_window": WINDOW, "num_key_value_heads": 1, "rope_parameters": rope}
    return {**widths, **windows, "n_routed_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 2.0}


def _mellum(hidden: int) -> Overrides:
    return {**experts(hidden, 8), "head_dim": hidden // 2, "sliding_window": WINDOW, "attention_bias": True}


def _cohere2_moe(hidden: int) -> Overrides:
    windows = {"sliding_window": WINDOW, "sliding_window_pattern": 2, "first_k_dense_replace": 1}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}
    return {**windows, **experts, "head_dim": hidden // 2, "prefix_dense_intermediate_size": hidden}


def _granite_swa(hidden: int) -> Overrides:
    return {**_granite(hidden), "sliding_window": WINDOW}


def _granite_experts(hidden: int) -> Overrides:
    return {**_granite(hidden), "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": hidden}


def _hyperclovax(hidden: int) -> Overrides:
    return {**_granite(hidden), "attention_multiplier": None, "logits_scaling": 0.5, "attention_bias": True}


def _gpt_oss(hidden: int) -> Overrides:
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return {**experts, "head_dim": hidden // 2, "sliding_window": WINDOW, "rope_parameters": yarn}


def _ministral3(hidden: int) -> Overrides:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
    scales = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    return {"head_dim": hidden // 2, "rope_parameters": {**yarn, **scales}}


def _granite(hidden: int) -> Overrides:
    return {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}


def _granite_hybrid(hidden: int) -> Overrides:
    dense = {"num_local_experts": 0, "shared_intermediate_size": hidden * 3 // 2, "position_embedding_type": "rope"}
    return {**_granite(hidden), **dense, "mamba_n_heads": 4, "time_step_limit": [0.0, 1.0]}


def _linear(hidden: int) -> Overrides:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    widths = {"linear_key_head_dim": hidden // 4 + 4, "linear_value_head_dim": hidden // 4}
    return {**heads, **widths, "head_dim": hidden // 2}


def _linear_experts(hidden: int) -> Overrides:
    return {**_linear(hidden), **experts(hidden, 8), "shared_expert_intermediate_size": hidden}


def _qwen4(hidden: int) -> Overrides:
    index: Overrides = {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": hidden // 2}
    index |= {"indexer_budget": 16, "indexer_compress_ratio": 4, "rope_parameters": {**_QUARTER}}
    words: Overrides = {"ngram_vocab_size_base": 50, "heads_per_ngram": 2, "ple_embed_dim": hidden // 2}
    words |= {"make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "output_gate_type": "sigmoid"}
    return {**_linear_experts(hidden), **index, **words, "hc_count": 3, "hc_lowrank": hidden // 4 + 3}


def _lfm2_moe(hidden: int) -> Overrides:
    return {**experts(hidden, 8), "num_dense_layers": 1, "routed_scaling_factor": 1.5}


def _nemotron_h(hidden: int) -> Overrides:
    heads = {"mamba_num_heads": 8, "mamba_head_dim": hidden // 4 - 4, "n_groups": 2, "ssm_state_size": 20}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
    widths = {"moe_intermediate_size": hidden // 2 + 8, "moe_shared_expert_intermediate_size": hidden}
    return {**heads, **experts, **widths, "head_dim": hidden // 2, "time_step_min": 1e-9}


def _falcon_h1(hidden: int) -> Overrides:
    heads = {"mamba_n_heads": 8, "mamba_d_ssm": hidden * 3 // 2, "mamba_n_groups": 2, "mamba_d_state": 20}
    scales = {"ssm_multipliers": [0.4, 1.25, 0.7, 0.5, 1.5], "mlp_multipliers": [0.9, 0.6], "key_multiplier": 0.4}
    ins = {"attention_in_multiplier": 1.2, "ssm_in_multiplier": 1.25, "embedding_multiplier": 5.6}
    outs = {"attention_out_multiplier": 0.9, "ssm_out_multiplier": 0.7, "lm_head_multiplier": 0.5}
    return {**heads, **scales, **ins, **outs}


def _bamba(hidden: int) -> Overrides:
    return {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 20, "attn_layer_indices": [1, 3]}


def _granite_mamba(hidden: int) -> Overrides:
    heads = {"mamba_n_heads": 8, "mamba_d_head": hidden // 4, "mamba_n_groups": 2, "mamba_d_state": 20}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": hidden}
    return {**_granite(hidden), **heads, **experts, "position_embedding_type": None}


# Model types that transformers does not have, and those that it calls them by.
NAMED_ANEW: Final[Mapping[str, str]] = {
    "kimi_k2": "deepseek_v3",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
}
# family -> (model type of transformers, what its config needs at a hidden size)
RECIPES: Final[Mapping[str, tuple[str, Callable[[int], Overrides]]]] = {
    "llama": ("llama", lambda hidden: {}),
    "llama_tied": ("llama", _llama3_rope),
    "qwen2": ("qwen2", lambda hidden: {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", lambda hidden: {"head_dim": hidden // 2}),
    "mistral": ("mistral", lambda hidden: {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", _gemma),
    "gemma3_text": ("gemma3_text", _gemma),
    "phi3": ("phi3", lambda hidden: {}),
    "minicpm3": ("minicpm3", lambda hidden: {**mla(hidden), "scale_emb": 12, "dim_model_base": hidden // 2}),
    "qwen2_moe": ("qwen2_moe", _qwen2_moe),
    "qwen3_moe": ("qwen3_moe", _qwen3_moe),
    "mixtral": ("mixtral", lambda hidden: {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt_oss": ("gpt_oss", _gpt_oss),
    "glm4": ("glm4", lambda hidden: {"head_dim": hidden // 2, "partial_rotary_factor": 0.5}),
    "olmo2": ("olmo2", lambda hidden: {}),
    "deepseek_v3": ("deepseek_v3", deepseek),
}
FAMILIES: Final[tuple[str, ...]] = tuple(RECIPES)
# Further families that have a recipe.
MORE: Final[Mapping[str, tuple[str, Callable[[int], Overrides]]]] = {
    "afmoe": ("afmoe", _afmoe),
    "apertus": ("apertus", lambda hidden: {}),
    "arcee": ("arcee", lambda hidden: {}),
    "axk1": ("axk1", deepseek),
    "axk2": ("axk2", axk2),
    "bailing_hybrid": ("bailing_hybrid", bailing),
    "bamba": ("bamba", _bamba),
    "beam": ("beam", beam),
    **OLDER,
    "cohere": ("cohere", lambda hidden: {}),
    "cohere2": ("cohere2", lambda hidden: {"sliding_window": WINDOW, "sliding_window_pattern": 3}),
    "cohere2_moe": ("cohere2_moe", _cohere2_moe),
    "cohere_compass_text": ("cohere_compass_text", compass),
    "cwm": ("cwm", lambda hidden: {"head_dim": hidden // 2, "sliding_window": WINDOW}),
    "deepseek_v2": ("deepseek_v2", deepseek_v2),
    "deepseek_v32": ("deepseek_v32", indexed),
    "deepseek_v4": ("deepseek_v4", small_v4),
    "dots1": ("dots1", lambda hidden: {**beside_shared(hidden), "sliding_window": WINDOW, "max_window_layers": 2}),
    "dots3_note_text": ("dots3_note_text", dots3),
    "ernie4_5": ("ernie4_5", lambda hidden: {"head_dim": hidden // 2}),
    "ernie4_5_moe": ("ernie4_5_moe", _ernie_moe),
    "exaone4": ("exaone4", lambda hidden: {"sliding_window": WINDOW, "sliding_window_pattern": 3}),
    "exaone_moe": ("exaone_moe", _exaone_moe),
    "falcon_h1": ("falcon_h1", _falcon_h1),
    "flint": ("flint", flint),
    "flex_olmo": ("flex_olmo", lambda hidden: {"num_experts": 6, "num_experts_per_tok": 2}),
    "gemma": ("gemma", lambda hidden: {"head_dim": hidden // 2}),
    "gemma3n_text": ("gemma3n_text", lambda hidden: {"head_dim": hidden // 2, "sliding_window": WINDOW}),
    "gemma4_text": ("gemma4_text", _gemma4),
    "gemma4_text_e4b": ("gemma4_text", _gemma4_e4b),
    "gemma4_unified_text": ("gemma4_unified_text", _gemma4_unified),
    "glm": ("glm", lambda hidden: {"head_dim": hidden // 2}),
    "glm4_moe": ("glm4_moe", lambda hidden: {**beside_shared(hidden), "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_lite": ("glm4_moe_lite", glm4_lite),
    "glm_moe_dsa": ("glm_moe_dsa", indexed),
    "glm_moe_dsa_shared": ("glm_moe_dsa", shared_choice),
    "gpt_neox": ("gpt_neox", lambda hidden: {"num_key_value_heads": None}),
    "granite": ("granite", _granite),
    "granite_swa": ("granite_swa", _granite_swa),
    "granitemoe": ("granitemoe", lambda hidden: {**_granite(hidden), "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe_swa": ("granitemoe_swa", lambda hidden: {**_granite_experts(hidden), "sliding_window": WINDOW}),
    "granitemoehybrid": ("granitemoehybrid", _granite_hybrid),
    "granitemoehybrid_mamba": ("granitemoehybrid", _granite_mamba),
    "granitemoeshared": ("granitemoeshared", _granite_experts),
    "helium": ("helium", lambda hidden: {"head_dim": hidden // 4}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _hunyuan),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", lambda hidden: {**_hunyuan(hidden), "num_experts": 4, "moe_topk": 2}),
    "hy_v3": ("hy_v3", _hy),
    "hy_v4": ("hy_v4", hy_v4),
    "hy_v4_shared": ("hy_v4", hy_v4),
    "hyperclovax": ("hyperclovax", _hyperclovax),
    "inkling_text": ("inkling_text", inkling),
    "internlm3": ("internlm3", lambda hidden: {"head_dim": hidden // 2, "qkv_bias": True, "bias": True}),
    "iquestcoder": ("iquestcoder", lambda hidden: {"head_dim": hidden // 2}),
    "jais2": ("jais2", lambda hidden: {}),
    "jamba": ("jamba", lambda hidden: {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4}),
    "kimi_k2": (NAMED_ANEW["kimi_k2"], kimi),
    "kimi_linear": ("kimi_linear", kimi_linear),
    "kolibri1": ("kolibri1", kolibri),
    "laguna": ("laguna", lambda hidden: {**experts(hidden, 8), "head_dim": hidden // 2}),
    "lfm2": ("lfm2", lambda hidden: {"block_multiple_of": 32, "conv_bias": True}),
    "lfm2_moe": ("lfm2_moe", _lfm2_moe),
    "lfm3": ("lfm3", lambda hidden: {"head_dim": hidden // 2, "sliding_window": WINDOW, "conv_bias": True}),
    "llama4_text": ("llama4_text", _llama4),
    "longcat_flash": ("longcat_flash", longcat),
    "mellum": ("mellum", _mellum),
    "mimo_v2_flash": ("mimo_v2_flash", _mimo_flash),
    "minimax": ("minimax", lightning),
    "minimax_m1": (NAMED_ANEW["minimax_m1"], lambda hidden: published_lightning(hidden, 3)),
    "minimax_m2": ("minimax_m2", minimax),
    "minimax_m3_vl_text": ("minimax_m3_vl_text", minimax_m3),
    "minimax_text_01": (NAMED_ANEW["minimax_text_01"], lambda hidden: published_lightning(hidden, 1)),
    "ministral": ("ministral", lambda hidden: {"head_dim": hidden // 2, "sliding_window": WINDOW}),
    "ministral3": ("ministral3", _ministral3),
    "mistral4": ("mistral4", mistral4),
    "mistral_large4_text": ("mistral_large4_text", large4),
    "muse_glimmer_text": ("muse_glimmer_text", glimmer),
    "muse_spark_text": ("muse_spark_text", spark),
    "nanochat": ("nanochat", lambda hidden: {}),
    "nemotron": ("nemotron", lambda hidden: {}),
    "nemotron_h": ("nemotron_h", _nemotron_h),
    "olmo": ("olmo", lambda hidden: {}),
    "olmo3": ("olmo3", lambda hidden: {"sliding_window": WINDOW}),
    "olmo_hybrid": ("olmo_hybrid", lambda hidden: {**_linear(hidden), "head_dim": hidden // 4}),
    "olmoe": ("olmoe", lambda hidden: {"num_experts": 8, "num_experts_per_tok": 2}),
    "phi": ("phi", lambda hidden: {}),
    "phimoe": ("phimoe", lambda hidden: {"num_local_experts": 8, "router_jitter_noise": 0.4, "attention_bias": True}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _linear_experts),
    "qwen3_5_text": ("qwen3_5_text", _linear),
    "qwen4_exp_text": ("qwen4_exp_text", _qwen4),
    "qwen3_next": ("qwen3_next", lambda hidden: {**_linear_experts(hidden), "mlp_only_layers": [1]}),
    "seed_oss": ("seed_oss", lambda hidden: {"head_dim": hidden // 2}),
    "smollm3": ("smollm3", lambda hidden: {}),
    "solar_open": ("solar_open", _solar),
    "stablelm": ("stablelm", lambda hidden: {}),
    "starcoder2": ("starcoder2", lambda hidden: {"sliding_window": WINDOW}),
    "step3p5": ("step3p5", lambda hidden: {}),
    "vaultgemma": ("vaultgemma", _gemma),
    # With a pad_token_id transformers sets its row of the (tied) embedding to zero, also in a loaded model.
    "youtu": ("youtu", lambda hidden: {**mla(hidden), "pad_token_id": None}),
}
EVERY_FAMILY: Final[tuple[str, ...]] = (*FAMILIES, *MORE)
# Of these, those with convolutions or linear attention, which torch does not compute.
WITH_STATES: Final[tuple[str, ...]] = (
    *"bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid_mamba inkling_text jamba kimi_linear lfm2".split(),
    *"lfm2_moe lfm3 mamba mamba2 nemotron_h minimax minimax_m1 minimax_text_01 olmo_hybrid qwen3_5_moe_text".split(),
    *"qwen3_5_text qwen3_next qwen4_exp_text".split(),
)
