"""What the metadata of families with latent attention adds to the config.json: DeepSeek's, and those made like them."""

from typing import Final

import numpy as np

from manyhands.checkpoint.gguf import shown
from manyhands.checkpoint.gguf_configs import SEPARATE, SPLIT, latent, layers_here, mixed_layers
from manyhands.checkpoint.gguf_experts import ROOT, SIGMOID, SOFTMAX, beside_shared, by_sigmoid
from manyhands.checkpoint.gguf_keys import Config, GgufKeys, layers_ahead

_SHARED_FROM: Final = 1 << 20  # the context from which on a glm-dsa without indexer.types is GLM-5.2


def latents(keys: GgufKeys, config: Config) -> Config:
    """Sizes of latent attention, which newer files describe as attention with one key head; and its yarn."""
    is_split = "attn_k_b.weight" in keys.tensors
    suffix = "_length_mla" if is_split else "_length"
    for name in ("key_length", "value_length"):
        keys.get(f"attention.{name}")
    key, value = (keys.count(f"attention.{name}{suffix}") for name in ("key", "value"))
    return {
        "num_hidden_layers": layers_here(keys, config),
        "quantization_config": config["quantization_config"] | ({SPLIT: True} if is_split else {}),
        **latent(keys, config["head_dim"], key, value),
        "rope_scaling": _scaled_with_log(keys, config.get("rope_scaling")),
    }


def deepseek2(keys: GgufKeys, config: Config) -> Config:
    """DeepSeek-V2 and V3; GLM-4.7-Flash is computed as V3 is. V2 chooses experts by softmax, which most files do not say."""
    return {**latents(keys, config), **beside_shared(keys), **_choice(keys, config)}


def _choice(keys: GgufKeys, config: Config) -> Config:
    """The family that chooses experts as the file does: by sigmoids, or V2 by softmax. Raises ModelError for others."""
    is_flash = config["num_hidden_layers"] in (47, 48) and config["vocab_size"] == 154880  # so llama.cpp knows it, too
    if keys.one("expert_gating_func", SIGMOID if is_flash else SOFTMAX) != SOFTMAX:
        by_sigmoid(keys, SIGMOID)
        return {}
    _check_softmax(keys, "deepseek_v2")
    method = "group_limited_greedy" if keys.count("expert_group_count", 1) > 1 else "greedy"
    return {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


def _check_softmax(keys: GgufKeys, family: str) -> None:
    """Raises ModelError unless experts are chosen by softmax alone."""
    if keys.one("expert_gating_func", SOFTMAX) != SOFTMAX:
        raise keys.refused(f"its experts are not chosen by softmax (expert_gating_func 1), as in {family}")
    if "exp_probs_b.bias" in keys.tensors:
        raise keys.refused("its experts are chosen by softmax (expert_gating_func 1 or none) with exp_probs_b")


def _scaled_with_log(keys: GgufKeys, scaling: Config | None) -> Config | None:
    """Yarn with the factor that scores are multiplied by."""
    log = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not scaling or scaling["rope_type"] != "yarn":
        return scaling
    if log <= 0:
        raise keys.refused("its positions are scaled by yarn without rope.scaling.yarn_log_multiplier")
    mscale = float(str(np.float32(10 * log)))  # the converter writes a tenth
    return scaling | {"mscale": mscale, "mscale_all_dim": mscale}


def indexer(keys: GgufKeys) -> Config:
    """What chooses positions: its heads, their width, and how many it chooses."""
    names = {"n_heads": "head_count", "head_dim": "key_length", "topk": "top_k"}
    return {f"index_{field}": keys.count(f"attention.indexer.{name}") for field, name in names.items()}


def deepseek32(keys: GgufKeys, config: Config) -> Config:
    """DeepSeek-V3.2: V3 with an indexer."""
    by_sigmoid(keys, SIGMOID)
    return {
        **latents(keys, config),
        **beside_shared(keys),
        **indexer(keys),
    }


def glm_dsa(keys: GgufKeys, config: Config) -> Config:
    """GLM-5 and 5.1; of 5.2 three of four layers use what another has chosen, which first files do not say."""
    made = deepseek32(keys, config)
    layers = made["num_hidden_layers"]
    is_5_2 = config["max_position_embeddings"] >= _SHARED_FROM
    default = [i < 2 or i % 4 == 2 for i in range(layers)] if is_5_2 else None
    full = keys.switches("attention.indexer.types", layers) or default
    return made if full is None else {**made, "indexer_types": ["full" if on else "shared" for on in full]}


def mistral4(keys: GgufKeys, config: Config) -> Config:
    """Mistral Small 4. Files that were made of transformers' form do not say how queries grow: then as in its checkpoint."""
    _check_softmax(keys, "mistral4")
    if keys.count("expert_group_count", 1) > 1:
        raise keys.refused("its experts are chosen by softmax in groups, which mistral4 does not")
    made = latents(keys, config)
    scaling = made.pop("rope_scaling") or {"rope_type": "default"}
    length = scaling.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    keys.only("attention.temperature_length", length)
    if "ffn_gate_exps.weight" in keys.tensors:
        made["quantization_config"][SEPARATE] = True
    return {
        **made,
        **beside_shared(keys),
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            **scaling,
            "rope_theta": config["rope_theta"],
            "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.1),
        },
    }


