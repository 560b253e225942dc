"""The architectures of GGUF that are served: a table of their tensors, conventions, biases, and what reads their keys."""

from collections.abc import Callable, Mapping
from typing import Final

from manyhands.checkpoint import gguf_latent_names as latent
from manyhands.checkpoint import gguf_names as names
from manyhands.checkpoint.gguf_architecture import ATTENTION, BLOCK, CORRECTED, NORMS, QKV, STEPS, UP_DOWN, Architecture
from manyhands.checkpoint.gguf_configs import (
    BY_PART,
    FUSED,
    PAIRS,
    PLUS_ONE,
    RATES,
    SEPARATE,
    TILED,
    cohere,
    cohere2,
    experts,
    gemma,
    gemma2,
    gemma3,
    gpt_neox,
    granite,
    granite_hybrid,
    granite_moe,
    lfm2,
    minicpm3,
    olmo,
    olmo3,
    phi2,
    phi3,
    qwen2_moe,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
    sectioned,
    stablelm,
    stated,
)
from manyhands.checkpoint.gguf_dense import apertus, chatglm, exaone4, gemma3n, gemma4, mistral3
from manyhands.checkpoint.gguf_experts import (
    dots1,
    ernie4_5_moe,
    exaone_moe,
    glm4_moe,
    gpt_oss,
    hunyuan_moe,
    lfm2_moe,
    llama4,
    mimo2,
    minimax_m2,
    olmoe,
    qwen3_moe,
    qwen3_vl_moe,
)
from manyhands.checkpoint.gguf_indexed import INDEXED
from manyhands.checkpoint.gguf_keys import Config, GgufKeys
from manyhands.checkpoint.gguf_latent import deepseek2, deepseek4, kimi_k3, kimi_linear, mistral4
from manyhands.checkpoint.gguf_loops import NAME as LOOPED
from manyhands.checkpoint.gguf_loops import NANBEIGE
from manyhands.checkpoint.gguf_mamba import ALONE, falcon_h1, jamba, nemotron_h, nemotron_h_moe
from manyhands.checkpoint.gguf_mixtures import MIXTURE_VARIANTS, MIXTURES
from manyhands.checkpoint.gguf_plain import PLAIN, PLAIN_VARIANTS

_ROUTED: Final = (None, ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"))


def _granite_hybrid(tensors: Mapping[str, str]) -> Architecture:
    return Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        tensors,
        granite_hybrid,
        (PAIRS, SEPARATE, RATES),
        mixed=True,
        biases=(("attention_bias", ATTENTION), ("mamba_conv_bias", ("ssm_conv1d",)), *STEPS),
    )


