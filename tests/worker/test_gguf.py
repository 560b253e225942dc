"""GGUF files on a node: the native engine computes them wherever it runs, and proves their bytes; nothing else reads them."""

from pathlib import Path

import numpy as np
import pytest

from manyhands.checkpoint.folder import read_config, read_entries
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.manifest import build_manifest
from manyhands.core import Span
from manyhands.engine import library
from manyhands.errors import Damaged, ModelError
from manyhands.worker.runner import describe, load_ends, load_span, precision_note
from tests.gguf_files import tiny_gguf


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    file, _ = tiny_gguf("llama", tmp_path / "model.gguf", "Q4_0", layers=2)
    return gguf_folder(file, tmp_path / "home")


def test_the_native_engine_serves_it(folder: Path) -> None:
    assert describe(folder, "bf16").num_layers == 2
    assert (
        load_span(folder, Span(0, 2), "bf16", 1).back_end == describe(folder, "bf16").back_end == library.supported()[0]
    )


def test_what_cannot_compute_it_refuses_it(folder: Path) -> None:
    with pytest.raises(ModelError, match="quantised files are computed in bf16, fp32, w8, w4, not in fp16"):
        describe(folder, "fp16")


def test_a_user_is_told_what_bf16_loses(folder: Path) -> None:
    assert "rounded to bf16" in precision_note(read_config(folder), "bf16")
    assert precision_note(read_config(folder), "fp32") == ""


def test_a_changed_block_is_not_served(folder: Path) -> None:
    manifest = build_manifest(folder)
    load_span(folder, Span(0, 2), "bf16", 1, manifest)
    load_ends(folder, "bf16", 1, manifest)
    entry = next(entry for entry in read_entries(folder) if entry.name.endswith("layers.1.mlp.up_proj.weight"))
    with (folder / entry.file).open("r+b") as file:
        file.seek(entry.start + 7)
        file.write(b"\x55")
    with pytest.raises(Damaged, match=r"up_proj"):
        load_span(folder, Span(0, 2), "bf16", 1, manifest)


def test_a_cut_changes_no_bit(folder: Path) -> None:
    ends, whole = load_ends(folder, "bf16", 1), load_span(folder, Span(0, 2), "bf16", 1)
    parts = [load_span(folder, Span(n, n + 1), "bf16", 1) for n in range(2)]
    from manyhands.engine.span import Piece

    ids = list(range(1, 40))
    rows = whole.step(ends.embed(ids).tobytes(), [Piece(whole.new_cache(64), 0, len(ids))], 1)
    cut = ends.embed(ids)
    for part in parts:
        cut = part.step(cut.tobytes(), [Piece(part.new_cache(64), 0, len(ids))], 1)
    assert np.array_equal(rows, cut)