def deepseek4(keys: GgufKeys, config: Config) -> Config:
    """DeepSeek-V4. Newer files have the layers that guess tokens ahead, which come last; others count them all the same."""
    if keys.one("expert_gating_func") != ROOT:
        raise keys.refused(f"its experts are not chosen by the root of softplus (expert_gating_func {ROOT})")
    keys.only("expert_shared_count", 1)
    keys.only("expert_weights_norm", True)
    keys.get("nextn_predict_layers")
    layers, inner = (
        config["num_hidden_layers"] - layers_ahead(keys.gguf, keys.arch),
        keys.count("expert_feed_forward_length"),
    )
    ratios = keys.get("attention.compress_ratios")
    if not isinstance(ratios, np.ndarray) or len(ratios) < layers:
        raise keys.refused(f"its attention.compress_ratios are not a number for each of {layers} layers")
    limit = one_limit(keys, "swiglu_clamp_exp")
    one_limit(keys, "swiglu_clamp_shexp", limit)
    return {
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "moe_intermediate_size": inner,
        "q_lora_rank": keys.count("attention.q_lora_rank"),
        "o_lora_rank": keys.count("attention.output_lora_rank"),
        "o_groups": keys.count("attention.output_group_count"),
        "compress_ratios": ratios[:layers].tolist(),
        "compress_rope_theta": keys.number("attention.compress_rope_freq_base"),
        "sliding_window": keys.count("attention.sliding_window"),
        "swiglu_limit": limit,
        "n_routed_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "num_hash_layers": keys.count("hash_layer_count", least=0),
        **indexer(keys),
        **streams(keys),
    }


def streams(keys: GgufKeys) -> Config:
    """Residual streams: how many, and how they mix."""
    return {
        "hc_mult": keys.count("hyper_connection.count"),
        "hc_sinkhorn_iters": keys.count("hyper_connection.sinkhorn_iterations"),
        "hc_eps": keys.number("hyper_connection.epsilon"),
    }


def one_limit(keys: GgufKeys, name: str, default: float | None = None) -> float:
    """What gates are held below, in all layers."""
    value = keys.get(name, default)
    each = np.atleast_1d(value) if isinstance(value, float | np.ndarray) else np.empty(0)
    first = float(str(np.float32(each[0]))) if len(each) and bool((each == each[0]).all()) else None
    if first is None or (default is not None and first != default):
        raise keys.refused(f"its {name} is {shown(value)}; one number for all layers is needed")
    return first


def kimi_linear(keys: GgufKeys, config: Config) -> Config:
    """Layers without key heads have linear attention, with as many heads as the others. Chosen experts add up to one."""
    by_sigmoid(keys)
    keys.only("expert_weights_norm", True)
    kinds = mixed_layers(keys, config, "linear_attention")
    blocks = beside_shared(keys)
    blocks["num_local_experts"] = blocks.pop("n_routed_experts")
    return {
        **latents(keys, config),
        **blocks,
        "norm_topk_prob": True,
        "layer_types": kinds,
        "linear_attn_config": channel_linear(keys, config),
    }


def channel_linear(keys: GgufKeys, config: Config) -> Config:
    """Sizes of linear attention, with as many heads as the other layers."""
    return {
        "num_heads": config["num_attention_heads"],
        "head_dim": keys.count("kda.head_dim"),
        "short_conv_kernel_size": keys.count("ssm.conv_kernel"),
    }


_K3_FIELDS: Final = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}


def kimi_k3(keys: GgufKeys, config: Config) -> Config:
    """Kimi-K3, in the fields of its published config. Layers are of the kinds that kimi_linear has."""
    by_sigmoid(keys)
    linear, width = _k3_linear(keys, config), keys.count("expert_latent_length", 0, least=0)
    bound = keys.number("activation.situ_linear_beta")
    return {
        **latents(keys, config),
        **{_K3_FIELDS.get(name, name): value for name, value in beside_shared(keys).items()},
        "hidden_act": "situ",
        "activation_situ_beta": keys.number("activation.situ_beta"),
        "activation_situ_linear_beta": bound if bound > 0 else None,
        "attn_res_block_size": keys.count("attn_res.block_size"),
        **({"routed_expert_hidden_size": width} if width else {}),
        "latent_moe_use_norm": "ffn_routed_norm.weight" in keys.tensors,
        "mla_use_output_gate": "attn_gate.weight" in keys.tensors,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "linear_attn_config": linear,
    }


def _k3_linear(keys: GgufKeys, config: Config) -> Config:
    """Lists of layers count from one. Without a bound decays are those of kimi_linear."""
    kinds = mixed_layers(keys, config, "linear_attention")
    full = [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"]
    bound = "kda.gate_lower_bound"
    return {
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, len(kinds) + 1) if i not in {*full}],
        **channel_linear(keys, config),
        "use_full_rank_gate": True,
        **({} if keys.get(bound) is None else {"gate_lower_bound": keys.number(bound)}),
    }


def bailing3(keys: GgufKeys, config: Config) -> Config:
    """Ling 3.0, without layers that guess tokens ahead: layers without key heads have linear attention."""
    by_sigmoid(keys)
    keys.only("kda.safe_gate", True)
    whole, blocks = config["num_hidden_layers"], beside_shared(keys)
    made, kinds = latents(keys, config), mixed_layers(keys, config, "linear_attention")
    layers = made["num_hidden_layers"]
    blocks |= {"num_local_experts": blocks.pop("n_routed_experts"), "layer_types": kinds[:layers]}
    keys.only("expert_shared_feed_forward_length", blocks["moe_intermediate_size"])
    return {
        **made,
        **blocks,
        "expert_swiglu_limit_list": keys.numbers("swiglu_clamp_exp", whole, 0.0)[:layers],
        "share_expert_swiglu_limit_list": keys.numbers("swiglu_clamp_shexp", whole, 0.0)[:layers],
        "kda_lower_bound": keys.number("kda.gate_lower_bound"),
        "linear_head_dim": keys.count("kda.head_dim"),
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
    }