def _nemotron_h(tensors: Mapping[str, str], more: Callable[[GgufKeys, Config], Config]) -> Architecture:
    return Architecture(
        "nemotron_h",
        "NemotronHForCausalLM",
        tensors,
        more,
        (RATES,),
        mixed=True,
        uneven=True,
        ends=names.NEMOTRON_H_ENDS,
        layers="backbone.layers",
        biases=(("use_conv_bias", ("ssm_conv1d",)), ("mlp_bias", UP_DOWN), CORRECTED, *STEPS),
    )


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", "LlamaForCausalLM", names.LLAMA, conventions=(PAIRS,)),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", names.LLAMA, biases=((None, QKV),)),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", names.QWEN3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", names.QWEN3_MOE, qwen3_moe),
    "gemma": Architecture("gemma", "GemmaForCausalLM", names.LLAMA, gemma, (PLUS_ONE,)),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", names.GEMMA2, gemma2, (PLUS_ONE,)),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", names.GEMMA3, gemma3, (PLUS_ONE,)),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", names.PHI3, phi3),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        names.GPT_OSS,
        gpt_oss,
        (SEPARATE,),
        biases=(("attention_bias", ATTENTION), _ROUTED),
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        latent.DEEPSEEK2,
        deepseek2,
        latent=True,
        biases=(CORRECTED,),
    ),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", names.GLM4_MOE, glm4_moe, biases=(("attention_bias", QKV), CORRECTED)
    ),
    "minimax-m2": Architecture("minimax_m2", "MiniMaxM2ForCausalLM", names.MINIMAX_M2, minimax_m2, biases=(CORRECTED,)),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", names.ERNIE4_5_MOE, ernie4_5_moe, biases=(CORRECTED,)
    ),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", names.HUNYUAN_MOE, hunyuan_moe),
    "dots1": Architecture(
        "dots1", "Dots1ForCausalLM", names.DOTS1, dots1, biases=(("attention_bias", ATTENTION), CORRECTED)
    ),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", names.QWEN3_MOE, olmoe),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", names.QWEN2_MOE, qwen2_moe, biases=((None, QKV),)),
    "glm4": Architecture(
        "glm4", "Glm4ForCausalLM", names.GLM4, stated("attention_bias"), biases=(("attention_bias", QKV),)
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", names.LLAMA, granite, (PAIRS,)),
    "granitemoe": Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        names.GRANITE_MOE,
        granite_moe,
        (PAIRS, SEPARATE),
        biases=(("attention_bias", ATTENTION),),
    ),
    "granitehybrid": _granite_hybrid(names.GRANITE_HYBRID),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", names.LLAMA, conventions=(PAIRS,)),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", names.OLMO2),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", names.LLAMA, cohere2, eps="layer_norm_eps"),
    "ernie4_5": Architecture(
        "ernie4_5", "Ernie4_5ForCausalLM", names.LLAMA, biases=(("use_bias", (*ATTENTION, *BLOCK)),)
    ),
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", latent.MINICPM3, minicpm3, latent=True),
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        names.PHI2,
        phi2,
        eps="layer_norm_eps",
        ends=names.PHI2_ENDS,
        biases=((None, ("attn_norm", "attn_qkv", *ATTENTION, *UP_DOWN)),),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        names.STARCODER2,
        lambda keys, config: {"use_bias": config.get("use_bias", False)},
        eps="norm_epsilon",
        ends=names.BIASED_ENDS,
        biases=(NORMS, ("use_bias", (*ATTENTION, *UP_DOWN))),
    ),
    "stablelm": Architecture(
        "stablelm",
        "StableLmForCausalLM",
        names.STABLELM,
        stablelm,
        eps="layer_norm_eps",
        ends=names.BIASED_ENDS,
        biases=(NORMS, ("use_qkv_bias", QKV)),
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        names.GPT_NEOX,
        gpt_neox,
        (BY_PART,),
        eps="layer_norm_eps",
        ends=names.GPT_NEOX_ENDS,
        layers="gpt_neox.layers",
        biases=(NORMS, ("attention_bias", ("attn_qkv", "attn_output")), (None, UP_DOWN)),
    ),
    "qwen3next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM", names.QWEN3_NEXT, qwen3_next, (PLUS_ONE, RATES), biases=STEPS
    ),
    "qwen35": Architecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", names.QWEN35, qwen3_5, (PLUS_ONE, RATES, TILED), biases=STEPS
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        names.QWEN35_MOE,
        qwen3_5_moe,
        (PLUS_ONE, RATES, TILED),
        sparse=True,
        biases=STEPS,
    ),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", names.LFM2, lfm2, mixed=True, ends=names.LFM2_ENDS, biases=()),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        names.LFM2_MOE,
        lfm2_moe,
        mixed=True,
        ends=names.LFM2_ENDS,
        biases=(CORRECTED,),
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        names.FALCON_H1,
        falcon_h1,
        (RATES,),
        ends=names.FALCON_H1_ENDS,
        biases=(("attention_bias", ATTENTION), ("mlp_bias", BLOCK), ("mamba_conv_bias", ("ssm_conv1d",)), *STEPS),
    ),
    "nemotron_h": _nemotron_h(names.NEMOTRON_H, nemotron_h),
    **ALONE,
    "nemotron_h_moe": _nemotron_h(names.NEMOTRON_H_MOE, nemotron_h_moe),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        names.LLAMA,
        stated(),
        (PLUS_ONE,),
        eps="norm_eps",
        ends=names.BIASED_ENDS,
        biases=(NORMS, ("attention_bias", ATTENTION), ("mlp_bias", UP_DOWN)),
    ),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", names.LLAMA, mistral3, (PAIRS,), biases=()),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        names.GEMMA4,
        gemma4,
        mixed=True,
        uneven=True,
        ends=names.INPUT_ENDS,
        biases=(),
    ),
    "seed_oss": Architecture(
        "seed_oss", "SeedOssForCausalLM", names.SEED_OSS, stated("attention_bias"), biases=(("attention_bias", QKV),)
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", names.HUNYUAN, biases=()),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", names.OLMO2, exaone4, biases=()),
    "arcee": Architecture(
        "arcee", "ArceeForCausalLM", names.LLAMA, conventions=(PAIRS,), biases=(("attention_bias", ATTENTION),)
    ),
    "chatglm": Architecture(
        "glm",
        "GlmForCausalLM",
        names.CHATGLM,
        chatglm,
        biases=(("attention_bias", QKV), ("attention_bias", ("attn_qkv",))),
    ),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM", names.LLAMA, sectioned, biases=((None, QKV),)),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", names.QWEN3, sectioned),
    "qwen3vlmoe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", names.QWEN3_MOE, qwen3_vl_moe),
    "command-r": Architecture("cohere", "CohereForCausalLM", names.QWEN3, cohere, eps="layer_norm_eps"),
    "olmo": Architecture("olmo", "OlmoForCausalLM", names.LLAMA, olmo, (PAIRS,), eps="layer_norm_eps", biases=()),
    "exaone-moe": Architecture("exaone_moe", "ExaoneMoeForCausalLM", names.EXAONE_MOE, exaone_moe, biases=(CORRECTED,)),
    **INDEXED,
    "mistral4": Architecture("mistral4", "Mistral4ForCausalLM", latent.MISTRAL4, mistral4, latent=True, biases=()),
    "kimi-linear": Architecture(
        "kimi_linear",
        "KimiLinearForCausalLM",
        latent.KIMI_LINEAR,
        kimi_linear,
        (RATES,),
        latent=True,
        biases=(CORRECTED, *STEPS),
    ),
    "kimi-k3": Architecture(
        "kimi_linear",
        "KimiLinearForCausalLM",
        latent.KIMI_K3,
        kimi_k3,
        (RATES, FUSED),
        latent=True,
        ends=latent.KIMI_K3_ENDS,
        biases=(CORRECTED, *STEPS),
    ),
    "deepseek4": Architecture(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        latent.DEEPSEEK4,
        deepseek4,
        sparse=True,
        ends=latent.DEEPSEEK4_ENDS,
        layers="layers",
        biases=(CORRECTED,),
    ),
    "mimo2": Architecture(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        latent.MIMO2,
        mimo2,
        mixed=True,
        narrow=True,
        biases=(CORRECTED,),
    ),
    "jamba": Architecture(
        "jamba",
        "JambaForCausalLM",
        names.JAMBA,
        jamba,
        (RATES,),
        mixed=True,
        ends=names.JAMBA_ENDS,
        biases=(("mamba_conv_bias", ("ssm_conv1d",)), *STEPS),
    ),
    "gemma3n": Architecture(
        "gemma3n_text", "Gemma3nForCausalLM", latent.GEMMA3N, gemma3n, ends=latent.GEMMA3N_ENDS, biases=()
    ),
    "apertus": Architecture(
        "apertus",
        "ApertusForCausalLM",
        names.APERTUS,
        apertus,
        lists=names.APERTUS_LISTS,
        biases=(("attention_bias", ATTENTION),),
    ),
    "llama4": Architecture("llama4_text", "Llama4ForCausalLM", names.LLAMA4, llama4, (SEPARATE,), biases=()),
    **PLAIN,
    **MIXTURES,
    LOOPED: NANBEIGE,
}
# Others that go by the same name: by a key that only they have.
VARIANTS: Final[Mapping[str, tuple[str, Architecture]]] = {
    **PLAIN_VARIANTS,
    **MIXTURE_VARIANTS,
    "llama": ("expert_count", Architecture("mixtral", "MixtralForCausalLM", names.MIXTRAL, experts, (PAIRS,))),
    "granitehybrid": ("expert_count", _granite_hybrid(names.GRANITE_HYBRID_MOE)),
    "olmo2": ("attention.sliding_window", Architecture("olmo3", "Olmo3ForCausalLM", names.OLMO2, olmo3)),
}
