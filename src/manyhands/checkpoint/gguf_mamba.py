"""What the metadata of nemotron_h, nemotron_h_moe (layers of one block each), falcon-h1, jamba, mamba adds to config.json."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from manyhands.checkpoint import gguf_names as names
from manyhands.checkpoint.gguf_architecture import STEPS, Architecture
from manyhands.checkpoint.gguf_configs import RATES, experts, mixed_layers
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


def jamba(keys: GgufKeys, config: Config) -> Config:
    """Mamba 1 in layers without key heads; experts in those that have a router."""
    layers, hidden, inner = config["num_hidden_layers"], config["hidden_size"], keys.count("ssm.inner_size")
    if inner % hidden:
        raise keys.refused(f"its layers of Mamba are {inner} wide, no multiple of {hidden}")
    full = [kind == "full_attention" for kind in mixed_layers(keys, config, "mamba")]
    sparse = keys.layers_with("ffn_gate_inp.weight", layers)
    blocks: Config = {"num_experts": 1, "num_experts_per_tok": 1}
    if any(sparse):
        count, chosen = keys.count("expert_count"), keys.count("expert_used_count")
        blocks = {**_every(keys, sparse, "expert_layer"), "num_experts": count, "num_experts_per_tok": chosen}
    return {
        **_every(keys, full, "attn_layer"),
        **blocks,
        "mamba_expand": inner // hidden,
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_dt_rank": keys.count("ssm.time_step_rank"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_conv_bias": config.get("mamba_conv_bias", False),
    }


def _mamba1_alone(keys: GgufKeys, config: Config) -> Config:
    """Mamba 1 in every layer; with norms inside it is Falcon-Mamba, whose epsilon there the file does not say."""
    kind = (
        ("falcon_mamba", "FalconMambaForCausalLM")
        if keys.flag("ssm.dt_b_c_rms", False)
        else ("mamba", "MambaForCausalLM")
    )
    return {
        **_alone(keys, config),
        "model_type": kind[0],
        "architectures": [kind[1]],
        "intermediate_size": keys.count("ssm.inner_size"),
        "time_step_rank": keys.count("ssm.time_step_rank"),
    }


def _mamba2_alone(keys: GgufKeys, config: Config) -> Config:
    """Mamba 2 in every layer."""
    found, inner = _mamba(keys), keys.count("ssm.inner_size")
    if inner % config["hidden_size"]:
        raise keys.refused(f"its layers of Mamba are {inner} wide, no multiple of {config['hidden_size']}")
    return {
        **_alone(keys, config),
        "expand": inner // config["hidden_size"],
        "intermediate_size": inner,
        "num_heads": found["mamba_num_heads"],
        "head_dim": found["mamba_head_dim"],
        "n_groups": found["n_groups"],
    }


def _alone(keys: GgufKeys, config: Config) -> Config:
    """What both have; and not what attention has, of which files say that there are no heads."""
    if config["num_attention_heads"] or config["num_key_value_heads"]:
        raise keys.refused("it has heads of attention, which no layer of Mamba has")
    return {
        **dict.fromkeys(("head_dim", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta")),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "state_size": keys.count("ssm.state_size"),
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "use_conv_bias": config.get("use_conv_bias", False),
    }


def _every(keys: GgufKeys, found: Sequence[bool], name: str) -> Config:
    """Period and offset of the layers that are on. Raises ModelError where they have none."""
    layers = len(found)
    on = [i for i, is_on in enumerate(found) if is_on] or [layers]
    period = max(on[1] - on[0] if len(on) > 1 else layers, on[0] + 1)
    if [i % period == on[0] for i in range(layers)] != list(found):
        raise keys.refused(f"its layers {on} are not one of each {period}, as {name}_period of jamba has them")
    return {f"{name}_period": period, f"{name}_offset": on[0]}


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


def _architecture(kind: str, tensors: Mapping[str, str], more: Callable[[GgufKeys, Config], Config]) -> Architecture:
    """Of a model that has layers of Mamba alone."""
    return Architecture(
        kind,
        f"{kind.title()}ForCausalLM",
        tensors,
        more,
        (RATES,),
        mixed=True,
        uneven=True,
        varied=True,
        ends=names.NEMOTRON_H_ENDS,
        layers="backbone.layers",
        biases=(("use_conv_bias", ("ssm_conv1d",)), *STEPS),
    )


ALONE: Final = {
    "mamba": _architecture("mamba", names.MAMBA, _mamba1_alone),
    "mamba2": _architecture("mamba2", names.NEMOTRON_H, _mamba2_alone),
}
