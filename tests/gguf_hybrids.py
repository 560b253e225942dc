"""What llama.cpp's converter makes of models with linear attention, short convolutions or Mamba."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Piece = tuple[str, NDArray[np.float32]]


def linear_pieces(name: str, array: NDArray[np.float32], config: dict[str, Any], tiled: bool) -> Iterator[Piece]:
    """Of one tensor of linear attention; `tiled`: value heads are stored so that those of a key head lie apart."""
    path, _, last = name.rpartition(".")
    path, _, what = path.rpartition(".") if last == "weight" else (path, "", last)
    heads = config["linear_num_value_heads"]
    wide = heads * config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if what == "in_proj_qkvz":
        yield from [(name, array)] if config["is_old"] else _apart(path, array, config)
        return
    if what == "A_log":
        array = -np.exp(array)
    elif what == "conv1d":
        array = array[:, 0]
    if tiled and what in ("in_proj_qkv", "conv1d"):
        array = np.concatenate([array[: 2 * keys], _tiled(array[2 * keys :], config, 0)])
    elif tiled and what == "out_proj":
        array = _tiled(array, config, 1)
    elif tiled and array.shape[0] in (heads, wide) and what != "norm":
        array = _tiled(array, config, 0)
    yield name, array


def _tiled(array: NDArray[np.float32], config: dict[str, Any], axis: int) -> NDArray[np.float32]:
    """From the value heads of the first key head, of the second ... to the first of each, the second of each ..."""
    groups, heads, shape = config["linear_num_key_heads"], config["linear_num_value_heads"], array.shape
    parts = array.reshape(*shape[:axis], groups, heads // groups, -1, *shape[axis + 1 :])
    return np.ascontiguousarray(parts.swapaxes(axis, axis + 1)).reshape(shape)


def _apart(path: str, array: NDArray[np.float32], config: dict[str, Any]) -> Iterator[Piece]:
    """Of qwen3_next: all queries, all keys, all values; and the gates."""
    groups, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    parts = np.split(array.reshape(groups, -1, array.shape[1]), [width, 2 * width, 2 * width + values], axis=1)
    q, k, v, z = (part.reshape(-1, array.shape[1]) for part in parts)
    yield f"{path}.in_proj_qkv.weight", np.concatenate([q, k, v])
    yield f"{path}.in_proj_z.weight", z


def nemotron_pieces(name: str, array: NDArray[np.float32], config: dict[str, Any]) -> Iterator[Piece]:
    """Of one tensor of nemotron_h. Heads of queries and keys are put into the order of rotary pairs, which it has not."""
    _, _, what = name.removesuffix(".weight").rpartition(".")
    if what in ("q_proj", "k_proj"):
        yield name, array.reshape(-1, 2, config["head_dim"] // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    elif what == "norm":
        yield name, array.reshape(config["n_groups"], -1)
    else:
        yield from granite_pieces(name, array, config)


def falcon_pieces(name: str, array: NDArray[np.float32], config: dict[str, Any]) -> Iterator[Piece]:
    """Of one tensor of falcon_h1, with what it is multiplied by."""
    what = name.removesuffix(".weight").rpartition(".")[2]
    gate, down = config["mlp_multipliers"]
    into, key = config["attention_in_multiplier"], config["key_multiplier"]
    by = {"gate_proj": gate, "down_proj": down, "q_proj": into, "k_proj": into * key, "v_proj": into}
    by |= {"o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"]}
    by |= {"lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"]}
    if what == "in_proj":
        inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [inner, inner, shared, shared, config["mamba_n_heads"]]
        array = array * np.repeat(config["ssm_multipliers"], sizes).astype(np.float32)[:, None]
        by["in_proj"] = config["ssm_in_multiplier"]
    array = (array * np.float32(by.get(what, 1.0))).astype(np.float32)
    yield from granite_pieces(name, array, config) if ".mamba." in name else [(name, array)]


def _falcon_facts(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_d_ssm"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def _nemotron_facts(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    width = config["moe_intermediate_size" if arch.endswith("moe") else "intermediate_size"]
    return {
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "attention.head_count_kv": np.array(
            [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds], np.int32
        ),
        "feed_forward_length": np.array([width * (kind in ("mlp", "moe")) for kind in kinds], np.int32),
        "rope.scaling.finetuned": False,
        "context_length": 1 << 20,
    }


def mamba_layers(config: dict[str, Any]) -> list[bool]:
    """Which layers of a granitemoehybrid are of Mamba."""
    return [kind in ("mamba", "linear_attention") for kind in config["layer_types"]]


def granite_pieces(name: str, array: NDArray[np.float32], config: dict[str, Any]) -> Iterator[Piece]:
    """Of one tensor of Mamba, of stacked experts, or of the block that all rows take."""
    path, _, what = name.removesuffix(".weight").rpartition(".")
    if what == "A_log":
        yield name, -np.exp(array)[:, None]
    elif what == "D":
        yield name, array[:, None]
    elif what == "norm":
        yield name, array.reshape(config["mamba_n_groups"], -1)
    elif name.endswith("conv1d.weight"):
        yield name, array[:, 0]
    elif what.endswith("_linear"):
        if path.endswith("block_sparse_moe"):
            path, down = f"{path}.experts.{{expert}}", "down_proj"
        elif True not in mamba_layers(config):
            path, down = path.replace("shared_mlp", "mlp"), "down_proj"
        else:
            down = "output_linear"
        parts = (down,) if what == "output_linear" else ("gate_proj", "up_proj")
        for part, rows in zip(parts, np.split(array, len(parts), axis=-2), strict=True):
            yield f"{path}.{part}.weight", rows
    else:
        yield name, array


def _granite_facts(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of Mamba are also stated where no layer has it."""
    heads = [0 if is_mamba else config["num_key_value_heads"] for is_mamba in mamba_layers(config)]
    keys = {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "attention.head_count_kv": np.array(heads, np.int32),
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
    }
    return keys if keys["rope.scaling.finetuned"] else {**keys, "context_length": 1 << 20}


