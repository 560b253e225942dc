"""How one architecture of GGUF is read: an entry of the table in gguf_architectures.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from manyhands.checkpoint import gguf_names as names
from manyhands.checkpoint.gguf import Gguf
from manyhands.checkpoint.gguf_keys import Config, GgufKeys
from manyhands.checkpoint.header import TensorEntry

QKV: Final = ("attn_q", "attn_k", "attn_v")
ATTENTION: Final = (*QKV, "attn_output")
UP_DOWN: Final = ("ffn_up", "ffn_down")
NORMS: Final = (None, ("attn_norm", "ffn_norm"))
BLOCK: Final = ("ffn_gate", "ffn_up", "ffn_down")
CORRECTED: Final = (None, ("exp_probs_b",))
STEPS: Final = ((None, ("ssm_dt",)),)
# Products that have biases together or not at all, and the field of the config that says so; None where the recipe knows.
Biases = tuple[tuple[str | None, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture of GGUF is read: its model_type and class in transformers, its tensors, what its config adds.

    `tensors` (gguf_names.py): of a layer. `ends`: all others. `lists`: of the metadata, each a tensor of every layer. `layers`:
    the path of layers. `eps`: the epsilon's field. `latent`: attention is latent, its widths are read by `more`. `mixed`:
    layers without attention have no key heads. `sparse`: all layers have experts, and the width of other blocks may not be
    stated. `narrow`: values may be narrower than keys. `uneven`: layers have blocks of different widths, or none, which `more`
    reads. `varied`: layers may have different numbers of heads, which `more` reads. `own`: entries that are neither whole
    tensors nor parts of a stack; of the tensors `cut`, and of the metadata. `again`: of those that there are, the entries of
    layers that are gone through again.
    """

    model_type: str
    name: str
    tensors: Mapping[str, str]
    more: Callable[[GgufKeys, Config], Config] = lambda keys, config: {}
    conventions: tuple[str, ...] = ()
    latent: bool = False
    mixed: bool = False
    sparse: bool = False
    narrow: bool = False
    uneven: bool = False
    varied: bool = False
    eps: str = "rms_norm_eps"
    ends: Mapping[str, str] = field(default_factory=lambda: names.ENDS)
    layers: str = "model.layers"
    lists: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    own: Callable[[Gguf], list[TensorEntry]] = lambda gguf: []
    cut: tuple[str, ...] = ()
    again: Callable[[Gguf, list[TensorEntry]], list[TensorEntry]] = lambda gguf, entries: []
    biases: Biases = (("attention_bias", ATTENTION), ("mlp_bias", BLOCK))

    def layer_tensor(self, name: str) -> str | None:
        """The name in transformers of a layer's tensor, None if it has no such tensor."""
        stem, _, kind = name.rpartition(".")
        if not stem:
            return self.tensors.get(f"{name}.")
        whole, known = self.tensors.get(name), self.tensors.get(stem)
        if known is None or kind not in ("weight", "bias"):
            return whole
        return whole or f"{known}.{kind}"
