"""What the metadata of more architectures without experts in all layers adds to the config.json."""

import math
from typing import Final

import numpy as np

from manyhands.checkpoint.gguf_configs import layer_types, phi2, stated
from manyhands.checkpoint.gguf_keys import Config, GgufKeys

_STILL: Final = 1e30  # the factor of a pair of columns that does not turn


def mistral3(keys: GgufKeys, config: Config) -> Config:
    """Ministral 3, whose queries are scaled from a position on; and Mistral Small 3.1 and 3.2, without any of that."""
    scaling = {"rope_theta": config["rope_theta"], **config.get("rope_scaling", {"rope_type": "default"})}
    log, beta = keys.number("rope.scaling.yarn_log_multiplier", 0.0), keys.number("attention.temperature_scale", 0.0)
    if scaling["rope_type"] == "yarn" and log:
        scaling |= {"mscale": 1.0, "mscale_all_dim": log}  # the first is not in the file: llama.cpp takes 1
    if beta:
        context = config["max_position_embeddings"]
        original = keys.count("rope.scaling.original_context_length", context)
        scaling["original_max_position_embeddings"] = original
    return {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {**scaling, "llama_4_scaling_beta": beta},
    }


def chatglm(keys: GgufKeys, config: Config) -> Config:
    """GLM-4-9B of 2024, GLM-Edge; as with phi2 files of the first checkpoints have one tensor for q, k and v."""
    return stated("attention_bias")(keys, config) | phi2(keys, config)


def exaone4(keys: GgufKeys, config: Config) -> Config:
    """Where some layers have windows, the others, by a switch for each, else every fourth, have no positions.

    llama.cpp has windows only in models of 64 layers (32B), in all but every fourth. Layers that guess tokens ahead come last,
    and are left out.
    """
    layers = config["num_hidden_layers"] - keys.count("nextn_predict_layers", 0, least=0)
    window = keys.count("attention.sliding_window", 0, least=0)
    windows = keys.switches("attention.sliding_window_pattern", layers)
    types = {"layer_types": layer_types(windows)} if window and windows else {}
    return {"num_hidden_layers": layers, "sliding_window": window or None, **types}


