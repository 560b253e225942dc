"""Nanbeige 4.2 in GGUF: its layers are gone through several times, with the last norm in between.

Each time they are layers of their own here, with caches of their own, whose tensors are further entries of the same bytes.
"""

from dataclasses import replace
from typing import Final

from manyhands.checkpoint import gguf_names as names
from manyhands.checkpoint.gguf import Gguf
from manyhands.checkpoint.gguf_architecture import Architecture
from manyhands.checkpoint.gguf_configs import PAIRS, UNROLLED
from manyhands.checkpoint.gguf_keys import MAX_LAYERS, Config, GgufKeys
from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.partition import layer_of

NAME: Final = "nanbeige"


def _times(keys: GgufKeys) -> tuple[int, int, bool]:
    """How many layers the file has, how often they are gone through, and whether a norm comes before each further time."""
    layers, times = keys.count("block_count"), keys.count("num_loops", 1)
    if layers * times > MAX_LAYERS:
        raise keys.refused(f"its {layers} layers are gone through {times} times; at most {MAX_LAYERS} layers are read")
    return layers, times, not keys.flag("skip_loop_final_norm", False)


def nanbeige(keys: GgufKeys, config: Config) -> Config:
    """As many layers as are gone through."""
    layers, times, is_normed = _times(keys)
    keys.only("attention.head_dim", config["head_dim"])
    return {"num_hidden_layers": layers * times, "num_loops": times, "skip_loop_final_norm": not is_normed}


def again(gguf: Gguf, entries: list[TensorEntry]) -> list[TensorEntry]:
    """The entries of the further times."""
    layers, times, is_normed = _times(GgufKeys(gguf, NAME))
    found = []
    for entry in entries:
        layer = layer_of(entry.name)
        for first in range(layers, layers * times, layers):
            if layer is not None and layer < layers:
                found.append(replace(entry, name=entry.name.replace(f".{layer}.", f".{layer + first}.", 1)))
            elif entry.name == names.ENDS["output_norm.weight"] and is_normed:
                found.append(replace(entry, name=f"model.layers.{first}.loop_norm.weight"))
    return found


NANBEIGE: Final = Architecture(
    "nanbeige", "NanbeigeForCausalLM", names.LLAMA, nanbeige, (PAIRS, UNROLLED), biases=(), again=again
)
