"""What the metadata of families whose blocks are experts adds to the config.json."""

from typing import Final

from manyhands.checkpoint.gguf_configs import (
    BY_PART,
    check_sections,
    experts,
    layer_types,
    layers_here,
    lfm2_layers,
    sectioned,
    stated,
)
from manyhands.checkpoint.gguf_dense import exaone4
from manyhands.checkpoint.gguf_keys import Config, GgufKeys

SOFTMAX: Final = 1  # expert_gating_func
SIGMOID: Final = 2
ROOT: Final = 4  # of softplus


def by_sigmoid(keys: GgufKeys, default: int | None = None) -> None:
    """Raises ModelError unless experts are ranked by sigmoids and a correction. default: where the file does not say."""
    if keys.one("expert_gating_func", default) != SIGMOID or not keys.tensors & {"exp_probs_b", "exp_probs_b.bias"}:
        raise keys.refused("its experts are not chosen by sigmoid (expert_gating_func 2) with exp_probs_b")


def gpt_oss(keys: GgufKeys, config: Config) -> Config:
    """The file does not say that the ends of yarn's ramp are not rounded, as OpenAI computes it (llama.cpp rounds them)."""
    keys.only("attention.sliding_window_pattern", 2)
    scaling = config.get("rope_scaling", {"rope_type": "default"})
    return {
        **experts(keys, config),
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "sliding_window": keys.count("attention.sliding_window"),
        "rope_scaling": {**scaling, **({"truncate": False} if scaling["rope_type"] == "yarn" else {})},
    }


def qwen3_moe(keys: GgufKeys, config: Config) -> Config:
    """Weights of chosen experts add up to one."""
    inner = keys.count("expert_feed_forward_length")
    return {**experts(keys, config), "moe_intermediate_size": inner, "norm_topk_prob": True}


def qwen3_vl_moe(keys: GgufKeys, config: Config) -> Config:
    """The same of a model that sees."""
    return {**sectioned(keys, config), **qwen3_moe(keys, config)}


def llama4(keys: GgufKeys, config: Config) -> Config:
    """Scout and Maverick, of which llama.cpp knows what files do not say: chunks of 8,192 positions in three of four layers,
    and that heads of Maverick, which has 128 experts, have no norms.
    """
    keys.only("attention.sliding_window", 8192)
    keys.only("attention.sliding_window_pattern", 4)
    keys.only("expert_gating_func", SIGMOID)
    chosen = experts(keys, config)
    return {
        **chosen,
        "use_qk_norm": chosen["num_local_experts"] != 128,
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": keys.count("interleave_moe_layer_step"),
    }


def lfm2_moe(keys: GgufKeys, config: Config) -> Config:
    """Experts behind the first layers, chosen by sigmoids; their weights add up to one."""
    by_sigmoid(keys)
    return {
        **lfm2_layers(keys, config),
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "num_dense_layers": keys.count("leading_dense_block_count", 0, least=0),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    }


def beside_shared(keys: GgufKeys) -> Config:
    """DeepSeek's blocks: experts in groups beside shared ones; the first layers are dense."""
    groups = keys.count("expert_group_count", 1)
    return {
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0, least=0),
        "n_routed_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_group": groups,
        "topk_group": keys.count("expert_group_used_count", groups),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def glm4_moe(keys: GgufKeys, config: Config) -> Config:
    """GLM-4.5 and 4.6, without the layers that guess tokens ahead; heads have norms where the file has them."""
    by_sigmoid(keys, SIGMOID)
    if keys.get("rope.dimension_sections") is not None:  # of models that see
        check_sections(keys, config)
    return {
        **stated("attention_bias")(keys, config),
        **beside_shared(keys),
        "num_hidden_layers": layers_here(keys, config),
        "use_qk_norm": "attn_q_norm.weight" in keys.tensors,
    }


