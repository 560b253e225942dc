"""manyhands.worker.choice, runner: which engine computes a model here, that the native one needs no torch, what is refused."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from manyhands.checkpoint.header import read_header
from manyhands.checkpoint.manifest import build_manifest
from manyhands.core import Precision, Span
from manyhands.engine import golden, library
from manyhands.engine.library import FORCED
from manyhands.engine.span import Piece, Rows, SpanRunner
from manyhands.errors import CutError, Damaged, ModelError
from manyhands.testing.tiny import make_tiny
from manyhands.worker.choice import program_of
from manyhands.worker.runner import arithmetic_class, describe, load_ends, load_span, precision_note
from tests.worker.pipeline import forced

LAYERS = 4
NATIVE = library.supported()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("runner") / "llama", layers=LAYERS, seed=4)


@pytest.fixture(autouse=True)
def by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is forced, and the home is new."""
    monkeypatch.delenv(FORCED, raising=False)
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))


def config(folder: Path) -> bytes:
    return (folder / "config.json").read_bytes()


def rows_through(spans: Sequence[SpanRunner], rows: Rows, parts: Sequence[Span | None]) -> Rows:
    for span, part in zip(spans, parts, strict=True):
        rows = span.step(rows.tobytes(), [Piece(span.new_cache(len(rows), part), 0, len(rows))], 1)
    return rows


_NO_TORCH = """
import asyncio, sys
from pathlib import Path
from manyhands.core import SamplingParams, Span
from manyhands.testing.swarm import memory_swarm
async def main():
    async with memory_swarm(Path(sys.argv[1]), "0-1,2-3", precision=sys.argv[2]) as swarm:
        answer = await swarm.origin.complete(swarm.origin.request("ab", SamplingParams(max_tokens=4, temperature=1.0)))
        assert len(answer.token_ids) == 4
        print(swarm.hops[0].hosts[0].engine.model.runner.back_end, *{"torch", "transformers"} & sys.modules.keys())
asyncio.run(main())
"""


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_process_that_serves_and_asks_loads_no_torch(folder: Path, precision: Precision) -> None:
    """Nodes and origin of a whole request, in a fresh interpreter."""
    command = [sys.executable, "-c", _NO_TORCH, str(folder), precision]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [NATIVE], done.stderr[-2000:]


def test_what_has_no_program_or_precision_is_refused(folder: Path) -> None:
    unknown = config(folder).replace(b'"llama"', b'"bert"')
    precisions: list[Precision] = ["bf16", "fp32", "w8", "bf16+c8"]
    for precision in precisions:
        assert len(program_of(config(folder), precision).layers) == LAYERS
        with pytest.raises(ModelError, match="bert"):
            program_of(unknown, precision)
    with pytest.raises(ModelError, match=r"computes in .*, not in fp16: give --dtype bf16"):
        program_of(config(folder), "fp16")


def test_a_forced_back_end_computes_or_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What MANYHANDS_ENGINE names is never replaced by another back end."""
    for name in library.supported():
        monkeypatch.setenv(FORCED, name)
        others = [other for other in library.supported() if other != name]
        before = [library.calls(other) for other in others]
        span = load_span(folder, Span(0, 2), "bf16", 1)
        rows_through([span], load_ends(folder, "bf16", 1).embed([1, 2]), [None])
        assert span.back_end == name and [library.calls(other) for other in others] == before
        with pytest.raises(ModelError, match="not in fp16"):
            load_span(folder, Span(0, 2), "fp16", 1)
        with pytest.raises(ModelError, match="model_type"):
            program_of(config(folder).replace(b'"llama"', b'"bert"'), "bf16")
    for unknown in ("sse9", "torch", "cuda:x", "torch-cpu:1"):
        monkeypatch.setenv(FORCED, unknown)
        for act in (lambda: load_span(folder, Span(0, 2), "bf16", 1), lambda: describe(folder, "bf16")):
            with pytest.raises(ModelError, match=rf"{unknown}: this CPU runs .* cuda\[:N\], torch-cpu"):
                act()


def test_without_a_fast_back_end_plain_c_serves_and_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU with neither AVX2 nor NEON. Where no back end reproduces the digests nothing serves."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))  # without notes of what was proven
    monkeypatch.setattr(library, "supported", lambda: ["scalar"])
    golden._chosen.cache_clear()
    try:
        assert program_of(config(folder), "bf16") and "plain C" in precision_note(config(folder), "bf16")
        golden._chosen.cache_clear()
        monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "another"))
        monkeypatch.setattr(golden, "_unlike", lambda name, group: ("norm",))
        with pytest.raises(ModelError, match="no back end reproduces the golden digests"):
            program_of(config(folder), "bf16")
    finally:
        golden._chosen.cache_clear()


def test_classes_of_engines_never_meet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One class for all back ends; another for torch, another precision, and another Program."""
    found = set()
    for name in library.supported():
        monkeypatch.setenv(FORCED, name)
        found.add(arithmetic_class(config(folder), "bf16"))
        assert describe(folder, "bf16").arithmetic in found and describe(folder, "bf16").back_end == name
    assert len(found) == 1
    wider = config(folder).replace(b'"rms_norm_eps": 1e-0', b'"rms_norm_eps": 3e-0')
    assert wider != config(folder)
    found |= {arithmetic_class(config(folder), "fp32"), arithmetic_class(wider, "bf16")}
    with forced("torch-cpu"):
        found.add(arithmetic_class(config(folder), "bf16"))
    assert len(found) == 4


