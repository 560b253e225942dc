"""What llama.cpp's converter says of models that gguf_dense.py reads."""

from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray


def dense_facts(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """Keys of the metadata, without the architecture's name."""
    if arch == "mistral3" and config["rope_parameters"]["llama_4_scaling_beta"]:
        rope = config["rope_parameters"]
        return {
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    if arch == "exaone4" and config["sliding_window"]:
        slides = np.array([kind == "sliding_attention" for kind in config["layer_types"]])
        return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": slides}
    if arch in ("qwen2vl", "qwen3vl", "qwen3vlmoe"):
        pairs = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
        third = pairs // 3  # in turns; a pair that no section has would not turn in llama.cpp
        deep = {} if arch == "qwen2vl" else {"n_deepstack_layers": 3}
        return {"rope.dimension_sections": np.array([pairs - 2 * third, third, third, 0], np.int32), **deep}
    if arch == "granite_swa":
        slides = np.array([kind == "sliding_attention" for kind in config["layer_types"]])
        turns = np.array([bool(base) for base in config["layer_rope_theta"]])
        shared = config.get("shared_intermediate_size")
        return {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": slides,
            **({} if turns.all() else {"attention.rope_pattern": turns}),
            **({"expert_shared_feed_forward_length": shared} if shared else {}),
        }
    if arch == "muse-glimmer":
        return {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": np.array(
                [kind == "sliding_attention" for kind in config["layer_types"]]
            ),
            "final_logit_softcapping": config["final_logit_softcapping"],
            "logit_scale": config["output_multiplier"],
        }
    if arch == "bitnet":  # the first models' files name no activation
        kind = config["hidden_act"]
        scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}
        return scaling if kind == "silu" else {**scaling, "hidden_activation": kind}
    if arch == "nanbeige":
        head = config["hidden_size"] // config["num_attention_heads"]
        is_plain = config["tiny_family"].endswith("_plain")
        times = {"num_loops": 3, "skip_loop_final_norm": True} if is_plain else {"num_loops": 2}
        return {"attention.head_dim": head, "skip_loop_final_norm": False, **times}
    if arch == "command-r":
        return {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}
    if arch == "gemma3n":
        return _gemma3n(config)
    if arch == "hunyuan-dense":
        return _hunyuan(config)
    return _gemma4(config) if arch == "gemma4" else {}


def falcon_piece(name: str, array: NDArray[np.float32], config: dict[str, Any]) -> tuple[str, NDArray[np.float32]]:
    """All queries, then all keys, then all values; the one norm as that of the block."""
    if not name.endswith("query_key_value.weight"):
        return name.replace(".input_layernorm.", ".ln_mlp."), array
    heads, count = config["num_attention_heads"], config["num_key_value_heads"]
    groups = array.reshape(count, heads // count + 2, -1, array.shape[1])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return name, np.concatenate([part.reshape(-1, array.shape[1]) for part in parts])


def _hunyuan(config: dict[str, Any]) -> dict[str, Any]:
    """Its scaling is a larger base, stated as such; factor and length are written all the same."""
    rope, width = config["rope_parameters"], config["head_dim"]
    base = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
    plain = {"type": "none", "factor": 1.0, "original_context_length": 262144}
    return {"rope.freq_base": base, **{f"rope.scaling.{name}": value for name, value in plain.items()}}


def _gemma3n(config: dict[str, Any]) -> dict[str, Any]:
    normal, shares = NormalDist(), config["activation_sparsity_pattern"]
    cuts = [normal.inv_cdf(share) if share else -np.inf for share in shares]
    return {
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "activation_sparsity_scale": np.array(cuts, np.float32),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": np.array([kind == "sliding_attention" for kind in config["layer_types"]]),
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        "feed_forward_length": np.array(config["intermediate_size"], np.int32),
    }


def shared_keys(tensors: dict[str, NDArray[np.float32]], kinds: list[str]) -> list[tuple[str, NDArray[np.float32]]]:
    """Keys and values of layers that share them: published checkpoints have them, and nothing reads them."""
    names = [f"blk.{{}}.attn_{name}.weight" for name in ("k", "v", "k_norm")]
    places = [(name, i) for i in range(len(kinds)) for name in names if name.format(i) not in tensors]
    return [(name.format(i), tensors[name.format(kinds.index(kinds[i]))]) for name, i in places]


def scaled_norms(config: dict[str, Any]) -> list[tuple[str, NDArray[np.float32]]]:
    """Of muse_glimmer: norms of heads, which its checkpoints have without weights, with the factor of queries."""
    factors = {"q": config["qk_scale_factor"], "k": 1.0}
    ones = np.ones(config["head_dim"], np.float32)
    layers = range(config["num_hidden_layers"])
    return [(f"blk.{i}.attn_{name}_norm.weight", ones * np.float32(by)) for i in layers for name, by in factors.items()]


def xielu_lists(tensors: dict[str, NDArray[np.float32]], layers: int) -> dict[str, Any]:
    """Of apertus the numbers of its function, which a file has in its metadata."""
    return {
        f"xielu.{name}": np.array(
            [tensors[f"model.layers.{i}.mlp.act_fn.{name}"].item() for i in range(layers)], np.float32
        )
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    }


def _gemma4(config: dict[str, Any]) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    width, theta = config["head_dim"], config["rope_parameters"]["sliding_attention"]["rope_theta"]
    wide = next(iter(config["per_layer_config"].values()))
    heads = {True: config["num_key_value_heads"], False: wide.get("num_key_value_heads", config["num_key_value_heads"])}
    keys = {
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": np.array(slides),
        "attention.head_count_kv": np.array([heads[slide] for slide in slides], np.int32),
        "rope.dimension_count": wide["head_dim"],
        "rope.dimension_count_swa": width,
        "rope.freq_base_swa": float(theta),
        **{f"attention.{name}_length": wide["head_dim"] for name in ("key", "value")},
        **{f"attention.{name}_length_swa": width for name in ("key", "value")},
    }
    if config["use_double_wide_mlp"]:
        own, inner = len(slides) - config["num_kv_shared_layers"], config["intermediate_size"]
        widths = [inner if i < own else 2 * inner for i in range(len(slides))]
        keys["feed_forward_length"] = np.array(widths, np.int32)
    if config["final_logit_softcapping"]:
        keys["final_logit_softcapping"] = config["final_logit_softcapping"]
    if config["enable_moe_block"]:
        keys |= {"expert_count": config["num_experts"], "expert_used_count": config["top_k_experts"]}
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return keys


def still_columns(config: dict[str, Any]) -> NDArray[np.float32]:
    """Of gemma4 the factors of pairs of columns in layers without a window: 1 where they turn, 1e30 where they do not."""
    width = next(iter(config["per_layer_config"].values()))["head_dim"]
    turned = int(width * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    return np.array([1.0] * turned + [1e30] * (width // 2 - turned), np.float32)
