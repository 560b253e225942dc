"""What llama.cpp's converter makes of Qwen3.8-Flash-Next: one table of n-grams, lists of its hash, two parts of an index."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Piece = tuple[str, NDArray[np.float32]]

_KINDS = ("linear_attention", "indexed_attention")
_HEADS = {"linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # 3 for each key head
QWEN4_FIXED: dict[str, dict[str, Any]] = {
    "qwen4_exp_text": {
        **_HEADS, "layer_types": ["linear_attention"] * 3 + ["indexed_attention"], "ple_layer_ids": [3], "ple_embed_dim": 64,
        "eos_token_id": 210, "ngram_vocab_size_base": 47,
    },
    "qwen4_exp_text_plain": {
        **_HEADS, "layer_types": [*_KINDS, *_KINDS[::-1]], "ple_layer_ids": [], "indexer_budget": 64,
    },
}  # fmt: skip
QWEN4_MORE = {
    "hyper_connection.count": "hc_count", "hyper_connection.low_rank": "hc_lowrank",
    "attention.indexer.head_count": "indexer_n_heads", "attention.indexer.key_length": "indexer_head_dim",
    "attention.indexer.top_k": "indexer_budget",
}  # fmt: skip
_WORDS = {
    "ngram_size": "ngram_size",
    "heads_per_ngram": "heads_per_ngram",
    "conv_kernel": "ple_conv_kernel_size",
    "eos_token_id": "eos_token_id",
}
_LISTS = {
    "layer_multipliers": "layer_multipliers",
    "ngram_heads_offsets": "head_offsets",
    "ngram_heads_vocab_sizes": "head_vocab_sizes",
}


def qwen4_facts(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Keys that are no copies of fields: layers of each kind, and what the hash is made of."""
    kinds = config["layer_types"]
    ratios = [config["indexer_compress_ratio"] * (kind == "indexed_attention") for kind in kinds]
    keys: dict[str, Any] = {"attention.compress_ratios": np.array(ratios, np.int32)}
    if kinds[1] == "indexed_attention":  # no interval has these layers
        keys["attention.recurrent_layers"] = np.array([kind == "linear_attention" for kind in kinds])
    if not config["ple_layer_ids"]:
        return keys
    stored = load_file(folder / "model.safetensors")
    lists = {_LISTS[name.rpartition(".")[2]]: array for name, array in stored.items() if array.dtype == np.int64}
    (width,) = {array.shape[1] for name, array in stored.items() if ".ngram_embedding." in name}
    return {
        **keys,
        **{f"ple.{name}": config[field] for name, field in _WORDS.items()},
        "ple.layers": np.array(config["ple_layer_ids"], np.int32) - 1,
        "ple.image_token_id": 9,
        **{f"ple.{name}": array.astype(np.uint64) for name, array in lists.items()},
        "embedding_length_per_layer_input": int(width),
    }


def without_words(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """Without the table of n-grams and the numbers of its hash."""
    return {name: array for name, array in tensors.items() if ".ple_embedding." not in name}


def word_table(tensors: dict[str, NDArray[np.float32]]) -> Iterator[Piece]:
    """The table of n-grams, which the checkpoint has in parts."""
    parts = {int(name.split("shard_")[1].split(".")[0]): array for name, array in tensors.items() if "shard_" in name}
    if parts:
        yield "per_layer_token_embd.weight", np.concatenate([parts[i] for i in range(len(parts))])


def qwen4_pieces(name: str, array: NDArray[np.float32], config: dict[str, Any]) -> Iterator[Piece]:
    """Of a tensor that is none of linear attention."""
    path, _, what = name.removesuffix(".weight").rpartition(".")
    if what == "index_qk_proj":
        rows = config["indexer_n_heads"] * config["indexer_head_dim"]
        yield f"{path}.q_proj.weight", array[:rows]
        yield f"{path}.k_proj.weight", array[rows:]
    elif what == "conv1d":
        yield name, array[:, 0]
    else:
        yield name, array + np.float32(1) if "norm" in what else array[0] if what == "shared_expert_gate" else array