def test_facts_are_those_of_torch(folder: Path) -> None:
    native = describe(folder, "bf16")
    with forced("torch-cpu"):
        other = describe(folder, "bf16")
    assert native.back_end == NATIVE and other.back_end == "torch-cpu"
    for name in ("num_layers", "hidden_size", "vocab_size", "context_length"):
        assert getattr(native, name) == getattr(other, name)


def test_parts_of_a_span_give_its_bits(folder: Path) -> None:
    """A session may use some layers of those that a node holds; its cache is of these alone."""
    span = load_span(folder, Span(0, LAYERS), "bf16", 1)
    rows = load_ends(folder, "bf16", 1).embed([1, 2, 3, 4, 5])
    whole = rows_through([span], rows, [None])
    for cut in ([Span(0, 1), Span(1, 4)], [Span(0, 2), Span(2, 3), Span(3, 4)]):
        assert np.array_equal(rows_through([span] * len(cut), rows, cut), whole)
    with pytest.raises(CutError):
        span.new_cache(5, Span(2, LAYERS + 1))
    with pytest.raises(CutError):
        load_span(folder, Span(2, LAYERS + 1), "bf16", 1)
    one, two = span.new_cache(5, Span(0, 1)), span.new_cache(5, Span(1, 2))
    with pytest.raises(ModelError, match="different layers"):
        span.step(rows.tobytes(), [Piece(one, 0, 2), Piece(two, 0, 3)], 1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "deepseek_v3"])
def test_every_tensor_is_proven_by_the_manifest(family: str, tmp_path: Path) -> None:
    """A byte of any tensor that a span or its ends use, changed on disk: refused by name; other parts are served."""
    folder = make_tiny(family, tmp_path / family, layers=2, seed=1)
    manifest = build_manifest(folder)
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    for entry in read_header(path):
        middle = (entry.start + entry.end) // 2
        raw[middle] ^= 1
        path.write_bytes(raw)
        raw[middle] ^= 1
        with pytest.raises(Damaged, match="SHA-256") as failed:
            load_span(folder, Span(0, 2), "bf16", 1, manifest)
            load_ends(folder, "bf16", 1, manifest)
        assert failed.value.names == (entry.name,)


def test_weights_are_memory_of_their_own(tmp_path: Path) -> None:
    """A file that shrinks while the model serves: pages of it that are gone would kill the process."""
    folder = make_tiny("qwen2", tmp_path / "model", layers=2, seed=1)
    span, ends = load_span(folder, Span(0, 2), "bf16", 1), load_ends(folder, "bf16", 1)
    rows = rows_through([span], ends.embed([1, 2, 3]), [None])
    want = ends.logits(rows, 3, 1)
    with (folder / "model.safetensors").open("r+b") as handle:
        handle.truncate(100)
    again = rows_through([span], ends.embed([1, 2, 3]), [None])
    assert np.array_equal(ends.logits(again, 3, 1), want)
