"""A GGUF header as a checkpoint: its tensors under the names of transformers, and the config.json that they stand for.

The bytes stay as they are stored. What llama.cpp's converter changed is stated in the config ("quantization_config"), and
the Program follows it: heads of llama whose rotary pairs lie side by side, norms of gemma that hold 1 + weight.
Experts, which a GGUF file stacks in one tensor, are entries of their own: each is a range of its bytes.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from manyhands.checkpoint.dtypes import GGUF_METHOD, stored_bytes
from manyhands.checkpoint.gguf import MAX_TENSORS, Gguf, GgufTensor, ReadRange
from manyhands.checkpoint.header import TensorEntry
from manyhands.errors import ModelError

_DROPPED: Final = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)  # they go into the config
_MAX_FACTORS: Final = 1 << 13
MAX_EXPERTS: Final = 4096
_ENDS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ATTENTION: Final = ("attn_q", "attn_k", "attn_v", "attn_output")
_BLOCK: Final = ("ffn_gate", "ffn_up", "ffn_down")
_QWEN3: Final = {**_LLAMA, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_QWEN3_MOE: Final = {
    **_QWEN3,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_MIXTRAL: Final = {
    **_LLAMA,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
_GEMMA2: Final = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3: Final = {**_GEMMA2, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PHI3: Final = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

Config = dict[str, Any]


class _Keys:
    """The metadata of one architecture; reading a key marks it as used."""

    def __init__(self, gguf: Gguf, arch: str) -> None:
        self.gguf, self.arch = gguf, arch
        self._used: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        key = f"{self.arch}.{name}"
        self._used.add(key)
        return self.gguf.facts.get(key, default)

    def one(self, name: str, default: Any = None) -> Any:
        self.get(name)
        return self.gguf.one(f"{self.arch}.{name}", default)

    def refused(self, what: str) -> ModelError:
        return ModelError(f"{self.gguf.file} refused: {what}")

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; of a list with one value for each layer, that value if it is the same for all."""
        value = self.get(name, default)
        if isinstance(value, np.ndarray) and len(value) and bool((value == value[0]).all()):
            value = value[0].item()
        if type(value) is not int or value < least:
            raise self.refused(f"{self.arch}.{name} is {value!r:.60}; a whole number from {least} is needed")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """As the shortest decimal that is this fp32: 1e-05, not 9.999999747378752e-06."""
        value = self.get(name, default)
        if type(value) not in (int, float) or abs(value) > 1e30:
            raise self.refused(f"{self.arch}.{name} is {value!r:.60}; a number is needed")
        return float(str(np.float32(value)))

    def finish(self) -> None:
        """Raises ModelError for the first key that nothing read and that may change the arithmetic."""
        ours = {key for key in self.gguf.facts if key.startswith(f"{self.arch}.")}
        harmless = {f"{self.arch}.{name}" for name in ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")}
        for key in sorted(ours - self._used - harmless):
            raise self.refused(f"the key {key[:80]!a} is not known here and may change the model's arithmetic")


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How one architecture of GGUF is read: its model_type and class in transformers, its tensors, what its config adds."""

    model_type: str
    name: str
    tensors: Mapping[str, str]
    more: Callable[[_Keys, Config], Config] = lambda keys, config: {}
    conventions: tuple[str, ...] = ()


def _gemma(keys: _Keys, config: Config) -> Config:
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _scale_width(keys: _Keys, config: Config, largest: int) -> Config:
    """Queries are scaled by the width of a head; in the largest model of a family by hidden / heads."""
    is_largest = config["num_hidden_layers"] == largest
    width = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": width}


def _gemma2(keys: _Keys, config: Config) -> Config:
    return {
        **_scale_width(keys, config, 46),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: _Keys, config: Config) -> Config:
    added = {
        **_scale_width(keys, config, 62),
        "sliding_window": keys.count("attention.sliding_window"),
        "sliding_window_pattern": keys.count("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }
    return {**added, "rope_theta": keys.number("rope.freq_base", 1000000.0)}


def _phi3(keys: _Keys, config: Config) -> Config:
    window = keys.count("attention.sliding_window", 0, least=0)
    return {"sliding_window": window} if 0 < window < config["max_position_embeddings"] else {}


def _experts(keys: _Keys, config: Config) -> Config:
    return {"num_local_experts": keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def _qwen3_moe(keys: _Keys, config: Config) -> Config:
    inner = keys.count("expert_feed_forward_length")
    return {**_experts(keys, config), "moe_intermediate_size": inner, "norm_topk_prob": True}


PAIRS: Final = "interleaved_rope"
PLUS_ONE: Final = "norms_plus_one"
_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "llama": _Architecture("llama", "LlamaForCausalLM", _LLAMA, conventions=(PAIRS,)),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _QWEN3),
    "qwen3moe": _Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN3_MOE, _qwen3_moe),
    "gemma": _Architecture("gemma", "GemmaForCausalLM", _LLAMA, _gemma, (PLUS_ONE,)),
    "gemma2": _Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA2, _gemma2, (PLUS_ONE,)),
    "gemma3": _Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA3, _gemma3, (PLUS_ONE,)),
    "phi3": _Architecture("phi3", "Phi3ForCausalLM", _PHI3, _phi3),
}
_MIXTRAL_LLAMA: Final = _Architecture("mixtral", "MixtralForCausalLM", _MIXTRAL, _experts, (PAIRS,))


def _architecture(gguf: Gguf) -> tuple[str, _Architecture]:
    arch = gguf.facts.get("general.architecture")
    found = _ARCHITECTURES.get(arch) if isinstance(arch, str) else None
    if gguf.one("split.count", 1) not in (0, 1):  # the parts after the first say hardly more than this
        raise ModelError(
            f"{gguf.file} refused: it is one of several files; join them with llama.cpp's llama-gguf-split --merge"
        )
    if found is None or not isinstance(arch, str):
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{gguf.file} refused: its architecture is {arch!r:.60}; served from GGUF are {known}")
    is_mixtral = arch == "llama" and gguf.one("llama.expert_count", 0)
    return arch, _MIXTRAL_LLAMA if is_mixtral else found


def tensor_entries(gguf: Gguf) -> list[TensorEntry]:
    """The tensors under the names that the Program uses. Raises ModelError for one that the architecture does not have."""
    _, found = _architecture(gguf)
    unfolded = (
        entry for tensor in gguf.tensors if tensor.name not in _DROPPED for entry in _entries(gguf, found, tensor)
    )
    entries = list(islice(unfolded, MAX_TENSORS + 1))
    if len(entries) > MAX_TENSORS:
        raise ModelError(f"{gguf.file} refused: with each expert by itself it has more than {MAX_TENSORS} tensors")
    return entries


def _entries(gguf: Gguf, arch: _Architecture, tensor: GgufTensor) -> Iterator[TensorEntry]:
    name = _name(arch, tensor.name)
    if name is None:
        raise ModelError(f"{gguf.file} refused: {arch.model_type} has no tensor {tensor.name[:80]!a}")
    if "{expert}" not in name:
        yield TensorEntry(name, gguf.file, tensor.dtype, tensor.shape, tensor.start, tensor.end)
        return
    shape = tensor.shape[1:]
    if len(shape) != 2 or tensor.shape[0] > MAX_EXPERTS:
        wanted = f"a stack of at most {MAX_EXPERTS} matrices is needed"
        raise ModelError(f"{gguf.file} refused: {tensor.name[:80]!a} has the shape {list(tensor.shape)}; {wanted}")
    step = stored_bytes(tensor.dtype, shape)
    for expert in range(tensor.shape[0]):
        start = tensor.start + expert * step
        yield TensorEntry(name.format(expert=expert), gguf.file, tensor.dtype, shape, start, start + step)


def _name(arch: _Architecture, name: str) -> str | None:
    if name in _ENDS:
        return _ENDS[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not parts[1].isdecimal() or parts[3] not in ("weight", "bias"):
        return None
    known = arch.tensors.get(parts[2])
    return None if known is None else f"model.layers.{int(parts[1])}.{known}.{parts[3]}"


def config_json(gguf: Gguf, read: ReadRange) -> bytes:
    """The config.json of the model, made of the metadata; `read` gives the few numbers that it has as tensors."""
    arch, found = _architecture(gguf)
    keys, shapes = _Keys(gguf, arch), {tensor.name: tensor for tensor in gguf.tensors}
    if "token_embd.weight" not in shapes:
        raise keys.refused("it has no tensor token_embd.weight")
    tokens, rows = gguf.facts.get("tokenizer.ggml.tokens"), shapes["token_embd.weight"].shape[0]
    if isinstance(tokens, list) and len(tokens) > rows:
        raise keys.refused(f"its tokenizer has {len(tokens)} tokens, token_embd.weight {rows} rows")
    config = _sizes(keys, found, shapes)
    config |= _rotary(keys, shapes, config, read)
    config |= found.more(keys, config)
    if found.model_type != "mixtral" and keys.one("expert_count", 0) and "num_local_experts" not in config:
        raise keys.refused(f"{arch} with experts is not served from GGUF")
    keys.get("expert_used_count")
    keys.finish()
    return json.dumps(config, indent=2, sort_keys=True).encode()


def _sizes(keys: _Keys, arch: _Architecture, shapes: Mapping[str, GgufTensor]) -> Config:
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head = keys.count("attention.key_length", hidden // heads if heads else 0)
    if keys.count("attention.value_length", head) != head:
        raise keys.refused("its keys and values have heads of different widths")
    config: Config = {
        "model_type": arch.model_type,
        "architectures": [arch.name],
        "num_hidden_layers": keys.count("block_count"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head,
        "intermediate_size": keys.count("feed_forward_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length"),
        "vocab_size": shapes["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "quantization_config": {"quant_method": GGUF_METHOD, **dict.fromkeys(arch.conventions, True)},
    }
    if keys.get("attention.causal", True) is not True:
        raise keys.refused("its attention looks ahead: it is no model that writes text")
    return config | _biases(keys, arch, shapes)


def _biases(keys: _Keys, arch: _Architecture, shapes: Mapping[str, GgufTensor]) -> Config:
    """Which products have biases: all of attention or none, and of a block; in qwen2 those of queries, keys and values."""
    found = {name.split(".")[2] for name in shapes if name.startswith("blk.") and name.endswith(".bias")}
    config: Config = {}
    for field, group in (("attention_bias", _ATTENTION), ("mlp_bias", _BLOCK)):
        here = tuple(name for name in group if name in found)
        if here == group:
            config[field] = True
        elif here and (arch.model_type, here) != ("qwen2", _ATTENTION[:3]):
            raise keys.refused(f"it has biases of {', '.join(here)}, and not of {', '.join(sorted({*group} - found))}")
    return config


def _rotary(keys: _Keys, shapes: Mapping[str, GgufTensor], config: Config, read: ReadRange) -> Config:
    """rope_theta, and how positions are scaled. Factors of single columns become transformers' longrope."""
    found: Config = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    turned, head, context = (
        keys.count("rope.dimension_count", config["head_dim"]),
        config["head_dim"],
        config["max_position_embeddings"],
    )
    if turned != head:
        found["partial_rotary_factor"] = turned / head if head else 0.0
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
        found["rope_scaling"] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif factor != 1.0:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return found


def _numbers(keys: _Keys, tensor: GgufTensor, read: ReadRange) -> list[float]:
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
        raise keys.refused(f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}; a short list of F32 is needed")
    raw = read(tensor.start, tensor.end)
    if len(raw) != tensor.end - tensor.start:
        raise keys.refused(f"it ends inside {tensor.name}")
    found = [float(str(value)) for value in np.frombuffer(raw, "<f4")]
    if not all(0 < value < 1e6 for value in found):
        raise keys.refused(f"{tensor.name} has factors out of bounds")
    return found
