"""What the metadata of nemotron_h, nemotron_h_moe (layers of one block each) and falcon-h1 adds to the config.json."""

from manyhands.checkpoint.gguf_configs import experts
from manyhands.checkpoint.gguf_keys import Config, GgufKeys


def nemotron_h(keys: GgufKeys, config: Config) -> Config:
    """Layers with key heads have attention, those with a width a plain block; the others are of Mamba 2."""
    kinds = _kinds(keys, config, "mlp")
    return {
        **_mamba(keys),
        "layers_block_type": kinds,
        "num_hidden_layers": len(kinds),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rms_norm_eps": None,
        "use_conv_bias": config.get("use_conv_bias", False),
    }


def nemotron_h_moe(keys: GgufKeys, config: Config) -> Config:
    """Experts in place of plain blocks, chosen by sigmoids. Layers behind the last one guess tokens ahead: they are left out,
    and their norm's epsilon is not read."""
    if keys.one("expert_gating_func", 2) != 2 or "exp_probs_b.bias" not in keys.tensors:
        raise keys.refused("its experts are not chosen by sigmoid (expert_gating_func 2) with exp_probs_b")
    keys.get("attention.layer_norm_epsilon")
    keys.only("expert_group_count", 1)
    keys.only("expert_group_used_count", 1)
    keys.only("expert_shared_count", 1)
    found, kinds = nemotron_h(keys, config), _kinds(keys, config, "moe")
    return {
        **found,
        **experts(keys, config),
        "layers_block_type": kinds,
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.count("moe_latent_size", 0, least=0) or None,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def falcon_h1(keys: GgufKeys, config: Config) -> Config:
    """The converter multiplies tensors by the multipliers; a norm is behind the gate, where there is one."""
    if config["tie_word_embeddings"]:
        raise keys.refused("it has no tensor output.weight: its embedding has a multiplier that a head has not")
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


def _kinds(keys: GgufKeys, config: Config, block: str) -> list[str]:
    """Of each layer but those that guess tokens ahead, which come last."""
    layers, ahead = config["num_hidden_layers"], keys.count("nextn_predict_layers", 0, least=0)
    heads = keys.counts("attention.head_count_kv", layers, config["num_attention_heads"])
    widths = keys.counts("feed_forward_length", layers, 0)
    each = list(zip(heads, widths, strict=True))[: max(layers - ahead, 0)]
    for name, numbers in zip(("key heads", "widths of blocks"), zip(*each, strict=True), strict=False):
        if len({*numbers} - {0}) > 1:
            raise keys.refused(f"its layers have different {name}: {sorted({*numbers})}")
    if any(head and width for head, width in each):
        raise keys.refused("some of its layers have both attention and a block")
    return ["full_attention" if head else block if width else "linear_attention" for head, width in each]
