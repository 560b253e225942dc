"""A GGUF header as a checkpoint: its tensors under the names of transformers, and the config.json that they stand for.

The bytes stay as they are stored. What llama.cpp's converter changed is stated in the config ("quantization_config"), and
the Program follows it (gguf_architectures.py). Experts, which a GGUF file stacks in one tensor, are entries of their own:
each is a range of its bytes.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Final

import numpy as np

from manyhands.checkpoint.dtypes import GGUF_METHOD, stored_bytes
from manyhands.checkpoint.gguf import Gguf, GgufTensor, shown
from manyhands.checkpoint.gguf_architecture import Architecture
from manyhands.checkpoint.gguf_architectures import ARCHITECTURES, VARIANTS
from manyhands.checkpoint.gguf_keys import MAX_LAYERS, Config, GgufKeys, layers_ahead
from manyhands.checkpoint.gguf_scales import SCALE, Scales, is_followed
from manyhands.checkpoint.header import TensorEntry
from manyhands.errors import ModelError

_DROPPED: Final = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)  # they go into the config
_MAX_FACTORS: Final = 1 << 13
_MAX_FACTOR: Final = 1e30  # of a column that does not turn
_MAX_AHEAD: Final = 16
MAX_EXPERTS: Final = 4096
MAX_ENTRIES: Final = 1 << 18  # with each expert by itself: Kimi-K3 has 250,000
_CHOSEN: Final = frozenset(  # how many a row takes
    ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
)
_VECTORS: Final = (
    *(f".{path}.{name}" for path in ("mamba", "mixer") for name in ("A_log", "D", "norm.weight")),
    ".attention.A_log",
)

ReadTensor = Callable[[GgufTensor], bytes]  # its bytes; fewer where the file ends before


def _architecture(gguf: Gguf) -> tuple[str, Architecture]:
    arch = gguf.facts.get("general.architecture")
    found = ARCHITECTURES.get(arch) if isinstance(arch, str) else None
    if found is None or not isinstance(arch, str):
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{gguf.file} refused: its architecture is {shown(arch)}; served from GGUF are {known}")
    key, other = VARIANTS.get(arch, ("", found))
    return arch, other if gguf.one(f"{arch}.{key}", 0) else found


def tensor_entries(gguf: Gguf) -> list[TensorEntry]:
    """The tensors under the names that the Program uses, by where they lie in their files. Raises ModelError for one that the
    architecture does not have."""
    arch, found = _architecture(gguf)
    ahead = _layers_ahead(gguf, arch)
    left_out = (*_DROPPED, *found.cut)
    kept = (tensor for tensor in gguf.tensors if tensor.name not in left_out and not tensor.name.startswith(ahead))
    scales = Scales(gguf)
    unfolded = (entry for tensor in kept for entry in _entries(found, tensor, scales))
    entries = list(islice(chain(_listed(gguf, arch, found), found.own(gguf), unfolded), MAX_ENTRIES + 1))
    entries += found.again(gguf, entries) if len(entries) <= MAX_ENTRIES else []
    if len(entries) > MAX_ENTRIES:
        raise ModelError(f"{gguf.file} refused: with each expert by itself it has more than {MAX_ENTRIES} tensors")
    return sorted(entries, key=lambda entry: entry.start)


def _listed(gguf: Gguf, arch: str, found: Architecture) -> Iterator[TensorEntry]:
    """Tensors that the file has as lists of its metadata, a number for each layer; in the order in which they lie there."""
    layers = gguf.one(f"{arch}.block_count")
    for key, (name, shape) in sorted(found.lists.items(), key=lambda item: gguf.places.get(item[0], 0)):
        value = gguf.facts.get(key)
        if not isinstance(value, np.ndarray) or value.dtype != np.float32 or len(value) != layers:
            what = f"its {key} is no list of F32 with a number for each of {layers!r:.40} layers"
            raise ModelError(f"{gguf.file} refused: {what}")
        for i in range(len(value)):
            start = gguf.places[key] + 4 * i
            yield TensorEntry(f"{found.layers}.{i}.{name}", gguf.file, "F32", shape, start, start + 4)


def _layers_ahead(gguf: Gguf, arch: str) -> tuple[str, ...]:
    """What the names of tensors begin with in the layers that guess tokens ahead."""
    ahead = layers_ahead(gguf, arch)
    count = gguf.one(f"{arch}.block_count") if ahead else 0
    return tuple(f"blk.{i}." for i in range(max(count - min(ahead, _MAX_AHEAD), 0), count))


def _entries(arch: Architecture, tensor: GgufTensor, scales: Scales) -> Iterator[TensorEntry]:
    name = _name(arch, tensor.name)
    matrix = scales.matrix(tensor) if name is None else None
    if matrix is not None and (of := _name(arch, matrix.name)) is not None:
        yield from _scales(f"{of}{SCALE}", tensor)
        return
    if name is None:
        raise ModelError(f"{tensor.file} refused: {arch.model_type} has no tensor {tensor.name[:80]!a}")
    if "{" not in name:
        yield TensorEntry(name, tensor.file, tensor.dtype, _shape(name, tensor.shape), tensor.start, tensor.end)
        return
    shape = tensor.shape[1:]
    kind, sizes = ("matrices", 2) if "{expert}" in name else ("vectors", 1)
    if len(shape) != sizes or tensor.shape[0] > MAX_EXPERTS:
        wanted = f"a stack of at most {MAX_EXPERTS} {kind} is needed"
        raise ModelError(f"{tensor.file} refused: {tensor.name[:80]!a} has the shape {list(tensor.shape)}; {wanted}")
    yield from _parts(name, tensor, shape)


def _scales(name: str, tensor: GgufTensor) -> Iterator[TensorEntry]:
    """One of each matrix of a stack whose matrices are entries of their own; none of those that are not followed."""
    if not is_followed(tensor):
        return
    if "{" in name:
        yield from _parts(name, tensor, ())
    else:
        yield TensorEntry(name, tensor.file, tensor.dtype, tensor.shape, tensor.start, tensor.end)


def _parts(name: str, tensor: GgufTensor, shape: tuple[int, ...]) -> Iterator[TensorEntry]:
    step = stored_bytes(tensor.dtype, shape)
    for number in range(tensor.shape[0]):
        start = tensor.start + number * step
        yield TensorEntry(
            name.format(expert=number, head=number), tensor.file, tensor.dtype, shape, start, start + step
        )


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """With the dimension of one that the converter drops; a vector again where it makes two dimensions of it."""
    if len(shape) == 1 and (".shared_expert_gate." in name or ".moe_statics." in name):
        return 1, *shape
    if len(shape) == 2 and name.endswith((".conv1d.weight", ".conv.conv.weight")):
        return shape[0], 1, shape[1]
    if len(shape) == 4 and shape[0] == 1 and name.endswith("_conv1d.weight"):
        return shape[1:]
    if len(shape) > 1 and name.endswith(".self_attn.A_log"):
        return 1, 1, math.prod(shape), 1
    if len(shape) == 2 and name.endswith(_VECTORS) and (shape[1] == 1 or name.endswith(".weight")):
        return (shape[0] * shape[1],)
    return shape


def _name(arch: Architecture, name: str) -> str | None:
    if name in arch.ends:
        return arch.ends[name]
    first, _, rest = name.partition(".")
    layer, _, tensor = rest.partition(".")
    known = arch.layer_tensor(tensor) if first == "blk" and layer.isdecimal() else None
    return None if known is None else f"{arch.layers}.{int(layer)}.{known}"


def config_json(gguf: Gguf, read: ReadTensor) -> bytes:
    """The config.json of the model, made of the metadata; `read` gives the few numbers that it has as tensors."""
    arch, found = _architecture(gguf)
    keys, shapes = GgufKeys(gguf, arch), {tensor.name: tensor for tensor in gguf.tensors}
    if "token_embd.weight" not in shapes:
        raise keys.refused("it has no tensor token_embd.weight")
    tokens, rows = gguf.facts.get("tokenizer.ggml.tokens"), shapes["token_embd.weight"].shape[0]
    if isinstance(tokens, list) and len(tokens) > rows:
        raise keys.refused(f"its tokenizer has {len(tokens)} tokens, token_embd.weight {rows} rows")
    if (layers := keys.count("block_count")) > MAX_LAYERS:  # before lists of as many are made
        raise keys.refused(f"its block_count is {layers}; at most {MAX_LAYERS} layers are read")
    config = _sizes(keys, found, shapes)
    config |= _rotary(keys, shapes, config, read)
    config |= found.more(keys, config)
    if keys.one("expert_count", 0) and not config.keys() & _CHOSEN:
        raise keys.refused(f"{arch} with experts is not served from GGUF")
    keys.get("expert_used_count")
    keys.finish()
    return json.dumps(config, indent=2, sort_keys=True).encode()


def _sizes(keys: GgufKeys, arch: Architecture, shapes: Mapping[str, GgufTensor]) -> Config:
    hidden, name = keys.count("embedding_length"), "attention.head_count"
    heads = max(keys.counts(name, keys.count("block_count"), 0)) if arch.varied else keys.count(name)
    if arch.latent:
        head, kv_heads = keys.count("rope.dimension_count", least=0), heads  # 0: nothing turns
        keys.get("attention.head_count_kv")  # 1 in newer files
    else:
        head = keys.count("attention.key_length", hidden // heads if heads else 0, least=min(heads, 1))
        kv_heads = keys.count("attention.head_count_kv", heads) if not arch.mixed else _most_key_heads(keys, heads)
        if keys.count("attention.value_length", head, least=min(head, 1)) != head and not arch.narrow:
            raise keys.refused("its keys and values have heads of different widths")
    config: Config = {
        "model_type": arch.model_type,
        "architectures": [arch.name],
        "num_hidden_layers": keys.count("block_count"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": _inner(keys, arch),
        arch.eps: keys.number(f"attention.layer_norm_{'rms_' * (arch.eps == 'rms_norm_eps')}epsilon"),
        "max_position_embeddings": keys.count("context_length"),
        "vocab_size": shapes["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "quantization_config": {"quant_method": GGUF_METHOD, **dict.fromkeys(arch.conventions, True)},
    }
    if keys.get("attention.causal", True) is not True:
        raise keys.refused("its attention looks ahead: it is no model that writes text")
    return config | _biases(keys, arch)


def _inner(keys: GgufKeys, arch: Architecture) -> int:
    if arch.uneven:
        return max(*keys.counts("feed_forward_length", keys.count("block_count"), 0), 1)
    return keys.count("feed_forward_length", 1 if arch.sparse else None)


def _most_key_heads(keys: GgufKeys, heads: int) -> int:
    return max(keys.counts("attention.head_count_kv", keys.count("block_count"), heads))


def _biases(keys: GgufKeys, arch: Architecture) -> Config:
    """Which products have biases. Raises ModelError for biases that would be left out."""
    found = {name.removesuffix(".bias") for name in keys.tensors if name.endswith(".bias")}
    config: Config = {}
    for field, group in arch.biases:
        here = found & {*group}
        if field is not None and here:
            if missing := {*group} - here:
                raise keys.refused(
                    f"it has biases of {', '.join(sorted(here))}, and not of {', '.join(sorted(missing))}"
                )
            config[field] = True
        found -= here
    if found:
        raise keys.refused(f"it has biases of {', '.join(sorted(found))}, which {arch.model_type} has not")
    return config


def _rotary(keys: GgufKeys, shapes: Mapping[str, GgufTensor], config: Config, read: ReadTensor) -> Config:
    """rope_theta, and how positions are scaled. Factors of single columns become transformers' longrope."""
    found: Config = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    turned, head, context = (
        keys.count("rope.dimension_count", config["head_dim"], least=min(config["head_dim"], 1)),
        config["head_dim"],
        config["max_position_embeddings"],
    )
    if turned != head:
        found["partial_rotary_factor"] = _part(turned, head)
    kind = keys.one("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    factor = 1.0 if kind == "none" else factor
    original = keys.count("rope.scaling.original_context_length", context)
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    own = next((shapes[name] for name in _DROPPED[:2] if name in shapes), None)
    if kind not in ("linear", "none", "longrope", "yarn"):
        raise keys.refused(f"its positions are scaled by {kind!r:.40}; known are linear, yarn and factors of columns")
    if own is None and (kind == "longrope" or attention != 1.0):
        raise keys.refused(
            f"its positions are scaled by {kind} with rope.scaling.attn_factor {attention}, without factors of columns"
        )
    if own is not None and (kind == "yarn" or factor != 1.0):
        raise keys.refused(f"its positions are scaled twice: by {kind} and by {own.name}")
    if own is not None:
        factors = _numbers(keys, own, read)
        original = context if own.name == _DROPPED[0] else original
        scaling = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": attention,
        }
        found["rope_scaling"] = {**scaling, "original_max_position_embeddings": original}
        found |= {"original_max_position_embeddings": original} if config["model_type"] == "phi3" else {}
    elif kind == "yarn":
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        found["rope_scaling"] = {**yarn, **_yarn(keys)}
    elif factor != 1.0:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return found