def rates_and_kernels(name: str, array: NDArray[np.float32], flat: bool) -> NDArray[np.float32]:
    """Of one tensor of jamba or kimi_linear: rates in place of logarithms, kernels of two dimensions (`flat`) or four."""
    if name.endswith(".A_log"):
        return -np.exp(array)
    return (array[:, 0] if flat else array[None]) if name.endswith("conv1d.weight") else array


def _jamba_facts(config: dict[str, Any]) -> dict[str, Any]:
    period, offset = (config[f"attn_layer_{name}"] for name in ("period", "offset"))
    heads = [config["num_key_value_heads"] * (i % period == offset) for i in range(config["num_hidden_layers"])]
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
        "attention.head_count_kv": np.array(heads, np.int32),
    }


def mamba_facts(config: dict[str, Any]) -> dict[str, Any]:
    """All keys of a model that has layers of Mamba alone."""
    keys: dict[str, Any] = {"ssm.time_step_rank": config.get("num_heads") or config["time_step_rank"]}
    keys |= (
        {"ssm.group_count": config["n_groups"]}
        if config["model_type"] == "mamba2"
        else {"ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba"}
    )
    return keys | {
        "context_length": 1 << 20,
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["intermediate_size"],
        "ssm.state_size": config["state_size"],
        "vocab_size": config["vocab_size"],
    }


def hybrid_facts(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """Keys that are not fields of the config by another name; none for other architectures."""
    keys: dict[str, Any] = _granite_facts(config) if config["model_type"] == "granitemoehybrid" else {}
    if config["model_type"] == "nemotron_h":
        keys = _nemotron_facts(arch, config)
    if config["model_type"] == "jamba":
        keys = _jamba_facts(config)
    if config["model_type"] == "falcon_h1":
        keys = _falcon_facts(config)
    if arch in ("lfm2", "lfm2moe"):
        heads = [config["num_key_value_heads"] * (kind == "full_attention") for kind in config["layer_types"]]
        keys["attention.head_count_kv"] = np.array(heads, np.int32)
    if arch == "lfm2":  # as the checkpoint says, a part of what it states
        inner, multiple = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
        keys["feed_forward_length"] = -(-inner // multiple) * multiple
    if arch == "lfm2moe":
        keys["expert_gating_func"] = 2
    if arch in ("qwen3next", "qwen35", "qwen35moe", "qwen4exp"):
        keys["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        keys["full_attention_interval"] = config.get("full_attention_interval", 4)
    if arch in ("qwen35", "qwen35moe", "qwen4exp"):
        pairs = int(config["head_dim"] * 0.25) // 2
        keys["rope.dimension_sections"] = np.array([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0], np.int32)
    return keys
