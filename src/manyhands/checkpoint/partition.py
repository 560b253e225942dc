"""Which tensors of a checkpoint belong to which layers, and which to the ends. Pure: names and shapes in, names out.

Layers are found by their place in the name (`model.layers.7.`, `transformer.h.7.`, `blocks.7.`). All other tensors
belong to the ends, in three roles: "embed" (the embedding), "head" (the output matrix; absent if it is
tied to the embedding) and "norm" (the final norm, and whatever else has no layer); but for what all layers have in common,
which belongs to every span. Layers past the model's count (multi-token prediction) belong to no span.
"""

import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from manyhands.checkpoint.dtypes import BLOCKS, REARRANGED, Described, is_float
from manyhands.core import SMALL_WEIGHTS, Precision, Span
from manyhands.errors import CutError, ModelError

EndRole = Literal["embed", "norm", "head"]

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
# What makes a row out of embeddings, where layer 0 begins: of Gemma 3n, of Inkling; embeddings of positions;
# the norm behind BLOOM's embedding.
_FIRST: Final = re.compile(
    r"^model\.(?:altup_projections|per_layer_model_projection|per_layer_projection_norm|llm\.embed_norm)\.|"
    r"^(?:transformer\.(?:wpe|word_embeddings_layernorm)|(?:model\.decoder|biogpt)\.embed_positions)\."
)
# Tables whose rows are read from their files as they are asked for (engine/filed.py): of n-grams, a second one of embeddings.
NGRAMS: Final = re.compile(r"\.ngram_embedding\.shard_\d+\.weight$")
_FILED: Final = re.compile(rf"^model\.embed_tokens_per_layer\.|{NGRAMS.pattern}")
# What configs call the number of positions.
_CONTEXT: Final = ("max_position_embeddings", "model_max_length", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_HEAD: Final = re.compile(r"(?:^|\.)(?:lm_head|head|embed_out|output|output_projection|unembed)\.")
_EMBED: Final = re.compile(r"(?:^|\.)(?:embed(?!ding_norm\.)|wte|word_embeddings|tok_embeddings)")
_UNUSED: Final = re.compile(r"^mtp[._]|^model\.mtp[._]")  # multi-token prediction, which counts layers of its own
_OF_EVERY: Final = re.compile(r"^lerope\.")  # what all layers have in common: learnt factors of rotary frequencies

_BITS: Final[Mapping[Precision, float]] = {"w8": 8.5, "w4": 4.5}  # of a matrix's number
# Of a number of blocks at w8 and w4, where they are held as they are stored (engine/quants.py). Scales of 6 bit take 8.
_BLOCK_BITS: Final = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q8_0": 8.5,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
    "MXFP4": 4.25,
    "Q4_Z": 4.625,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.3125,
    "Q3_K": 3.5625,
    "Q2_K": 2.625,
    "NVFP4_32": 4.5,
    "IQ3_S": 4.3125,
    "IQ3_XXS": 4.3125,
    "IQ2_S": 3.3125,
    "IQ2_XS": 3.3125,
    "IQ2_XXS": 3.3125,
    "IQ1_S": 2.5625,
    "IQ1_M": 2.5625,
}
_ROW_BITS: Final = {"NVFP4_32": 32}  # of a row beside its blocks
_STORED_SIZES: Final = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What config.json says of a text model. `context` is 0 if it says nothing."""

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a parsed config.json. Raises ModelError naming the key."""
        return cls(
            family=str(config.get("model_type", "unknown")),
            architecture=str((config.get("architectures") or ["unknown"])[0]),
            num_layers=_num_layers(config),
            hidden_size=_count(config, "hidden_size", "n_embd", "n_embed", "d_model"),
            vocab_size=_count(config, "vocab_size"),
            context=_count(config, *_CONTEXT, default=0),
        )


def _num_layers(config: Mapping[str, Any]) -> int:
    """Layers of a model. Configs of nemotron_h may list the layers in place of their number. Raises ModelError."""
    listed = config.get("layers_block_type")
    default = len(listed) if isinstance(listed, list) and listed else None
    names = ["num_hidden_layers", "n_layer", "num_layers", "n_layers"]
    if config.get("model_type") == "longcat_flash":  # the first counts attentions, of which a layer has two
        names.remove("num_hidden_layers")
    return _count(config, *names, default=default)


