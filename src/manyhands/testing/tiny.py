"""Checkpoints of a few hundred kilobytes with random weights, one for every family we serve.

They are real: a config.json, safetensors (one file or shards), a tokenizer with a chat template; anything that loads
a checkpoint from the hub loads these. The text they write is noise, but it is the same noise on every machine: the
weights come from integer draws of a counter-based generator and never from torch, whose normals differ by CPU.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM
from transformers.models.mistral_large4 import MistralLarge4TextConfig
from transformers.models.muse_glimmer import MuseGlimmerTextConfig
from transformers.models.muse_spark import MuseSparkTextConfig
from transformers.models.step3p7 import Step3p7TextConfig
from transformers.utils import logging

from manyhands.checkpoint.tokenizer_json import byte_symbols
from manyhands.core import Precision
from manyhands.errors import BadRequest
from manyhands.testing.tiny_configs import EVERY_FAMILY as EVERY_FAMILY
from manyhands.testing.tiny_configs import FAMILIES as FAMILIES
from manyhands.testing.tiny_configs import LFM3_KINDS, MORE, NEMOTRON_KINDS, RECIPES, Overrides
from manyhands.testing.tiny_configs import NAMED_ANEW as NAMED_ANEW
from manyhands.testing.tiny_configs import WINDOW as WINDOW
from manyhands.testing.tiny_configs import WITH_STATES as WITH_STATES
from manyhands.testing.tiny_inkling import inkling_kinds, inkling_names
from manyhands.testing.tiny_large4 import MistralLarge4ForCausalLM
from manyhands.testing.tiny_muse import MuseGlimmerForCausalLM, MuseSparkForCausalLM
from manyhands.testing.tiny_older import EMBEDDINGS, LAST_NORMS, neo_kinds
from manyhands.testing.tiny_step import Step3p5ForCausalLM, step
from manyhands.testing.tiny_v4 import published_v4, v4_kinds

# transformers does not find its first class by a name, and has no others; names of published tensors it has for the whole
# MiniMax-M3 and Step-3.7 alone.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(MistralLarge4TextConfig, MistralLarge4ForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(MuseSparkTextConfig, MuseSparkForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
for _whole, _text in (("minimax_m3_vl", "MiniMaxM3VLForCausalLM"), ("step3p7", Step3p5ForCausalLM.__name__)):
    _names = [one for one in get_checkpoint_conversion_mapping(_whole) or [] if "^" not in str(one.source_patterns)]
    register_checkpoint_conversion_mapping(_text, _names, overwrite=True)

register_checkpoint_conversion_mapping("InklingForCausalLM", inkling_names(), overwrite=True)

DTYPES: Final[dict[Precision, torch.dtype]] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
# Ids 0-255 are the bytes; then these, in this order.
SPECIALS: Final = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>")
BOS, EOS, PAD = 256, 257, 258
MIN_VOCAB: Final = 256 + len(SPECIALS)
GAIN: Final = 1.5  # of every matrix: enough that layers change the hidden state and the head is decided
TIED_GAIN: Final = 0.4  # of an embedding that is also the head
CHAT_TEMPLATE: Final = (
    "<|bos|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny(
    family: str,
    out: Path,
    *,
    layers: int = 6,
    hidden: int = 64,
    vocab: int | None = None,
    seed: int = 0,
    dtype: Precision = "bf16",
    max_shard_bytes: int | None = None,
    context: int = 1024,
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint of `family` (one of EVERY_FAMILY, or "gemma3") into the folder `out` and return `out`.

    Equal arguments give equal bytes, in every run and on every machine. `vocab` defaults to the tokenizer's own size;
    `max_shard_bytes` cuts the weights into shards with an index. Raises BadRequest for impossible arguments.
    """
    config = tiny_config(
        family, layers=layers, hidden=hidden, vocab=vocab or MIN_VOCAB, context=context, **config_overrides
    )
    if dtype not in DTYPES:
        raise BadRequest(f"a tiny model is stored as {', '.join(DTYPES)}, not {dtype}")
    write_tiny(config, out, seed=seed, dtype=dtype, max_shard_bytes=max_shard_bytes)
    if family in NAMED_ANEW:
        file = out / "config.json"
        file.write_text(file.read_text().replace(f'"model_type": "{NAMED_ANEW[family]}"', f'"model_type": "{family}"'))
    _tokenizer(context).save_pretrained(out)
    return out


