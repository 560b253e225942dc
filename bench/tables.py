"""How much of a table that stays in the checkpoint's files does a node's memory hold?

    python -m bench.tables

Two models with random weights: one with a second table of embeddings (gemma3n, as Gemma 4 E2B has it), one with a table of
n-grams (qwen4_exp, as Qwen3.8-Flash-Next has it), each once with a table of some 300 MB and once with one of few rows, all
else equal. A process loads embedding and layers as a node does, proven by a manifest, and computes 512 tokens; then its
resident memory (Pss of smaps_rollup) with the large table less that with the small one is what memory holds of the table.
Target: at most a twentieth, at bf16 and at w4, where rows are rounded as they are read. `mapped_mb`: the same before the
first token, while what was read to prove the files is mapped still, which the system takes back at need.
"""

import json
import os
import random
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.memory import resident_mb
from bench.report import finish, note
from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.manifest import build_manifest
from manyhands.core import Precision, Span
from manyhands.engine import golden
from manyhands.engine.span import Piece
from manyhands.program.families import read_program
from manyhands.program.tensors import ends_tensors, layer_tensors, whole_tensors
from manyhands.testing.tiny import make_tiny
from manyhands.worker.runner import load_ends, load_span

LAYERS: Final = 2
TOKENS, CHUNK = 512, 32
HIDDEN: Final = 256
PRECISIONS: Final[tuple[Precision, ...]] = ("bf16", "w4")
# By family: the part of the table's tensors that their names have, and what makes it large.
TABLES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "gemma3n_text": (".embed_tokens_per_layer.", {"vocab_size_per_layer_input": 1_200_000}),
    "qwen4_exp_text": (".ngram_embedding.", {"ngram_vocab_size_base": 1_200_000}),
}


def residents(folder: Path, precision: Precision) -> tuple[float, float]:
    """MB of this process once the model is loaded, and once tokens were computed."""
    manifest, chance = build_manifest(folder), random.Random(1)
    ends = load_ends(folder, precision, 2, manifest, head=False)
    span = load_span(folder, Span(0, LAYERS), precision, 2, manifest)
    before, cache = resident_mb(os.getpid()), span.new_cache(TOKENS)
    for start in range(0, TOKENS, CHUNK):
        rows = ends.embed([chance.randrange(256) for _ in range(CHUNK)])
        span.step(rows.tobytes(), [Piece(cache, start, CHUNK)], 2)
    return before, resident_mb(os.getpid())


def made(family: str, out: Path) -> None:
    """A checkpoint whose table has few rows."""
    make_tiny(family, out, layers=LAYERS, hidden=HIDDEN)


def enlarge(small: Path, out: Path, more: dict[str, Any]) -> None:
    """The same with another config and the rows of its table again and again, as many as that needs."""
    from safetensors.torch import load_file, save_file
    from torch import tensor

    shutil.copytree(small, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **more}))
    program, stored = read_program(out), load_file(out / "model.safetensors")
    needed = ends_tensors(program, embed=True, head=True)
    for layer in program.layers:
        needed |= layer_tensors(layer)
    for name, shape in needed.items():
        if tuple(stored[name].shape) != shape:
            stored[name] = stored[name].repeat(-(-shape[0] // len(stored[name])), 1)[: shape[0]].contiguous()
    stored |= {name: tensor(list(numbers)) for name, numbers in whole_tensors(program).items()}
    save_file(stored, out / "model.safetensors", {"format": "pt"})


def in_process(function: Any, *given: Any) -> Any:
    """What a function gives in a process of its own."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(function, *given).result()


def measure(family: str, home: Path) -> dict[str, Any]:
    name, more = TABLES[family]
    folders = small, large = home / f"{family} small", home / f"{family} large"
    note(f"making two checkpoints of {family}")
    in_process(made, family, small)
    in_process(enlarge, small, large, more)
    sizes = [sum(len(entry) for entry in read_entries(folder) if name in entry.name) for folder in folders]
    found: dict[str, Any] = {"table_mb": round((sizes[1] - sizes[0]) / (1 << 20), 1)}
    for precision in PRECISIONS:
        note(f"loading {family} at {precision}")
        few, many = (in_process(residents, folder, precision) for folder in folders)
        mapped, held = (round(b - a, 1) or 0.0 for a, b in zip(few, many, strict=True))
        found[precision] = {"mapped_mb": mapped, "held_mb": held, "of_table": round(held / found["table_mb"], 3)}
    return found


def main() -> int:
    with TemporaryDirectory() as home:
        os.environ["MANYHANDS_HOME"] = home
        for precision in PRECISIONS:
            in_process(golden.choose, precision)  # proven once, in memory that no process measured here takes
        figures = {family: measure(family, Path(home)) for family in TABLES}
    holds = {f"{family} {p}": figures[family][p]["of_table"] <= 0.05 for family in TABLES for p in PRECISIONS}
    return finish("tables", figures, {"of_table": 0.05}, holds)


if __name__ == "__main__":
    sys.exit(main())