def gemma4(keys: GgufKeys, config: Config) -> Config:
    """Layers with a window have heads, and perhaps key heads, of their own; in E2B and E4B late ones share keys.

    Where the file has no number that caps logits, the checkpoint had none: llama.cpp then caps at 30 all the same.
    """
    layers, wide, narrow = config["num_hidden_layers"], config["head_dim"], keys.count("attention.key_length_swa")
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        keys.only(name, narrow)
    windows = keys.switches("attention.sliding_window_pattern", layers)
    if not windows or windows[-1]:
        raise keys.refused("its attention.sliding_window_pattern does not leave the last layer without a window")
    shared = keys.count("attention.shared_kv_layers", 0, least=0)
    rows = {tensor.name: tensor.shape[0] for tensor in keys.gguf.tensors}.get("per_layer_token_embd.weight", 0)
    theta = {"full": keys.number("rope.freq_base"), "sliding": keys.number("rope.freq_base_swa")}
    part = {"rope_type": "proportional", "partial_rotary_factor": _turning(keys, config, wide)}
    return {
        "head_dim": narrow,
        "global_head_dim": wide,
        **_key_heads(keys, config, windows, layers - shared),
        **_widths(keys, layers, shared),
        "layer_types": layer_types(windows),
        "sliding_window": keys.count("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": keys.count("embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": rows,
        "num_kv_shared_layers": shared,
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {**part, "rope_theta": theta["full"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta["sliding"]},
        },
        **_gemma4_experts(keys),
    }


def gemma3n(keys: GgufKeys, config: Config) -> Config:
    """Gemma 3n (text). Files state in deviations where gates are cut off; llama.cpp has one number for the first ten layers."""
    layers, shapes = config["num_hidden_layers"], {tensor.name: tensor.shape for tensor in keys.gguf.tensors}
    windows = keys.switches("attention.sliding_window_pattern", layers)
    rows, low = (shapes.get(name, (0,))[0] for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight"))
    if windows is None or not rows or not low:
        lacking = "attention.sliding_window_pattern, per_layer_token_embd.weight and blk.0.laurel_l.weight"
        raise keys.refused(f"it lacks one of {lacking}: convert it again")
    shared = keys.number("attention.shared_kv_layers")  # in the first files as a float
    if not shared.is_integer():
        raise keys.refused(f"its attention.shared_kv_layers is {shared}; a whole number is needed")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": layer_types(windows),
        "sliding_window": keys.count("attention.sliding_window"),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "num_kv_shared_layers": int(shared),
        "activation_sparsity_pattern": _shares(keys, layers),
        "altup_num_inputs": keys.count("altup.num_inputs"),
        "altup_active_idx": keys.count("altup.active_idx", least=0),
        "hidden_size_per_layer_input": keys.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": rows,
        "laurel_rank": low,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _shares(keys: GgufKeys, layers: int) -> list[float]:
    """The share of gates below so many deviations, to six digits; of no gate where none is cut off."""
    value = keys.get("activation_sparsity_scale")
    if not isinstance(value, np.ndarray) or len(value) != layers or np.isnan(value).any():
        raise keys.refused(f"its activation_sparsity_scale is not a number for each of {layers} layers")
    return [round(math.erfc(-float(cut) / math.sqrt(2.0)) / 2.0, 6) for cut in value]


def apertus(keys: GgufKeys, config: Config) -> Config:
    """Without factors of columns positions are not scaled; the numbers of xIELU are lists of the metadata, not tensors."""
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}
    return {} if "rope_scaling" in config else plain


def _widths(keys: GgufKeys, layers: int, shared: int) -> Config:
    """The width of blocks; those of layers that share keys may be twice as wide."""
    found = keys.counts("feed_forward_length", layers, 0)
    inner, own = min(found, default=0), max(layers - shared, 0)
    is_doubled = shared > 0 and found == [inner] * own + [2 * inner] * (layers - own)
    if not is_doubled and len(set(found)) > 1:
        raise keys.refused(f"its feed_forward_length is not one number, or twice that in the last {shared} layers")
    return {"intermediate_size": inner, "use_double_wide_mlp": is_doubled}


def _key_heads(keys: GgufKeys, config: Config, windows: list[bool], own: int) -> Config:
    """How many key heads layers have with a window and without; and whether those without have no products of values, of the
    first `own` layers, which share none."""
    found = keys.counts("attention.head_count_kv", len(windows), config["num_attention_heads"])
    kinds = {kind: {count for count, on in zip(found, windows, strict=True) if on is kind} for kind in (True, False)}
    if any(len(counts) > 1 or 0 in counts for counts in kinds.values()):
        raise keys.refused(f"its layers of one kind have different numbers of key heads: {sorted({*found})}")
    names = {tensor.name for tensor in keys.gguf.tensors}
    full = [f"blk.{i}.attn_v.weight" for i, is_on in enumerate(windows[: max(own, 0)]) if not is_on]
    lacking = [name for name in full if name not in names]
    if lacking and lacking != full:
        raise keys.refused(f"it has no {lacking[0]}, but {next(name for name in full if name in names)}")
    wide, narrow = found[-1], next(iter(kinds[True]), found[-1])
    if wide != narrow and not lacking:
        raise keys.refused(f"its layers without a window have {wide} key heads and products of values")
    return {
        "num_key_value_heads": narrow,
        "num_global_key_value_heads": wide,
        "attention_k_eq_v": bool(lacking),
    }


def _turning(keys: GgufKeys, config: Config, width: int) -> float:
    """Which part of a head turns in layers without a window: rope_freqs.weight has a factor of 1 for each such pair."""
    factors = config.get("rope_scaling", {}).get("short_factor", [])
    turned, pairs = factors.count(1.0), width // 2
    part: float = turned / max(pairs, 1)
    wanted = [1.0] * turned + [_STILL] * (len(factors) - turned)
    if not turned or len(factors) != pairs or factors != wanted or int(part * width // 2) != turned:
        raise keys.refused(
            f"its rope_freqs.weight is not {pairs} factors, first 1 for pairs that turn, then {_STILL:g}"
        )
    return part


def _gemma4_experts(keys: GgufKeys) -> Config:
    count = keys.count("expert_count", 0, least=0)
    if not count:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
    }
