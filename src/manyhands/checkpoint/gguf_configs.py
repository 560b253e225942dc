"""What the metadata of each architecture of GGUF adds to the config.json, and how its tensors differ from the checkpoint's.

What llama.cpp's converter changes in a checkpoint is a convention: it is stated in the config, and the family's recipe asks
for it (Fields.stored). Of a name in ARCHITECTURES the function gets the keys and the config so far.
"""

from collections.abc import Callable
from typing import Final

from manyhands.checkpoint.gguf_keys import Config, GgufKeys

PAIRS: Final = "interleaved_rope"  # rotary pairs lie side by side in the heads of q and k
PLUS_ONE: Final = "norms_plus_one"  # norms hold 1 + weight
SPLIT: Final = "split_kv_b"  # keys and values of latents have tensors of their own, with heads as first dimension
BY_PART: Final = "qkv_by_part"  # one tensor holds all of q, then k, then v
SEPARATE: Final = "separate_gate_up"  # gate and up of experts are tensors of their own
RATES: Final = "negative_rates"  # A_log of linear attention holds -exp of it
LOGLESS: Final = "rates"  # A_log of linear attention holds exp of it
TILED: Final = "tiled_heads"  # value head h of linear attention reads key head h % (key heads)
LINEAR: Final = "linear_as_output"  # a product in place of attention has the name of what follows attention
ONE_NORM: Final = "norm_as_ln_mlp"  # of falcon, where attention and block have one
OUTPUTS: Final = "outputs_first"  # matrices of gpt2 are stored [outputs, inputs]
UNROLLED: Final = "unrolled"  # layers that are gone through again are layers of their own
FUSED: Final = "fused_scores"  # of attention residuals: one vector, norm times projection
SCALED: Final = "scaled_head_norms"  # norms of queries have weights: the factor of queries; those of keys have ones
STRETCHED: Final = "stretched_norms"  # norms of latents hold weights times what latents are multiplied by
INDEX: Final = "separate_index"  # queries and keys of an index are tensors of their own
APART: Final = "separate_qkv_z"  # queries, keys, values of linear attention are one tensor, its gates another


def gemma(keys: GgufKeys, config: Config) -> Config:
    """gemma's activation, which its files do not name."""
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _scale_width(keys: GgufKeys, config: Config, largest: int) -> Config:
    """Queries are scaled by the width of a head; in the largest model of a family by hidden / heads."""
    is_largest = config["num_hidden_layers"] == largest
    width = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": width}