def exaone_moe(keys: GgufKeys, config: Config) -> Config:
    """EXAONE 4's windows, and experts beside shared ones."""
    by_sigmoid(keys, SIGMOID)
    blocks = beside_shared(keys)
    count, shared = blocks.pop("n_routed_experts"), blocks.pop("n_shared_experts")
    keys.only("expert_shared_feed_forward_length", blocks["moe_intermediate_size"] * shared)
    return {**exaone4(keys, config), **blocks, "num_experts": count, "num_shared_experts": shared}


def dots1(keys: GgufKeys, config: Config) -> Config:
    """Files know no windows, and the published model has none."""
    by_sigmoid(keys)
    return {**beside_shared(keys), "sliding_window": None}


def mimo2(keys: GgufKeys, config: Config) -> Config:
    """MiMo-V2-Flash. Layers with a window see as many positions before their own, as with its publisher: files say one less.
    Old ones do not say what values are multiplied by."""
    by_sigmoid(keys, SIGMOID)
    layers, head = layers_here(keys, config), config["head_dim"]
    windows = keys.switches("attention.sliding_window_pattern", config["num_hidden_layers"]) or []
    heads = keys.counts("attention.head_count_kv", config["num_hidden_layers"], config["num_attention_heads"])
    wide = max(heads)
    if not windows or wide % 2 or heads != [wide if on else wide // 2 for on in windows]:
        raise keys.refused(f"its key heads {heads} are not twice as many in layers with a window as in others")
    if [*keys.layers_with("attn_sinks.weight", layers)] != windows[:layers]:
        raise keys.refused("its layers with a window, and no others, do not have attn_sinks")
    part = {"rope_type": "default", "partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
    bases = {"full": config["rope_theta"], "sliding": keys.number("rope.freq_base_swa", config["rope_theta"])}
    sparse = keys.layers_with("ffn_gate_inp.weight", layers)
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": wide // 2,
        "v_head_dim": keys.count("attention.value_length", head),
        "attention_value_scale": keys.number("attention.value_scale", 0.707),
        "layer_types": layer_types(windows[:layers]),
        "sliding_window": keys.count("attention.sliding_window") + 1,
        "rope_theta": None,
        "partial_rotary_factor": None,
        "rope_parameters": {f"{kind}_attention": {**part, "rope_theta": base} for kind, base in bases.items()},
        "mlp_layer_types": ["sparse" if on else "dense" for on in sparse],
        "n_routed_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "quantization_config": config["quantization_config"]
        | ({BY_PART: True} if "attn_qkv.weight" in keys.tensors else {}),
    }


def minimax_m2(keys: GgufKeys, config: Config) -> Config:
    """Experts are as wide as the file says of blocks; their weights add up to one."""
    by_sigmoid(keys)
    keys.only("expert_feed_forward_length", config["intermediate_size"])
    return experts(keys, config)


def olmoe(keys: GgufKeys, config: Config) -> Config:
    """Weights of chosen experts are not normalised."""
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "norm_topk_prob": False,
    }


def hunyuan_moe(keys: GgufKeys, config: Config) -> Config:
    """Experts are as wide as the block beside them. The larger base of its rotary embedding is in the file."""
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        keys.only(name, config["intermediate_size"])
    keys.only("expert_shared_count", 1)
    for name in ("expert_group_count", "expert_group_used_count"):
        keys.only(name, 0)  # what the converter makes of the false in the published config
    return {"num_experts": keys.count("expert_count"), "moe_topk": keys.count("expert_used_count")}


def ernie4_5_moe(keys: GgufKeys, config: Config) -> Config:
    """Experts from a layer on, ranked by corrected softmax. Where there are shared ones, they are one block."""
    if "exp_probs_b.bias" not in keys.tensors:
        raise keys.refused("its experts are chosen without exp_probs_b, by which ernie4_5_moe ranks them")
    keys.only("interleave_moe_layer_step", 1)  # llama.cpp loads no other
    inner, shared = keys.count("expert_feed_forward_length"), keys.count("expert_shared_count", 0, least=0)
    keys.only("expert_shared_feed_forward_length", inner * shared)
    return {
        "moe_num_experts": keys.count("expert_count"),
        "moe_k": keys.count("expert_used_count"),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": keys.count("leading_dense_block_count", 0, least=0),
    }
