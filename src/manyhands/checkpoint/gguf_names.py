"""Names of tensors: llama.cpp's to those of transformers, of the ends whole, of layers by architecture.

Names of a layer with ".weight", ".bias" or ".scale" are whole, and so are those that have none of these and end here in ".";
others stand for weight and bias. In a stack "{expert}" stands for the number of a matrix, "{head}" for that of a vector.
"""

from typing import Final

ENDS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LLAMA: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BITNET: Final = {
    **LLAMA,
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
}
QWEN3: Final = {**LLAMA, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
QWEN3_MOE: Final = {
    **QWEN3,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
MIXTRAL: Final = {
    **LLAMA,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
GEMMA2: Final = {
    **LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA3: Final = {**GEMMA2, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MUSE_GLIMMER: Final = {**GEMMA3, "attn_gate": "self_attn.gate_proj"}
# Of models with an input for each layer.
INPUTS: Final = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
INPUT_ENDS: Final = {
    **ENDS,
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
GEMMA4: Final = {
    **GEMMA3,
    **INPUTS,
    "layer_output_scale.weight": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
APERTUS: Final = {
    **{theirs: ours for theirs, ours in QWEN3.items() if "gate" not in theirs},
    "attn_norm": "attention_layernorm",
    "ffn_norm": "feedforward_layernorm",
}
# Lists of the metadata with a number for each layer: vectors of one number, or numbers.
APERTUS_LISTS: Final = {
    **{f"xielu.{name}": (f"mlp.act_fn.{name}", (1,)) for name in ("alpha_p", "alpha_n")},
    **{f"xielu.{name}": (f"mlp.act_fn.{name}", ()) for name in ("beta", "eps")},
}
SEED_OSS: Final = {**LLAMA, "post_attention_norm": "post_attention_layernorm"}
HUNYUAN: Final = {**LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
CHATGLM: Final = {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
PHI3: Final = {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GPT_OSS: Final = {
    **QWEN3_MOE,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj.bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj.bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj.bias",
}
DOTS1: Final = {
    **QWEN3_MOE,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GLM4_MOE: Final = {**DOTS1, "post_attention_norm": "post_attention_layernorm"}
ERNIE4_5_MOE: Final = {**DOTS1, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
HUNYUAN_MOE: Final = {
    **QWEN3_MOE,
    **HUNYUAN,
    "ffn_gate_inp": "mlp.gate.wg",
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}
EXAONE_MOE: Final = {**DOTS1, "exp_probs_b.bias": "mlp.e_score_correction_bias"}
LLAMA4: Final = {
    **LLAMA,
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps": "feed_forward.experts.{expert}.gate_proj",
    "ffn_up_exps": "feed_forward.experts.{expert}.up_proj",
    "ffn_down_exps": "feed_forward.experts.{expert}.down_proj",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
MINIMAX_M2: Final = {
    **MIXTRAL,
    **QWEN3,
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
QWEN2_MOE: Final = {
    **QWEN3_MOE,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GLM4: Final = {
    **LLAMA,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
OLMO2: Final = {
    **QWEN3,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LINEAR: Final = {
    **QWEN3,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a.": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
QWEN3_NEXT: Final = {
    **QWEN2_MOE,
    **LINEAR,
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
QWEN35: Final = {**LINEAR, "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}
QWEN35_MOE: Final = {**QWEN2_MOE, **QWEN35}
LFM2: Final = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
LFM2_MOE: Final = {
    **LFM2,
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{expert}.w1",
    "ffn_up_exps": "feed_forward.experts.{expert}.w3",
    "ffn_down_exps": "feed_forward.experts.{expert}.w2",
}
LFM2_ENDS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}
GRANITE_MOE: Final = {
    **LLAMA,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.down_proj",
}
GRANITE_HYBRID: Final = {
    **LLAMA,
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a.": "mamba.A_log",
    "ssm_d.": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
}
GRANITE_HYBRID_MOE: Final = {
    **GRANITE_HYBRID,
    **GRANITE_MOE,
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
FALCON_H1: Final = {
    **{theirs: ours for theirs, ours in GRANITE_HYBRID.items() if theirs != "ffn_norm"},
    "ffn_norm.": "pre_ff_layernorm.weight",  # so it is called by llama.cpp's converter: without .weight
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
FALCON_H1_ENDS: Final = {**ENDS, "output_norm.weight": "model.final_layernorm.weight"}
JAMBA: Final = {
    **{theirs: ours for theirs, ours in LLAMA.items() if "attn" in theirs},
    "ffn_norm": "pre_ff_layernorm",
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ssm_a.": "mamba.A_log",
    "ssm_d.": "mamba.D",
    "ssm_out": "mamba.out_proj",
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"feed_forward.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
}
JAMBA_ENDS: Final = FALCON_H1_ENDS
MAMBA: Final = {
    "attn_norm": "norm",
    **{theirs: ours.replace("mamba.", "mixer.") for theirs, ours in JAMBA.items() if ours.startswith("mamba.")},
}
NEMOTRON_H: Final = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a.": "mixer.A_log",
    "ssm_d.": "mixer.D",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
NEMOTRON_H_MOE: Final = {
    **NEMOTRON_H,
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{expert}.up_proj",
    "ffn_down_exps": "mixer.experts.{expert}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
NEMOTRON_H_ENDS: Final = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
BIASED_ENDS: Final = {**ENDS, "output_norm.bias": "model.norm.bias"}
STABLELM: Final = {
    **LLAMA,
    "attn_q_norm": "self_attn.q_layernorm.norms.{head}",
    "attn_k_norm": "self_attn.k_layernorm.norms.{head}",
}
STARCODER2: Final = {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
PHI2: Final = {
    **LLAMA,
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
PHI2_ENDS: Final = {
    **ENDS,
    "output_norm.weight": "model.final_layernorm.weight",
    "output_norm.bias": "model.final_layernorm.bias",
    "output.bias": "lm_head.bias",
}
GPT_NEOX: Final = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
FALCON: Final = {
    "attn_norm": "ln_mlp",  # the block's own, or the one that there is
    "attn_norm_2": "ln_attn",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
FALCON_ENDS: Final = {
    "token_embd.weight": "transformer.word_embeddings.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
GPT_NEOX_ENDS: Final = {
    "token_embd.weight": "gpt_neox.embed_in.weight",
    "output_norm.weight": "gpt_neox.final_layer_norm.weight",
    "output_norm.bias": "gpt_neox.final_layer_norm.bias",
    "output.weight": "embed_out.weight",
}
