"""More architectures of GGUF with attention of the usual kind: what their metadata adds, and their table."""

from collections.abc import Mapping
from typing import Final

from manyhands.checkpoint import gguf_names as names
from manyhands.checkpoint.gguf import shown
from manyhands.checkpoint.gguf_architecture import ATTENTION, NORMS, UP_DOWN, Architecture
from manyhands.checkpoint.gguf_configs import (
    BY_PART,
    LINEAR,
    ONE_NORM,
    OUTPUTS,
    PAIRS,
    PLUS_ONE,
    SCALED,
    granite,
    layer_types,
    stated,
    stated_windows,
)
from manyhands.checkpoint.gguf_keys import Config, GgufKeys

_BLOOM: Final = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_BLOOM_ENDS: Final = {
    **names.FALCON_ENDS,
    "token_embd_norm.weight": "transformer.word_embeddings_layernorm.weight",
    "token_embd_norm.bias": "transformer.word_embeddings_layernorm.bias",
}
_MPT: Final = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_MPT_ENDS: Final = {
    "token_embd.weight": "transformer.wte.weight",
    "output_norm.weight": "transformer.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_GPT2: Final = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_ENDS: Final = {
    "token_embd.weight": "transformer.wte.weight",
    "position_embd.weight": "transformer.wpe.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
_GRANITE_SWA: Final = {**names.LLAMA, "attn_sinks.weight": "self_attn.sinks"}
_GRANITE_MOE_SWA: Final = {
    **_GRANITE_SWA,
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_up_exps.weight": "block_sparse_moe.experts.gate_up_proj",
    "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}


def granite_swa(keys: GgufKeys, config: Config) -> Config:
    """Granite with windows; layers may have no positions."""
    layers = config["num_hidden_layers"]
    windows = stated_windows(keys, layers)
    turns = keys.switches("attention.rope_pattern", layers) or [True] * layers
    by_layer = {} if all(turns) else {"layer_rope_theta": [config["rope_theta"] if on else 0 for on in turns]}
    window = {"sliding_window": keys.count("attention.sliding_window"), "layer_types": layer_types(windows)}
    return {**granite(keys, config), **window, **by_layer}


def granite_moe_swa(keys: GgufKeys, config: Config) -> Config:
    """The same with experts, perhaps beside a shared one."""
    return {
        **granite_swa(keys, config),
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "shared_intermediate_size": keys.count("expert_shared_feed_forward_length", 0, least=0),
    }


def _deci_heads(most: int, heads: int, key_heads: int) -> Config:
    group = most // key_heads if key_heads else None
    return {"n_heads_in_group": group, "no_op": not heads, "replace_with_linear": bool(heads and not key_heads)}


def _deci_block(width: int) -> Config:
    return {"intermediate_size": width or None, "no_op": not width, "replace_with_linear": False}


def deci(keys: GgufKeys, config: Config) -> Config:
    """Llama Nemotron 51B and Super: layers have key heads and blocks of their own, or lack them. A layer with heads and no
    key heads has one product in place of attention."""
    layers, most = config["num_hidden_layers"], config["num_attention_heads"]
    heads, inner = keys.counts("attention.head_count", layers, most), keys.counts("feed_forward_length", layers, 0)
    key_heads = keys.counts("attention.head_count_kv", layers, most)
    if any(one not in (0, most) for one in heads) or any(one and most % one for one in key_heads):
        raise keys.refused(
            f"its layers have other numbers of heads than 0 and {most}, or of key heads than its divisors"
        )
    kinds = zip(heads, key_heads, inner, strict=True)
    blocks = [{"attention": _deci_heads(most, own, kv), "ffn": _deci_block(width)} for own, kv, width in kinds]
    return {"block_configs": blocks, "num_key_value_heads": None, "intermediate_size": None}


def orion(keys: GgufKeys, config: Config) -> Config:
    """Orion-14B: stablelm with layers one after the other, whose heads turn whole."""
    return stated("use_parallel_residual", "qk_layernorm", "use_qkv_bias")(keys, config)


def muse_glimmer(keys: GgufKeys, config: Config) -> Config:
    """Muse Glimmer (text): layers with a window have positions, the others have none."""
    if "rope_scaling" in config:
        raise keys.refused("its positions are scaled, of which llama.cpp says nothing for layers with a window")
    windows = stated_windows(keys, config["num_hidden_layers"])
    theta = keys.number("rope.freq_base_swa", config["rope_theta"])
    return {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "layer_rope_theta": [theta if is_on else 0 for is_on in windows],
        "layer_types": layer_types(windows),
        "sliding_window": keys.count("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "output_multiplier": keys.number("logit_scale"),
    }


def bitnet(keys: GgufKeys, config: Config) -> Config:
    """Files of BitNet's first models name no activation, and theirs is silu, as in llama.cpp (which takes it for all); their
    heads share no keys. Those of BitNet b1.58 2B-4T do, and it has squared relu."""
    kind = keys.one("hidden_activation")
    if kind is None and config["num_key_value_heads"] != config["num_attention_heads"]:
        raise keys.refused("it does not say by hidden_activation what its blocks compute: silu, or relu2 as in 2B-4T")
    if kind not in (None, "silu", "relu2"):
        raise keys.refused(f"its hidden_activation is {shown(kind)}; served are silu and relu2")
    return {"hidden_act": kind or "silu"}


def falcon(keys: GgufKeys, config: Config) -> Config:
    """Falcon 7B has one key head, 40B and 180B a second norm. Files of Falcon 2 11B, which has neither, must state its base
    frequency: llama.cpp's converter writes none."""
    kv_heads, has_two = config["num_key_value_heads"], "attn_norm_2.weight" in keys.tensors
    if kv_heads > 1 and not has_two and keys.one("rope.freq_base") is None:
        raise keys.refused("it has several key heads and one norm, as Falcon 2, and does not state rope.freq_base")
    return {
        "new_decoder_architecture": kv_heads > 1 or has_two,
        "num_ln_in_parallel_attn": 2 if has_two else 1,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": config["intermediate_size"],
    }


def gpt2(keys: GgufKeys, config: Config) -> Config:
    """No head turns."""
    return {"n_inner": config["intermediate_size"], "rope_theta": None}


def starcoder(keys: GgufKeys, config: Config) -> Config:
    """gpt2 with one key head."""
    return {**gpt2(keys, config), "multi_query": config["num_key_value_heads"] == 1}


def mpt(keys: GgufKeys, config: Config) -> Config:
    """No head turns; the slopes are transformers'. llama.cpp has others where the number of heads is no power of two."""
    if (bias_max := keys.one("attention.max_alibi_bias")) != 8.0:
        raise keys.refused(f"mpt.attention.max_alibi_bias is {shown(bias_max)}; served is 8.0")
    return {"rope_theta": None, "attn_config": {"clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None}}


PLAIN: Final[Mapping[str, Architecture]] = {
    "exaone": Architecture("llama", "LlamaForCausalLM", names.LLAMA),
    "deci": Architecture(
        "nemotron-nas",
        "DeciLMForCausalLM",
        names.LLAMA,
        deci,
        (PAIRS, LINEAR),
        mixed=True,
        uneven=True,
        varied=True,
    ),
    "internlm2": Architecture("llama", "LlamaForCausalLM", names.LLAMA, conventions=(PAIRS,)),
    "minicpm": Architecture("granite", "GraniteForCausalLM", names.LLAMA, granite, (PAIRS,)),
    "pangu-embedded": Architecture("llama", "LlamaForCausalLM", names.LLAMA),
    "granite_swa": Architecture("granite_swa", "GraniteSWAForCausalLM", _GRANITE_SWA, granite_swa, (PAIRS,)),
    "muse-glimmer": Architecture(
        "muse_glimmer_text",
        "MuseGlimmerForCausalLM",
        names.MUSE_GLIMMER,
        muse_glimmer,
        (PAIRS, PLUS_ONE, SCALED),
    ),
    "maincoder": Architecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", names.HUNYUAN, conventions=(PAIRS,), biases=()
    ),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        names.FALCON,
        falcon,
        (BY_PART, ONE_NORM),
        eps="layer_norm_epsilon",
        ends=names.FALCON_ENDS,
        layers="transformer.h",
        biases=((None, ("attn_norm", "attn_norm_2")),),
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2,
        gpt2,
        (OUTPUTS,),
        eps="layer_norm_epsilon",
        ends=_GPT2_ENDS,
        layers="transformer.h",
        biases=((None, tuple(_GPT2)),),
    ),
    "bloom": Architecture(
        "bloom",
        "BloomForCausalLM",
        _BLOOM,
        lambda keys, config: {"rope_theta": None},
        (BY_PART,),
        eps="layer_norm_epsilon",
        ends=_BLOOM_ENDS,
        layers="transformer.h",
        biases=((None, tuple(_BLOOM)),),
    ),
    "mpt": Architecture(
        "mpt",
        "MptForCausalLM",
        _MPT,
        mpt,
        eps="layer_norm_epsilon",
        ends=_MPT_ENDS,
        layers="transformer.blocks",
        biases=(),
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        _GPT2,
        starcoder,
        (BY_PART,),
        eps="layer_norm_epsilon",
        ends=_GPT2_ENDS,
        layers="transformer.h",
        biases=((None, tuple(_GPT2)),),
    ),
    "bitnet": Architecture("bitnet", "BitNetForCausalLM", names.BITNET, bitnet, biases=()),
    "orion": Architecture(
        "stablelm",
        "StableLmForCausalLM",
        names.LLAMA,
        orion,
        eps="layer_norm_eps",
        ends=names.BIASED_ENDS,
        biases=(NORMS,),
    ),
    "jais2": Architecture(
        "jais2",
        "Jais2ForCausalLM",
        names.LLAMA,
        stated("attention_bias", "mlp_bias"),
        eps="layer_norm_eps",
        ends=names.BIASED_ENDS,
        biases=(NORMS, ("attention_bias", ATTENTION), ("mlp_bias", UP_DOWN)),
    ),
}
PLAIN_VARIANTS: Final[Mapping[str, tuple[str, Architecture]]] = {
    "granite_swa": (
        "expert_count",
        Architecture(
            "granitemoe_swa",
            "GraniteMoeSWAForCausalLM",
            _GRANITE_MOE_SWA,
            granite_moe_swa,
            (PAIRS,),
            biases=(("attention_bias", ATTENTION),),
        ),
    ),
}
