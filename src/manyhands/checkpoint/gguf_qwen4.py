"""Qwen3.8-Flash-Next in GGUF files (qwen4exp): names of its tensors, what its metadata adds, and its table of n-grams.

The table, in the checkpoint some hundreds of tensors, is one there: it is cut into parts as large as the recipe allows.
The numbers of its hash are lists of the metadata. The recipe makes them anew, of the first prime and the usual seed;
others are refused where the layer is loaded (engine/compile_rows.py).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from manyhands.checkpoint import gguf_names as names
from manyhands.checkpoint.dtypes import TABLE_BLOCKS, stored_bytes
from manyhands.checkpoint.gguf import Gguf, GgufTensor, shown
from manyhands.checkpoint.gguf_architecture import STEPS, Architecture
from manyhands.checkpoint.gguf_configs import INDEX, PLUS_ONE, RATES, TILED, qwen3_5_moe
from manyhands.checkpoint.gguf_keys import Config, GgufKeys
from manyhands.checkpoint.header import TensorEntry

_TABLE: Final = "per_layer_token_embd.weight"
_TYPES: Final = ("BF16", "F16", "F32", *TABLE_BLOCKS)
_MOST_ROWS: Final = 1 << 24  # of a part of it
_MOST_PARTS: Final = 4096
_MOST_NUMBERS: Final = 64  # of a list
_LINEAR, _INDEXED = "linear_attention", "indexed_attention"
_ONE: Final = "of one layer with n-grams the table is read"
_ROWS: Final = "they are no equal parts of it"
_LISTS: Final = {  # of whole numbers
    "ple.layer_multipliers": "layer_multipliers",
    "ple.head_vocab_sizes": "ngram_heads_vocab_sizes",
    "ple.head_offsets": "ngram_heads_offsets",
}
_STREAMS: Final = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
_NAMES: Final = {
    **{
        theirs: ours
        for theirs, ours in names.QWEN35_MOE.items()
        if theirs not in ("attn_norm", "ffn_norm", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down")
    },
    **{f"hc_attn_{theirs}": f"attn_hyper_connection.{ours}" for theirs, ours in _STREAMS.items()},
    **{f"hc_ffn_{theirs}": f"mlp_hyper_connection.{ours}" for theirs, ours in _STREAMS.items()},
    **{f"indexer.{one}_proj": f"self_attn.indexer.{one}_proj" for one in "qk"},
    **{f"indexer.{one}_norm": f"self_attn.indexer.{one}_layernorm" for one in "qk"},
    **{f"ple_{one}": f"ple.{one}_proj" for one in ("key", "value")},
    **{f"ple_norm_{one}": f"ple.norm_{one}" for one in ("key", "query", "conv")},
    "ple_conv1d": "ple.conv1d",
}
_ENDS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    **{
        f"output_hc_{theirs}.weight": f"model.hyper_connection_mixer.{ours}.weight"
        for theirs, ours in _STREAMS.items()
        if theirs != "inject"
    },
}


def qwen4(keys: GgufKeys, config: Config) -> Config:
    """Streams, linear attention, an index, experts; embeddings of n-grams where the file has them."""
    ratios = keys.counts("attention.compress_ratios", config["num_hidden_layers"], 0)
    added = qwen3_5_moe(keys, config)
    kinds = _kinds(keys, len(ratios), added.pop("full_attention_interval"))[: added["num_hidden_layers"]]
    return {
        **added,
        "layer_types": kinds,
        "output_gate_type": "sigmoid",
        "norm_topk_prob": True,
        "hc_count": keys.count("hyper_connection.count"),
        "hc_lowrank": keys.count("hyper_connection.low_rank"),
        "indexer_n_heads": keys.count("attention.indexer.head_count"),
        "indexer_head_dim": keys.count("attention.indexer.key_length"),
        "indexer_budget": keys.count("attention.indexer.top_k"),
        "indexer_compress_ratio": _ratio(keys, ratios, kinds),
        **_word_fields(keys),
    }


def _kinds(keys: GgufKeys, layers: int, every: int) -> list[str]:
    """Of all layers: a list says which are linear, or all are but each one of `every`."""
    linear = keys.switches("attention.recurrent_layers", layers) or [(i + 1) % every != 0 for i in range(layers)]
    return [_LINEAR if one else _INDEXED for one in linear]


def _ratio(keys: GgufKeys, ratios: list[int], kinds: list[str]) -> int:
    """Positions of an entry, the same in all layers with attention; other layers have 0."""
    found = {(kind, ratio) for kind, ratio in zip(kinds, ratios, strict=False)}
    indexed = [ratio for kind, ratio in found if kind == _INDEXED]
    if len(indexed) > 1 or indexed == [0] or any(ratio for kind, ratio in found if kind == _LINEAR):
        needed = "one number of all layers with attention is needed, and 0 of the others"
        raise keys.refused(f"its attention.compress_ratios are {ratios[:16]}; {needed}")
    return indexed[0] if indexed else 1


@dataclass(frozen=True, slots=True)
class _Words:
    """The table of n-grams: the layer that reads it, sizes of heads, how many parts it is cut into, and rows of a part."""

    table: GgufTensor
    layer: int
    sizes: tuple[int, ...]
    parts: int
    rows: int


def _words(keys: GgufKeys) -> _Words | None:
    """None where no layer has n-grams. Raises ModelError for a table that cannot be read."""
    table = next((tensor for tensor in keys.gguf.tensors if tensor.name == _TABLE), None)
    layers = _whole(keys, "ple.layers") if keys.get("ple.layers") is not None else ()
    if table is None or len(layers) != 1:
        if table is None and not layers:
            return None
        raise keys.refused(
            f"its ple.layers are {list(layers)[:8]}, {'without' if table is None else 'with'} {_TABLE}: {_ONE}"
        )
    if table.dtype not in _TYPES or len(table.shape) != 2:
        kind = f"{table.dtype} {list(table.shape)}"
        raise keys.refused(
            f"{_TABLE} is stored as {kind}: rows of {', '.join(_TYPES)} are read of a table that stays in its file"
        )
    sizes = _whole(keys, "ple.head_vocab_sizes")
    total = sum(sizes)
    for parts in range(-(-total // _MOST_ROWS), _MOST_PARTS if min(sizes) else 0):
        rows = -(-total // parts)
        if rows * parts <= table.shape[0]:
            return _Words(table, layers[0], sizes, parts, rows)
    raise keys.refused(f"{_TABLE} has {table.shape[0]} rows, and heads of n-grams together {total}: {_ROWS}")


def _whole(keys: GgufKeys, name: str) -> tuple[int, ...]:
    """A list of whole numbers from 0 to below 2^63."""
    value = keys.get(name)
    if not isinstance(value, np.ndarray) or not len(value) or value.dtype.kind not in "iu" or value.dtype.itemsize < 4:
        raise keys.refused(f"its {name} is {shown(value)}; a list of whole numbers of 32 or 64 bit is needed")
    found = tuple(int(one) for one in value[:_MOST_NUMBERS])
    if len(value) > _MOST_NUMBERS or min(found) < 0 or max(found) >= 1 << 63:
        raise keys.refused(
            f"its {name} is {shown(value)}; at most {_MOST_NUMBERS} numbers from 0 to below 2^63 are read"
        )
    return found


def _word_fields(keys: GgufKeys) -> Config:
    """Fields of n-grams. The primes from the first size on are the sizes; the hash ends at the token that the file names."""
    keys.get("ple.image_token_id")  # of the positions of images
    words = _words(keys)
    if words is None:
        return {"ple_layer_ids": []}
    longest, heads, width = (
        keys.count("ple.ngram_size", least=2),
        keys.count("ple.heads_per_ngram"),
        words.table.shape[1],
    )
    keys.only("embedding_length_per_layer_input", width)
    for name in _LISTS:
        keys.get(name)
    return {
        "ple_layer_ids": [words.layer + 1],
        "ngram_size": longest,
        "heads_per_ngram": heads,
        "ple_embed_dim": (longest - 1) * heads * width,
        "ple_conv_kernel_size": keys.count("ple.conv_kernel"),
        "ngram_vocab_size_base": words.sizes[0],
        "make_ngram_vocab_size_divisible_by": words.parts,
        "split_ngram_parts": words.parts,
        "eos_token_id": keys.count("ple.eos_token_id", least=0),
    }


def word_entries(gguf: Gguf) -> list[TensorEntry]:
    """What the hash is made of, from lists of the metadata in the order in which they lie there, and the table's parts."""
    keys = GgufKeys(gguf, "qwen4exp")
    words = _words(keys)
    if words is None:
        return []
    path, found = f"model.layers.{words.layer}.ple.ple_embedding", list[TensorEntry]()
    for name in sorted(_LISTS, key=lambda name: gguf.places.get(f"qwen4exp.{name}", 0)):
        numbers, value = len(_whole(keys, name)), keys.get(name)
        start = gguf.places[f"qwen4exp.{name}"]
        dtype, end = f"I{8 * value.itemsize}", start + numbers * value.itemsize
        found.append(TensorEntry(f"{path}.{_LISTS[name]}", gguf.file, dtype, (numbers,), start, end))
    table, shape = words.table, (words.rows, words.table.shape[1])
    size = stored_bytes(table.dtype, shape)
    for part in range(words.parts):
        start, name = table.start + part * size, f"{path}.ngram_embedding.shard_{part}.weight"
        found.append(TensorEntry(name, table.file, table.dtype, shape, start, start + size))
    return found


QWEN4: Final = Architecture(
    "qwen4_exp_text",
    "Qwen4ExpForCausalLM",
    _NAMES,
    qwen4,
    (PLUS_ONE, RATES, TILED, INDEX),
    sparse=True,
    ends=_ENDS,
    biases=STEPS,
    own=word_entries,
    cut=(_TABLE,),
)
