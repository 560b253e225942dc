"""What are the benchmarks run on? Checkpoints with random weights in the shapes of models people know, made once.

Speed depends on shapes, not on what the weights say. They lie in $MANYHANDS_HOME/bench (about 1 GB for 0.5b, 2.2 GB for
1.1b, 14.5 GB for 7b) with a byte tokenizer, so that everything that loads a checkpoint loads them. The layers of 7b are one
layer, each time shifted by some elements: a whole one of its size would not fit into memory while it is made.
Run: python -m bench.shapes [NAME ...] (all but 7b)
"""

import json
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.config import home_from_env
from manyhands.testing.tiny import make_tiny

CONTEXT = 2048
LARGE = 4096  # hidden size from which on one layer is drawn, and repeated
SHIFT = 37  # elements by which a layer is shifted against the one before


@dataclass(frozen=True, slots=True)
class Shape:
    """A family and its sizes. `like` names the model that has them."""

    like: str
    family: str
    layers: int
    hidden: int
    vocab: int
    sizes: dict[str, Any] = field(default_factory=dict)


def _sizes(heads: int, key_heads: int, intermediate: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": key_heads, "intermediate_size": intermediate}


SHAPES = {
    "0.5b": Shape("Qwen2.5-0.5B", "qwen2", 24, 896, 151936, _sizes(14, 2, 4864)),
    "1.1b": Shape("TinyLlama-1.1B", "llama", 22, 2048, 32000, _sizes(32, 4, 5632)),
    "7b": Shape("Mistral-7B", "mistral", 32, 4096, 32000, _sizes(32, 8, 14336)),
    "tales": Shape("tales", "llama", 12, 192, 4096, _sizes(6, 2, 512)),
    "toy": Shape("a toy: three layers that cost next to nothing", "llama", 3, 64, 264),
}


def checkpoint(name: str) -> Path:
    """The folder of shape `name`; made if it is not there yet (half a minute for 0.5b, a minute for 1.1b)."""
    folder = home_from_env() / "bench" / name
    if not (folder / "config.json").exists():
        _make(SHAPES[name], folder)
    return folder


def _make(shape: Shape, folder: Path) -> None:
    """Write into a folder beside it and rename, so that half a checkpoint is never found."""
    began = time.monotonic()
    print(f"making a checkpoint in the shape of {shape.like} in {folder}", file=sys.stderr, flush=True)
    half = folder.with_name(folder.name + ".part")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    layers = 1 if shape.hidden >= LARGE else shape.layers
    more = {"hidden": shape.hidden, "vocab": shape.vocab, "context": CONTEXT, **shape.sizes}
    make_tiny(shape.family, half, layers=layers, **more)
    if layers < shape.layers:
        _repeat_layer(half, shape.layers)
    half.rename(folder)
    print(f"made in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _repeat_layer(folder: Path, layers: int) -> None:
    """Make the checkpoint of one layer in `folder` one of `layers`, a file each."""
    from safetensors.torch import load_file, save_file

    one = folder / "model.safetensors"
    tensors, first, files = load_file(one), "model.layers.0.", dict[str, str]()
    for layer in range(layers):
        own = {
            name.replace(first, f"model.layers.{layer}."): tensor.flatten().roll(SHIFT * layer).reshape(tensor.shape)
            for name, tensor in tensors.items()
            if name.startswith(first) or layer == 0
        }
        file = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        save_file(own, folder / file, {"format": "pt"})
        files |= dict.fromkeys(own, file)
    one.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if (kinds := config.get("layer_types")) is not None:
        config["layer_types"] = kinds[:1] * layers
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def main() -> int:
    for name in sys.argv[1:] or [name for name, shape in SHAPES.items() if shape.hidden < LARGE]:
        print(name, checkpoint(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