def write_tiny(config: Any, out: Path, *, seed: int, dtype: Precision, max_shard_bytes: int | None = None) -> Any:
    """Write a model of transformers with this `config` of it into the folder `out`, without a tokenizer; returns the model."""
    with torch.random.fork_rng(devices=[]):  # the caller's generator must not notice
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model, seed)
    model.to(DTYPES[dtype])
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    form: dict[str, Any] = {"max_shard_size": max_shard_bytes or "50GB"}
    published = _PUBLISHED.get(config.model_type)
    if published is not None:
        form |= {"state_dict": published(model), "save_original_format": published is _minimax}
    with _without_progress_bars():
        model.save_pretrained(out, **form)
    return model


def _olmo_hybrid(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of an olmo_hybrid as its publisher's checkpoints have them. transformers reads these, and writes others: its
    three kernels are of one size, whatever the widths of keys and values, and norms behind attention have another name."""
    keys = model.config.linear_num_key_heads * model.config.linear_key_head_dim
    stored, out = model.state_dict(), dict[str, torch.Tensor]()
    for name, tensor in stored.items():
        if name.endswith(".conv1d.weight"):
            parts = zip("qkv", tensor.split([keys, keys, len(tensor) - 2 * keys]), strict=True)
            out |= {name.replace("conv1d", f"{kind}_conv1d"): part.clone() for kind, part in parts}
            continue
        if name.replace(".post_attention_layernorm.", ".input_layernorm.") in stored:  # not of a layer of attention
            name = name.replace(".post_attention_layernorm.", ".feedforward_layer_norm.")
        out[name.replace(".input_layernorm.", ".attention_layer_norm.")] = tensor
    return out


def _kimi_linear(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a kimi_linear as its publisher's checkpoints have them: transformers reads these, and gives blocks without
    experts the name of those with experts."""
    out = dict[str, torch.Tensor]()
    for name, tensor in model.state_dict().items():
        name = name.replace(".forget_gate.", ".")
        if ".mlp.gate." in name or ".mlp.shared_experts." in name or ".mlp.experts." in name:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith(".conv1d.weight"):
            out |= {
                name.replace("conv1d", f"{kind}_conv1d"): part.clone()
                for kind, part in zip("qkv", tensor.chunk(3), strict=True)
            }
        elif name.endswith(".gate_up_proj"):
            path = name.removesuffix("gate_up_proj")
            for i, both in enumerate(tensor):
                gate, up = both.chunk(2)
                out |= {f"{path}{i}.w1.weight": gate.clone(), f"{path}{i}.w3.weight": up.clone()}
        elif ".experts." in name:
            path = name.removesuffix("down_proj")
            out |= {f"{path}{i}.w2.weight": down.clone() for i, down in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def _longcat_flash(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a longcat_flash as its publisher's checkpoints have them: transformers has gates and ups also of experts
    that give their source, and reads no checkpoint without."""
    out, count = dict[str, torch.Tensor](), model.config.n_routed_experts
    for name, tensor in model.state_dict().items():
        path, _, part = name.partition(".experts.")
        for i, one in enumerate(tensor[:count] if part else ()):
            parts = one.chunk(2) if part == "gate_up_proj" else (one,)
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            stored = zip(names, parts, strict=True)
            out |= {f"{path}.experts.{i}.{kind}.weight": matrix.clone() for kind, matrix in stored}
        out |= {} if part else {name: tensor}
    return out


def _minimax(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a minimax without those that follow from its config, which publisher's checkpoints lack."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(_MADE)}


_MADE: Final = ("summary_idxs", "slope_rate", "query_decay", "key_decay", "diagonal_decay")


def _hy_v4(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of an hy_v4 as its publisher's checkpoints have them: transformers reads these names, and writes others.
    Experts are by themselves, as in those of FP8."""
    out = dict[str, torch.Tensor]()
    for name, tensor in _longcat_flash(model).items():
        for theirs, published in _HY_NAMES:
            name = name.replace(theirs, published)
        out[name] = tensor
    return out


_HY_NAMES: Final = (
    (".attn_hc.", ".hc_attn_layer.hc_pre.hc_"),
    (".ffn_hc.", ".hc_mlp_layer.hc_pre.hc_"),
    (".hc_head.hc_", ".hc_head.hc_head_"),
    (".sinks", ".learnable_sink_param"),
    (".self_attn.gate_proj.", ".self_attn.linear_gate."),
)


# What configs of some families say of each layer.
_BY_LAYER: Final = {"deepseek_v4": v4_kinds, "gpt_neo": neo_kinds, "inkling_text": inkling_kinds}
# Families of which a list says that some layers have a window and others have none: without it few do, or all.
_BOTH_KINDS: Final = ("beam", "cohere_compass_text", "kolibri1", "laguna", "mellum", "step3p5")
# Of families whose publisher's checkpoints have other tensors than transformers writes.
_PUBLISHED: Final[dict[str, Callable[[PreTrainedModel], dict[str, torch.Tensor]]]] = {
    "olmo_hybrid": _olmo_hybrid,
    "deepseek_v4": published_v4,
    "hy_v4": _hy_v4,
    "kimi_linear": _kimi_linear,
    "longcat_flash": _longcat_flash,
    "minimax": _minimax,
}


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def tiny_config(
    family: str, *, layers: int = 6, hidden: int = 64, vocab: int = MIN_VOCAB, context: int = 1024, **overrides: Any
) -> Any:
    """The config of transformers that make_tiny writes a model of. Raises BadRequest for impossible arguments."""
    name = "gemma3_text" if family == "gemma3" else family
    recipes = {**RECIPES, **MORE}
    if name not in recipes:
        raise BadRequest(f"family {family!r} is unknown; there are {', '.join(EVERY_FAMILY)}")
    if hidden < 64 or hidden % 32:
        raise BadRequest(f"hidden is {hidden}; a tiny model needs a multiple of 32 from 64 up")
    if vocab < MIN_VOCAB:
        raise BadRequest(f"vocab is {vocab}; the byte tokenizer needs at least {MIN_VOCAB}")
    model_type, recipe = recipes[name]
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": hidden * 3 // 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    counted = "num_layers" if model_type == "longcat_flash" else "num_hidden_layers"
    reach = "max_seq_len" if model_type == "mpt" else "max_position_embeddings"
    shape: Overrides = {counted: layers, reach: context}
    if model_type.startswith("lfm2"):
        shape["layer_types"] = ["full_attention" if i % 3 == 2 else "conv" for i in range(layers)]
    if model_type == "lfm3":
        shape["layer_types"] = [LFM3_KINDS[i % 3] for i in range(layers)]
    if model_type == "minimax_m3_vl_text":
        shape["layer_types"] = ["minimax_m3_sparse" if i else "full_attention" for i in range(layers)]
        shape["mlp_layer_types"] = ["sparse" if i else "dense" for i in range(layers)]
    if model_type in _BY_LAYER:
        shape |= _BY_LAYER[model_type](layers)
    if model_type in _BOTH_KINDS:
        shape["layer_types"] = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(layers)]
    if model_type == "laguna":
        shape |= {"num_attention_heads_per_layer": [6 - i % 2 * 2 for i in range(layers)], "sliding_window": WINDOW}
        shape["shared_expert_intermediate_size"] = hidden
    if model_type == "step3p5":
        shape |= step(hidden, layers)
    if model_type == "beam":
        shape["mlp_layer_types"] = ["sparse" if i else "dense" for i in range(layers)]
    if model_type == "qwen4_exp_text":
        shape["layer_types"] = ["indexed_attention" if i % 3 == 1 else "linear_attention" for i in range(layers)]
        shape["ple_layer_ids"] = [i for i in (1, 3) if i <= layers]
    if model_type == "gemma3n_text":
        shape |= _gemma3n(layers, hidden)
    if family == "gemma4_text_e4b":
        shape["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        shape["num_kv_shared_layers"] = max(0, min(layers - 2, layers // 2))
        shape["vocab_size_per_layer_input"] = vocab
    if family == "hy_v4":
        shape["indexer_types"] = ["full"] * layers
    if family in ("bailing_hybrid", "granitemoehybrid_mamba", "kimi_linear"):
        shape["layer_types"] = ["full_attention" if i % 3 == 1 else "linear_attention" for i in range(layers)]
    elif family == "nemotron_h":
        shape["layers_block_type"] = [NEMOTRON_KINDS[i % len(NEMOTRON_KINDS)] for i in range(layers)]
    elif model_type == "granitemoehybrid":  # without a list, every layer is one of Mamba
        shape["layer_types"] = ["full_attention"] * layers
    return AutoConfig.for_model(model_type, **{**sizes, **heads, **ids, **shape, **recipe(hidden), **overrides})


def _gemma3n(layers: int, hidden: int) -> Overrides:
    """Widths of gemma3n_text, and what its config says of each layer."""
    return {
        "vocab_size_per_layer_input": 262,
        "hidden_size_per_layer_input": hidden // 4,
        "laurel_rank": hidden // 4,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "num_kv_shared_layers": max(0, min(layers - 2, layers // 2)),
        "activation_sparsity_pattern": [0.0 if i % 3 == 1 else 0.5 + 0.05 * (i % 9) for i in range(layers)],
        "intermediate_size": [hidden + 16 * (i % 3) for i in range(layers)],
    }


def _fill(model: PreTrainedModel, seed: int) -> None:
    """Set every stored tensor. Each has a stream of its own, so a tensor's bytes do not depend on the others.

    A tied head likes to repeat the token that it just read; a small embedding under a large final norm prevents that.
    """
    tied = bool(getattr(model.config, "tie_word_embeddings", False))  # Inkling has no such field
    for name, tensor in model.state_dict().items():
        # Numbers that follow from the config.
        if name.endswith(_MADE) or (".ple_embedding." in name and not tensor.is_floating_point()):
            continue
        if not tensor.is_floating_point():  # a table of experts by token
            tensor.copy_(_choices(f"{seed}/{name}", tuple(tensor.shape), model.config.n_routed_experts))
            continue
        noise = torch.from_numpy(_noise(f"{seed}/{name}", tuple(tensor.shape)))
        if tensor.dim() >= 2:
            gain = TIED_GAIN if tied and name.endswith(EMBEDDINGS) else GAIN
            tensor.copy_(noise * (gain / tensor.shape[-1] ** 0.5))
        else:  # norms stay near the 1 (or 0) that their family starts from; biases and sinks near 0
            lift = GAIN / TIED_GAIN - 1.0 if tied and name in LAST_NORMS else 0.0
            tensor.copy_(noise * 0.1 + (float(bool((tensor == 1).all())) + lift))


def _choices(stream: str, shape: tuple[int, ...], count: int) -> torch.Tensor:
    """Of each row as many numbers below `count` as it has columns, none twice."""
    ranks = _noise(stream, (shape[0], count))
    return torch.from_numpy(np.argsort(ranks, axis=1, kind="stable")[:, : shape[1]].copy())


def _noise(stream: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Nearly normal numbers (mean 0, variance 1): the sum of four 16-bit draws, so exact integers until one product."""
    key = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:16], "little")
    draws = np.random.Generator(np.random.Philox(key=key)).integers(0, 65536, size=(4, *shape), dtype=np.uint16)
    centred = draws.sum(axis=0, dtype=np.int64) - 2 * 65535
    return np.asarray(centred.astype(np.float32) * np.float32((3.0**0.5) / 65536))


def _tokenizer(context: int) -> Any:
    """Bytes in, bytes out: ids 0-255 are byte values, so every text round-trips."""
    alphabet = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIALS[0],
        eos_token=SPECIALS[1],
        pad_token=SPECIALS[2],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