def _part(turned: int, head: int) -> float:
    """Which part of `head` columns `turned` are, so that as many come of it again (program/rope.py: int(head * part)): the
    quotient of 30 and 44 gives 29."""
    part = turned / head if head else 0.0
    return part if int(head * part) == turned else math.nextafter(part, math.inf)


def _yarn(keys: GgufKeys) -> Config:
    """Where the ramp of yarn lies, if the file says so."""
    keys.only("rope.scaling.yarn_ext_factor", 1.0)
    keys.only("rope.scaling.yarn_attn_factor", 1.0)
    names = [name for name in ("beta_fast", "beta_slow") if keys.get(f"rope.scaling.yarn_{name}") is not None]
    return {name: keys.number(f"rope.scaling.yarn_{name}") for name in names}


def _numbers(keys: GgufKeys, tensor: GgufTensor, read: ReadTensor) -> list[float]:
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
        raise keys.refused(f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}; a short list of F32 is needed")
    raw = read(tensor)
    if len(raw) != tensor.end - tensor.start:
        raise keys.refused(f"{tensor.file} ends inside {tensor.name}")
    found = [float(str(value)) for value in np.frombuffer(raw, "<f4")]
    if not all(0 < value <= _MAX_FACTOR for value in found):
        raise keys.refused(f"{tensor.name} has factors out of bounds")
    return found
