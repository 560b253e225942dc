"""What are the benchmarks run on? Checkpoints with random weights in the shapes of models people know, made once.

Speed depends on shapes, not on what the weights say. They lie in $MANYHANDS_HOME/bench (about 1 GB for 0.5b, 2.2 GB for
1.1b) with a byte tokenizer, so that everything that loads a checkpoint loads them. Run: python -m bench.shapes [NAME ...]
"""

import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.config import home_from_env
from manyhands.testing.tiny import make_tiny

CONTEXT = 2048


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
    make_tiny(
        shape.family,
        half,
        layers=shape.layers,
        hidden=shape.hidden,
        vocab=shape.vocab,
        context=CONTEXT,
        **shape.sizes,
    )
    half.rename(folder)
    print(f"made in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    for name in sys.argv[1:] or SHAPES:
        print(name, checkpoint(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