def _count(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 32:
            return value
    if default is None:
        raise ModelError(f"config.json gives no usable {keys[0]}: it is not the config of a language model")
    return default


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to, None for the ends and for what all layers have in common."""
    match = None if _UNUSED.search(name) else _LAYER.search(name)
    return int(match[1]) if match else 0 if _FIRST.match(name) else None


def is_filed(name: str) -> bool:
    """Whether a tensor is a table whose rows are read from its file as they are asked for."""
    return _FILED.search(name) is not None


def _is_of_ends(name: str) -> bool:
    return layer_of(name) is None and not _UNUSED.search(name) and not _OF_EVERY.match(name)


def end_role(name: str) -> EndRole:
    """The role of a tensor that is in no layer."""
    if _HEAD.search(name):
        return "head"
    return "embed" if _EMBED.search(name) else "norm"


def longest_run(names: Iterable[str], num_layers: int) -> Span:
    """The longest run of layers (below `num_layers`) of which there are tensors, the first of equals. Raises CutError."""
    runs = _runs(sorted({layer for name in names if (layer := layer_of(name)) is not None and layer < num_layers}))
    if not runs:
        raise CutError("this checkpoint folder holds no layers")
    return max(runs, key=lambda run: (len(run), -run.start))


def whole_layers(names: Iterable[str], held: set[str], num_layers: int) -> list[Span]:
    """The runs of layers of which all tensors of `names` are among `held`. Raises ModelError as span_tensors."""
    is_whole: dict[int, bool] = {}
    has_common = True
    for name in names:
        if (layer := layer_of(name)) is not None:
            is_whole[layer] = is_whole.get(layer, True) and name in held
        elif _OF_EVERY.match(name):
            has_common = has_common and name in held
    absent = next((layer for layer in range(num_layers) if layer not in is_whole), None)
    if absent is not None:
        raise _lacking(absent)
    return _runs(layer for layer in range(num_layers) if has_common and is_whole[layer])


def _runs(layers: Iterable[int]) -> list[Span]:
    """Layers in order, those that follow each other together."""
    runs: list[Span] = []
    for layer in layers:
        start = runs.pop().start if runs and runs[-1].end == layer else layer
        runs.append(Span(start, layer + 1))
    return runs


def span_tensors(names: Iterable[str], span: Span) -> list[str]:
    """The tensors of `span`, those that all layers have in common too, sorted. Raises ModelError naming the first layer that
    has none of its own."""
    given = list(names)
    found = [name for name in given if (layer := layer_of(name)) is not None and span.start <= layer < span.end]
    absent = sorted(set(range(span.start, span.end)) - {layer_of(name) for name in found})
    if absent:
        raise _lacking(absent[0])
    return sorted([*found, *filter(_OF_EVERY.match, given)])


def _lacking(layer: int) -> ModelError:
    return ModelError(f"no tensors of layer {layer} (as in model.layers.{layer}.*): the checkpoint lacks it")


def ends_tensors(names: Iterable[str], *, embed: bool = True, head: bool = True) -> list[str]:
    """The tensors of the ends, sorted: with `embed` the embeddings, with `head` the final norm and the head.

    A tied head is the embedding, which `head` alone then needs too. A final norm may have no weights.
    Raises ModelError if the embedding or the head has no tensor.
    """
    roles = [(name, end_role(name)) for name in sorted(names) if _is_of_ends(name)]
    present = {role for _, role in roles}
    wanted: set[EndRole] = {"embed"} if embed else set()
    if head:
        wanted |= {"norm", "head" if "head" in present else "embed"}
    if absent := sorted(wanted - present - {"norm"}):
        raise ModelError(f"the checkpoint holds no tensor for {absent[0]} (of embed, head)")
    return [name for name, role in roles if role in wanted]


def needed_tensors(names: Iterable[str], num_layers: int, span: Span | None, with_ends: bool) -> list[str]:
    """What a node needs that hosts `span` (None: all layers), and the ends if `with_ends`; sorted, each name once.

    Raises CutError if the span leaves the model, ModelError if the checkpoint lacks something.
    """
    held = list(names)
    wanted = span if span is not None else Span(0, num_layers)
    if wanted.end > num_layers:
        raise CutError(f"layers {wanted} are out of range: the model has layers 0-{num_layers - 1}")
    return sorted(span_tensors(held, wanted) + (ends_tensors(held) if with_ends else []))


def is_tied(names: Iterable[str]) -> bool:
    """Whether the head is the embedding, that is: no tensor is a head."""
    return all(layer_of(name) is not None or end_role(name) != "head" for name in names)


def layer_bytes(
    tensors: Iterable[Described], num_layers: int, precision: Precision, wide: Container[str] = ()
) -> list[int]:
    """Bytes of memory that each layer takes once it is loaded; tables of n-grams stay in their files. `wide`: the matrices that
    are not rounded to small weights."""
    sizes = [0] * num_layers
    for tensor in tensors:
        layer = layer_of(tensor.name)
        if layer is not None and layer < num_layers and not is_filed(tensor.name):
            sizes[layer] += tensor_bytes(tensor, precision, wide)
    return sizes


def ends_bytes(tensors: Iterable[Described], precision: Precision, wide: Container[str] = ()) -> int:
    """Bytes of memory that embedding, final norm and head take once loaded: at w4 embedding and head have 8 bits, and a tied
    head is held once. A second table of embeddings stays in its file (but for devices of torch, which hold it)."""
    kept: Precision = "w8" if precision == "w4" else precision
    ends = (tensor for tensor in tensors if _is_of_ends(tensor.name))
    return sum(tensor_bytes(tensor, kept, wide) for tensor in ends if not is_filed(tensor.name))


def tensor_bytes(tensor: Described, precision: Precision, wide: Container[str] = ()) -> int:
    """Bytes of memory of one tensor once loaded: matrices of 16 bits as they are stored, also at fp32; small ones with 16 bits
    of scale for 32 numbers, blocks as they are stored; vectors in fp32."""
    count = math.prod(tensor.shape)
    if not is_float(tensor.dtype):
        return count * _STORED_SIZES.get(tensor.dtype, 8)
    if len(tensor.shape) < 2:
        return count * 4
    if precision in SMALL_WEIGHTS and tensor.name not in wide:
        held = REARRANGED.get(tensor.dtype, tensor.dtype)
        bits = _BLOCK_BITS[held] if held in BLOCKS else _BITS[precision]
        return math.ceil((count * bits + count // max(1, tensor.shape[-1]) * _ROW_BITS.get(held, 0)) / 8)
    return count * (2 if precision != "fp32" or tensor.dtype in ("BF16", "F16") else 4)
