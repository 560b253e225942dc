"""Build the part of a transformers model that one node needs, and nothing else.

The class of the checkpoint's family is subclassed so that absent layers are replaced while still on the meta device
(never allocated, never read); absolute layer indices stay. `from_pretrained` then gets only the tensors of this part, so
that conversions (fused experts, tied weights, non-persistent buffers) remain upstream's job (runtime.md §2).
"""

import re
import threading
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import read_config as read_raw_config
from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.partition import ends_tensors, span_tensors
from manyhands.checkpoint.verify import Add, ignore
from manyhands.core import Precision, Span
from manyhands.errors import ModelError
from manyhands.model import attention
from manyhands.model.agree import check_agreement
from manyhands.model.elementwise import guard
from manyhands.model.linear import DTYPES, pack_experts

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


# from_pretrained changes torch's default dtype for the whole process while it runs: one at a time.
_loading = threading.Lock()


class Pass(nn.Module):
    """Stands where a layer or an end is absent: hands its first argument on."""

    attention_type = "full_attention"

    def forward(self, *args: object, **kwargs: object) -> object:
        return args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Which part of a model to build: a span of layers, or ends (embedding and/or head), or any mix."""

    span: Span | None
    embed: bool = False
    head: bool = False


def read_config(folder: Path) -> PreTrainedConfig:
    """The text model's config of a checkpoint folder. Raises ModelError if absent, corrupt or of an unknown family."""
    where = folder / "config.json"
    if not where.exists():
        raise ModelError(f"{folder} holds no config.json: it is not a checkpoint folder")
    parse_config(read_raw_config(folder), str(where))
    try:
        text = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    except (
        Exception
    ) as error:  # whatever upstream's validation raises: its own types, AttributeError, ZeroDivisionError, ...
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"{where} cannot be used: {reason}") from error
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{folder}: family {text.model_type!r} is no causal language model transformers knows")
    return text


def context_length(config: PreTrainedConfig) -> int:
    """Positions that may be used. Rotary scalings that switch with the length seen would make a position's numbers
    depend on its batch, so such models are held to the length before the switch (docs/models.md)."""
    full = int(getattr(config, "max_position_embeddings", 2048))
    rope = getattr(config, "rope_parameters", None) or {}
    scopes = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    for scope in scopes:
        if scope.get("rope_type") in ("dynamic", "longrope"):
            outer = getattr(config, "original_max_position_embeddings", full)
            full = min(full, int(scope.get("original_max_position_embeddings", outer)))
    return full


def find_layers(model: nn.Module, num_layers: int) -> tuple[nn.Module, str, nn.ModuleList]:
    """The list of decoder layers, its owner and its name there: the shallowest ModuleList of the right length."""
    found = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not found:
        raise ModelError(f"{type(model).__name__} has no list of {num_layers} layers: the family is not supported")
    path, _, name = min(found, key=lambda n: n.count(".")).rpartition(".")
    owner = model.get_submodule(path)
    return owner, name, getattr(owner, name)


def load_part(
    folder: Path, config: PreTrainedConfig, part: ModelPart, precision: Precision, use: Add = ignore
) -> PreTrainedModel:
    """A model in eval mode that holds `part` alone, with our attention and experts plugged in (linears still stock).

    `use` is told each tensor that is taken (verify.py). Weights of linears are still mapped from the files, for packing;
    all else is memory of its own, so that files may change or shrink while the model serves.
    """
    tensors = read_tensors(folder, config, part, use)
    cls = _pruned_class(config, part)
    check_agreement(cls, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder)
    config._attn_implementation = attention.NAME
    try:
        with _loading:
            model, info = cls.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=DTYPES[precision],
                attn_implementation=attention.NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are listed in `info`, and refused below by name
            )
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: {str(error).splitlines()[0]}") from error
    missing = sorted(k for k in info["missing_keys"] if _is_needed(k, part))
    if missing or info["mismatched_keys"]:
        wrong = [
            f"{key} (stored {list(stored)}, needed {list(needed)})" for key, stored, needed in info["mismatched_keys"]
        ]
        names = ", ".join([*missing, *wrong][:3])
        raise ModelError(f"{folder}: tensors missing or of the wrong shape: {names}")
    guard(model)
    pack_experts(model)
    _unmap(model, tensors.values())
    return model.eval().requires_grad_(False)


def _unmap(model: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Copy each parameter that lies in one of the mapped `tensors`, unless it is packed later and then dropped."""
    mapped = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    packed = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
    packed -= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        index = bisect_right(mapped, parameter.data_ptr(), key=lambda found: found[0]) - 1
        if id(parameter) not in packed and index >= 0 and parameter.data_ptr() < mapped[index][1]:
            parameter.data = parameter.data.clone()


def _is_needed(key: str, part: ModelPart) -> bool:
    if re.search(r"\.\d+\.", key):
        return True
    return part.head or (part.embed and "norm" not in key)


def read_tensors(folder: Path, config: PreTrainedConfig, part: ModelPart, use: Add) -> dict[str, Tensor]:
    """The tensors of `part`, mapped from the checkpoint's files. Raises ModelError for missing or corrupt ones."""
    entries = {entry.name: entry for entry in read_entries(folder)}
    names: set[str] = set()
    if part.span is not None:
        names |= set(span_tensors(entries, part.span))
    if part.embed or part.head:
        tied = bool(getattr(config, "tie_word_embeddings", False))
        names |= set(ends_tensors(entries, embed=part.embed, head=part.head, tied=tied))
    out: dict[str, Tensor] = {}
    for file in sorted({entries[name].file for name in names}):
        with _opened(folder / file) as handle:
            out.update((name, handle.get_tensor(name)) for name in names if entries[name].file == file)
    for name, tensor in out.items():
        use(entries[name], tensor.reshape(-1).view(torch.uint8).numpy())
    return out


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:  # it was whole when its header was read
        raise ModelError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _pruned_class(config: PreTrainedConfig, part: ModelPart) -> type[PreTrainedModel]:
    base: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
        base.__init__(self, config, *args, **kwargs)
        _, _, layers = find_layers(self, config.num_hidden_layers)
        for index in range(len(layers)):
            if part.span is None or not part.span.start <= index < part.span.end:
                layers[index] = Pass()
        tied = bool(getattr(config, "tie_word_embeddings", False))
        if not part.embed and not (part.head and tied):
            self.set_input_embeddings(Pass())
        if not part.head:
            self.set_output_embeddings(Pass())
            self.all_tied_weights_keys = {}

    return type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})


class Captured(Exception):
    """Ends a forward pass early once the wanted hidden state is known."""


class Tap:
    """A hook before a model's first layer: it puts a hidden state in there, or takes out what would have entered."""

    def __init__(self, layer: nn.Module) -> None:
        self.injected: Tensor | None = None
        self._captured: Tensor | None = None
        layer.register_forward_pre_hook(self._divert, with_kwargs=True)

    def _divert(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.injected is None:
            self._captured = args[0] if args else kwargs["hidden_states"]
            raise Captured
        if args:
            return (self.injected, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.injected}

    def take(self) -> Tensor:
        captured, self._captured = self._captured, None
        assert captured is not None
        return captured
