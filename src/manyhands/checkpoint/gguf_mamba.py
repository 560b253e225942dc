"""What the metadata of nemotron_h, nemotron_h_moe (layers of one block each) and falcon-h1 adds to the config.json."""

from manyhands.checkpoint.gguf_configs import experts
from manyhands.checkpoint.gguf_experts import by_sigmoid
from manyhands.checkpoint.gguf_keys import Config, GgufKeys


def nemotron_h(keys: GgufKeys, config: Config) -> Config:
    """Layers that state key heads have attention, layers that state a width have a plain block, others are of Mamba 2."""
    return _single_blocks(keys, config, "mlp")


def _single_blocks(keys: GgufKeys, config: Config, wide: str) -> Config:
    """What both architectures add. wide: the kind of layers that state a width."""
    kinds = _kinds(keys, config, wide)
    keys.get("attention.layer_norm_epsilon")  # llama.cpp reads it too; norms use attention.layer_norm_rms_epsilon
    return {
        **_mamba(keys),
        "layers_block_type": kinds,
        "num_hidden_layers": len(kinds),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rms_norm_eps": None,
        "use_conv_bias": config.get("use_conv_bias", False),
    }


def nemotron_h_moe(keys: GgufKeys, config: Config) -> Config:
    """Experts in place of plain blocks, ranked by sigmoid. Layers of multi-token prediction, which come last, are left out."""
    by_sigmoid(keys, default=2)
    keys.only("expert_group_count", 1)
    keys.only("expert_group_used_count", 1)
    keys.only("expert_shared_count", 1)
    return {
        **_single_blocks(keys, config, "moe"),
        **experts(keys, config),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.count("moe_latent_size", 0, least=0) or None,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def falcon_h1(keys: GgufKeys, config: Config) -> Config:
    """Tensors have been multiplied by the multipliers when the file was made. If there is a norm, it is behind the gate."""
    if config["tie_word_embeddings"]:
        raise keys.refused(
            "it has no tensor output.weight, and its token_embd.weight, times embedding_multiplier, is no head"
        )
    found, inner = _mamba(keys), keys.count("ssm.inner_size")
    return {
        "mamba_n_heads": found["mamba_num_heads"],
        "mamba_n_groups": found["n_groups"],
        "mamba_d_state": found["ssm_state_size"],
        "mamba_d_conv": found["conv_kernel"],
        "mamba_d_ssm": inner,
        "mamba_conv_bias": config.get("mamba_conv_bias", False),
        "mamba_rms_norm": "ssm_norm.weight" in keys.tensors,
        "mamba_norm_before_gate": False,
    }


def _mamba(keys: GgufKeys) -> Config:
    inner, heads = keys.count("ssm.inner_size"), keys.count("ssm.time_step_rank")
    if inner % heads:
        raise keys.refused(f"its layers of Mamba are {inner} wide, no multiple of their {heads} heads")
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": keys.count("ssm.group_count"),
        "ssm_state_size": keys.count("ssm.state_size"),
        "conv_kernel": keys.count("ssm.conv_kernel"),
    }


def _kinds(keys: GgufKeys, config: Config, wide: str) -> list[str]:
    """The kind of each layer, but for those of multi-token prediction, which come last. Raises ModelError."""
    layers, ahead = config["num_hidden_layers"], keys.count("nextn_predict_layers", 0, least=0)
    heads = keys.counts("attention.head_count_kv", layers, config["num_attention_heads"])
    widths = keys.counts("feed_forward_length", layers, 0)
    each = list(zip(heads, widths, strict=True))[: max(layers - ahead, 0)]
    for name, numbers in zip(("key heads", "widths of blocks"), zip(*each, strict=True), strict=False):
        if len({*numbers} - {0}) > 1:
            raise keys.refused(f"its layers have different {name}: {sorted({*numbers})}")
    if any(head and width for head, width in each):
        raise keys.refused("some of its layers have both attention and a block")
    return ["full_attention" if head else wide if width else "linear_attention" for head, width in each]
