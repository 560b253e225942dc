"""Names of tensors, as in gguf_names.py, of families with latent attention, and of gemma3n."""

from typing import Final

from manyhands.checkpoint.gguf_names import DOTS1, ENDS, GEMMA3, INPUT_ENDS, INPUTS, LLAMA

MINICPM3: Final = {
    **LLAMA,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
DEEPSEEK2: Final = {
    **DOTS1,
    **MINICPM3,
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
DEEPSEEK32: Final = {
    **DEEPSEEK2,
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
DOTS3_NOTE: Final = {
    **DEEPSEEK32,
    "attn_gate": "self_attn.g_proj",
    "attn_k_norm": "self_attn.k_rope_only_layernorm",
}
MISTRAL4: Final = {
    **DEEPSEEK2,
    **{f"ffn_{part}_exps.weight": f"mlp.experts.{part}_proj" for part in ("gate_up", "gate", "up", "down")},
}
KIMI_LINEAR: Final = {
    **DEEPSEEK2,
    **{f"ssm_conv1d_{kind}": f"self_attn.{kind}_conv1d" for kind in "qkv"},
    **{f"ssm_{kind}_{part}": f"self_attn.{kind}_{part}_proj" for kind in "fg" for part in "ab"},
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_a.": "self_attn.A_log",
    "ssm_norm": "self_attn.o_norm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{
        f"ffn_{part}_exps": f"block_sparse_moe.experts.{{expert}}.{own}"
        for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    **{f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
KIMI_K3: Final = {
    **{name: ours for name, ours in KIMI_LINEAR.items() if name not in ("ssm_g_a", "ssm_g_b")},
    "attn_gate": "self_attn.g_proj",  # of latent attention
    "ssm_g": "self_attn.g_proj",
    "attn_res_score": "self_attention_res_score",
    "ffn_res_score": "mlp_res_score",
    **{f"ffn_routed_{part}": f"block_sparse_moe.routed_expert_{part}_proj" for part in ("down", "up")},
    "ffn_routed_norm": "block_sparse_moe.routed_expert_norm",
}
KIMI_K3_ENDS: Final = {**ENDS, "output_res_score.weight": "model.output_attn_res_score.weight"}
LING3: Final = {
    **{
        name: ours.replace("self_attn.o_proj", "attention.dense").replace("self_attn.", "attention.")
        for name, ours in DEEPSEEK2.items()
    },
    **{f"ssm_conv1d_{kind}": f"attention.{kind}_conv1d" for kind in "qkv"},
    "attn_gate": "attention.g_proj",  # of latent attention
    "ssm_g_a": "attention.g_proj",
    "ssm_f_a": "attention.f_proj",
    "ssm_beta": "attention.b_proj",
    "ssm_dt.bias": "attention.dt_bias",
    "ssm_a.": "attention.A_log",
    "ssm_norm": "attention.o_norm",
    "exp_probs_b.bias": "mlp.gate.expert_bias",
}
LING3_ENDS: Final = {**ENDS, "token_embd.weight": "model.word_embeddings.weight"}
MIMO2: Final = {
    **DOTS1,
    "attn_qkv": "self_attn.qkv_proj",
    "attn_sinks.weight": "self_attn.attention_sink_bias",
}
DEEPSEEK4: Final = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_a": "attn.wq_a",
    "attn_q_a_norm": "attn.q_norm",
    "attn_q_b": "attn.wq_b",
    "attn_kv": "attn.wkv",
    "attn_kv_a_norm": "attn.kv_norm",
    "attn_output_a": "attn.wo_a",
    "attn_output_b": "attn.wo_b",
    "attn_sinks.weight": "attn.attn_sink",
    **{
        f"{theirs}_compressor_{part}{end}": f"{ours}.compressor.{own}"
        for theirs, ours in (("attn", "attn"), ("indexer", "attn.indexer"))
        for part, end, own in (
            ("kv", "", "wkv"),
            ("gate", "", "wgate"),
            ("norm", "", "norm"),
            ("ape", ".weight", "ape"),
        )
    },
    "indexer.attn_q_b": "attn.indexer.wq_b",
    "indexer.proj": "attn.indexer.weights_proj",
    **{
        f"hc_{place}_{part}.weight": f"hc_{place}_{part}"
        for place in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    "ffn_gate_inp": "ffn.gate",
    "exp_probs_b.bias": "ffn.gate.bias",
    "ffn_gate_tid2eid.weight": "ffn.gate.tid2eid",
    **{
        f"ffn_{part}_{kind}": f"ffn.{path}.{own}"
        for kind, path in (("exps", "experts.{expert}"), ("shexp", "shared_experts"))
        for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
DEEPSEEK4_ENDS: Final = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
    **{f"output_hc_{part}.weight": f"hc_head_{part}" for part in ("fn", "base", "scale")},
}
HY_V4: Final = {
    **DEEPSEEK32,
    "attn_gate": "self_attn.linear_gate",
    "attn_sinks.weight": "self_attn.learnable_sink_param",
    **{
        f"hc_{theirs}_{part}.weight": f"hc_{ours}_layer.hc_pre.hc_{part}"
        for theirs, ours in (("attn", "attn"), ("ffn", "mlp"))
        for part in ("fn", "base", "scale")
    },
}
HY_V4_ENDS: Final = {
    **ENDS,
    **{f"output_hc_{part}.weight": f"model.hc_head.hc_head_{part}" for part in ("fn", "base", "scale")},
}
GLM5_NEXT: Final = {
    **DEEPSEEK32,
    **{name: ours for name, ours in KIMI_LINEAR.items() if name.startswith("ssm_")},
    **{
        f"indexer_compressor_{part}.weight": f"self_attn.indexer.index_kpool_compress_{part}"
        for part in ("gate", "ape")
    },
    **{
        f"hc_{place}_{part}.weight": f"hc_{place}_{part}"
        for place in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
}
GEMMA3N: Final = {
    **GEMMA3,
    **INPUTS,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
GEMMA3N_ENDS: Final = {
    **INPUT_ENDS,
    "altup_proj.weight": "model.altup_projections.{expert}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{expert}.weight",
}