def gemma2(keys: GgufKeys, config: Config) -> Config:
    """Windows and soft caps."""
    return {
        **_scale_width(keys, config, 46),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def gemma3(keys: GgufKeys, config: Config) -> Config:
    """Windows, of which every sixth layer has none, and a table of their own."""
    added = {
        **_scale_width(keys, config, 62),
        "sliding_window": keys.count("attention.sliding_window"),
        "sliding_window_pattern": keys.count("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }
    return {**added, "rope_theta": keys.number("rope.freq_base", 1000000.0)}


def phi3(keys: GgufKeys, config: Config) -> Config:
    """A window where it is shorter than the context."""
    window = keys.count("attention.sliding_window", 0, least=0)
    return {"sliding_window": window} if 0 < window < config["max_position_embeddings"] else {}


def experts(keys: GgufKeys, config: Config) -> Config:
    """How many experts there are, and how many a row takes."""
    return {"num_local_experts": keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def qwen2_moe(keys: GgufKeys, config: Config) -> Config:
    """Widths of experts, which old files leave out."""
    used, inner = keys.count("expert_used_count"), config["intermediate_size"]
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.count("expert_feed_forward_length", inner // used),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length", inner),
    }


def stated(*switches: str) -> Callable[[GgufKeys, Config], Config]:
    """Fields that mean something else where they are absent: switches are off, and whole heads turn."""
    return lambda keys, config: (
        {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
        | {name: config.get(name, False) for name in switches}
    )


def granite(keys: GgufKeys, config: Config) -> Config:
    """Four multipliers. Files of Granite 4.0 without Mamba say the sizes of what they do not have."""
    keys.only("rope.scaling.finetuned", True)  # the switch of rotary embeddings
    for name in (*_MAMBA.values(), "ssm.inner_size", "expert_shared_feed_forward_length"):
        keys.get(name)
    return _multipliers(keys, config)


def _multipliers(keys: GgufKeys, config: Config) -> Config:
    return {
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale"),
    }


def granite_moe(keys: GgufKeys, config: Config) -> Config:
    """The same with experts, none of which every row takes."""
    keys.only("rope.scaling.finetuned", True)
    return {**_multipliers(keys, config), **experts(keys, config)}


_MAMBA: Final = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}


def granite_hybrid(keys: GgufKeys, config: Config) -> Config:
    """Layers without key heads are of Mamba 2; where rows choose no experts, the width of blocks is the shared one's."""
    inner, hidden = keys.count("ssm.inner_size"), config["hidden_size"]
    if inner % hidden:
        raise keys.refused(f"its layers of Mamba are {inner} wide, no multiple of {hidden}")
    shared = keys.count("expert_shared_feed_forward_length", config["intermediate_size"])
    has_experts = keys.count("expert_count", 0, least=0) > 0
    return {
        **_multipliers(keys, config),
        **{field: keys.count(name) for field, name in _MAMBA.items()},
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": config.get("mamba_conv_bias", False),
        "layer_types": mixed_layers(keys, config, "mamba"),
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": shared if has_experts else config["intermediate_size"],
        **(experts(keys, config) if has_experts else {"num_local_experts": 0}),
    }


def stated_windows(keys: GgufKeys, layers: int) -> list[bool]:
    """Which layers have a window. Raises ModelError where the file does not say."""
    windows = keys.switches("attention.sliding_window_pattern", layers)
    if windows is None:
        raise keys.refused("it does not say by attention.sliding_window_pattern which layers have a window")
    return windows


def layer_types(windows: list[bool]) -> list[str]:
    """As transformers calls layers with a window and without."""
    return ["sliding_attention" if is_on else "full_attention" for is_on in windows]


def olmo3(keys: GgufKeys, config: Config) -> Config:
    """Layers with a window have positions that are not scaled."""
    windows = keys.switches("attention.sliding_window_pattern", config["num_hidden_layers"])
    types = {} if windows is None else {"layer_types": layer_types(windows)}
    theta = {"rope_theta": config["rope_theta"]}
    scaled = theta | config.get("rope_scaling", {"rope_type": "default"})
    return {
        "sliding_window": keys.count("attention.sliding_window"),
        **types,
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"full_attention": scaled, "sliding_attention": {"rope_type": "default", **theta}},
    }


def phi2(keys: GgufKeys, config: Config) -> Config:
    """Files of Microsoft's first checkpoint, which most are, have one tensor for q, k and v."""
    fused = {BY_PART: True} if "attn_qkv.weight" in keys.tensors else {}
    return stated()(keys, config) | {"quantization_config": config["quantization_config"] | fused}


def stablelm(keys: GgufKeys, config: Config) -> Config:
    """Like llama.cpp by the tensors: the converter says that residuals are parallel where the checkpoint says nothing."""
    keys.get("use_parallel_residual")
    is_parallel, has_norms = "ffn_norm.weight" not in keys.tensors, "attn_q_norm.weight" in keys.tensors
    return stated()(keys, config) | {"use_parallel_residual": is_parallel, "qk_layernorm": has_norms}


def gpt_neox(keys: GgufKeys, config: Config) -> Config:
    """Fields that only this family has."""
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise keys.refused("its heads share keys, which gpt_neox has not")
    return {
        "num_key_value_heads": None,
        "rotary_emb_base": config["rope_theta"],
        "rotary_pct": config.get("partial_rotary_factor", 1.0),
        "partial_rotary_factor": None,
        "attention_bias": config.get("attention_bias", False),
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
    }


def cohere(keys: GgufKeys, config: Config) -> Config:
    """Heads have norms where the file has them."""
    return {"use_qk_norm": "attn_q_norm.weight" in keys.tensors, "logit_scale": keys.number("logit_scale")}


def olmo(keys: GgufKeys, config: Config) -> Config:
    """Norms without weights, whose epsilon is the family's own."""
    if config["layer_norm_eps"] != 1e-5:
        raise keys.refused(f"its attention.layer_norm_epsilon is {config['layer_norm_eps']}; olmo has 1e-05")
    return {"layer_norm_eps": None, "clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None}


def cohere2(keys: GgufKeys, config: Config) -> Config:
    """Windows, of which every fourth layer has none."""
    keys.only("attention.sliding_window_pattern", 4)
    return {"sliding_window": keys.count("attention.sliding_window"), "logit_scale": keys.number("logit_scale")}


def latent(keys: GgufKeys, rotary: int, key: int, value: int) -> Config:
    """Sizes of latent attention whose queries are `key` wide, and turn in `rotary` of these columns."""
    if key <= rotary:
        raise keys.refused(f"queries of a head are {key} wide; more than the {rotary} that turn is needed")
    return {
        "q_lora_rank": keys.count("attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
    }


def minicpm3(keys: GgufKeys, config: Config) -> Config:
    """Scales of embedding, branches and logits are the family's own: files do not state them."""
    value = keys.count("attention.value_length", config["hidden_size"] // config["num_attention_heads"])
    return latent(keys, config["head_dim"], keys.count("attention.key_length"), value)


def _linear(keys: GgufKeys, config: Config) -> Config:
    """Sizes of linear attention, and in which layers there is attention."""
    heads, inner = keys.count("ssm.time_step_rank"), keys.count("ssm.inner_size")
    if inner % heads:
        raise keys.refused(f"its linear attention has {inner} columns of values, no multiple of its {heads} heads")
    return stated()(keys, config) | {
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "full_attention_interval": keys.count("full_attention_interval", 4),
    }


def qwen3_next(keys: GgufKeys, config: Config) -> Config:
    """Older files have what enters linear attention as the checkpoint has it."""
    apart = {} if "ssm_in.weight" in keys.tensors else {APART: True}
    stored = {"quantization_config": config["quantization_config"] | apart}
    return {**_linear(keys, config), **qwen2_moe(keys, config), **stored, "norm_topk_prob": True}


def check_sections(keys: GgufKeys, config: Config) -> None:
    """For text the sections of heads turn alike. Raises ModelError if they are not all the columns that turn."""
    turned = keys.count("rope.dimension_count", config["head_dim"])
    sections = keys.counts("rope.dimension_sections", 4, 0)
    if sum(sections[:3]) * 2 != turned:
        raise keys.refused(
            f"its rope.dimension_sections {sections} are not the {turned // 2} pairs of columns that turn"
        )


def sectioned(keys: GgufKeys, config: Config) -> Config:
    """The text part of a model that sees. What it adds to the rows of images behind the first layers, text has not."""
    check_sections(keys, config)
    for name in ("n_deepstack_layers", "deepstack_mapping"):
        keys.get(name)
    return {}


def layers_here(keys: GgufKeys, config: Config) -> int:
    """How many layers compute: those behind them guess tokens ahead, and are left out."""
    ahead = keys.count("nextn_predict_layers", 0, least=0)
    return int(config["num_hidden_layers"]) - ahead


def qwen3_5(keys: GgufKeys, config: Config) -> Config:
    """Heads in sections; layers that guess tokens ahead are left out."""
    check_sections(keys, config)
    return {**_linear(keys, config), "num_hidden_layers": layers_here(keys, config)}


def qwen3_5_moe(keys: GgufKeys, config: Config) -> Config:
    """The same with experts."""
    return {**qwen3_5(keys, config), **qwen2_moe(keys, config)}


def mixed_layers(keys: GgufKeys, config: Config, other: str) -> list[str]:
    """Kinds of the layers: those without key heads are of the `other`."""
    heads = keys.counts("attention.head_count_kv", config["num_hidden_layers"], config["num_attention_heads"])
    if len({*heads} - {0}) > 1:
        raise keys.refused(f"its layers have different numbers of key heads: {sorted({*heads})}")
    return ["full_attention" if count else other for count in heads]


def lfm2_layers(keys: GgufKeys, config: Config) -> Config:
    """Layers without key heads have a short convolution."""
    return {
        "layer_types": mixed_layers(keys, config, "conv"),
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "rms_norm_eps": None,
    }


def lfm2(keys: GgufKeys, config: Config) -> Config:
    """The width of a block is the whole one."""
    return {**lfm2_layers(keys, config), "block_auto_adjust_ff_dim": False}
