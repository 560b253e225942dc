"""A second load takes what the first one packed: the same bits, nothing read of the matrices, damage healed."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.checkpoint.manifest import Manifest, build_manifest
from manyhands.core import Precision, Span
from manyhands.engine import packing
from manyhands.engine.span import Piece
from manyhands.errors import Damaged
from manyhands.testing.tiny import make_tiny
from manyhands.weights.packed import PACKED
from manyhands.worker.runner import load_ends, load_span
from tests.quantised_cases import CASES
from tests.quantised_files import quantised_tiny

IDS = list(range(1, 40))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def logits(folder: Path, manifest: Manifest | None, precision: Precision, span: Span) -> NDArray[np.float32]:
    ends, layers = load_ends(folder, precision, 1, manifest), load_span(folder, span, precision, 1, manifest)
    rows = layers.step(ends.embed(IDS).tobytes(), [Piece(layers.new_cache(64), 0, len(IDS))], 1)
    return ends.logits(rows, len(IDS), 1)


def packed(home: Path) -> list[Path]:
    return sorted((home / PACKED).rglob("*.pack"))


def counts(said: pytest.LogCaptureFixture) -> list[str]:
    return [line.split("matrices=")[1].split(", in")[0] for line in said.messages if "matrices=" in line]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "minicpm3", "awq", "act-order"])
@pytest.mark.parametrize("precision", ["w4", "w8"])
def test_the_second_load_packs_nothing_and_gives_the_same_bits(
    family: str, precision: Precision, tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tied heads, experts and latent attention too; a part of the layers takes what all of them left."""
    caplog.set_level(logging.INFO)
    if family in CASES:
        config, pack, _, facts = CASES[family]
        folder, _ = quantised_tiny(tmp_path / "q", config, pack, layers=2, **facts)
    else:
        folder = make_tiny(family, tmp_path / family, layers=2)
    manifest = build_manifest(folder)
    plain = logits(folder, None, precision, Span(0, 2))
    assert not packed(home)
    first = logits(folder, manifest, precision, Span(0, 2))
    files = packed(home)
    assert files
    second = logits(folder, manifest, precision, Span(0, 2))
    assert plain.tobytes() == first.tobytes() == second.tobytes()
    assert packed(home) == files
    assert [line.startswith("0 packed before") for line in counts(caplog)] == [True, True, False, False]
    assert all(line.endswith(" 0 packed now") for line in counts(caplog)[2:])
    caplog.clear()
    load_span(folder, Span(1, 2), precision, 1, manifest)
    assert counts(caplog)[0].endswith(" 0 packed now")


def test_wide_precisions_and_unproven_weights_are_not_kept(tmp_path: Path, home: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama", layers=1)
    load_span(folder, Span(0, 1), "bf16", 1, build_manifest(folder))
    load_span(folder, Span(0, 1), "w4", 1)
    assert not packed(home)


def test_damage_on_the_disk_is_healed_and_never_served(tmp_path: Path, home: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama", layers=2)
    manifest = build_manifest(folder)
    right = logits(folder, manifest, "w4", Span(0, 2))
    for path in packed(home):
        raw = bytearray(path.read_bytes())
        raw[-100] ^= 64
        path.write_bytes(raw)
    assert logits(folder, manifest, "w4", Span(0, 2)).tobytes() == right.tobytes()
    assert logits(folder, manifest, "w4", Span(0, 2)).tobytes() == right.tobytes()


def test_what_damaged_weights_give_is_not_kept(tmp_path: Path, home: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama", layers=2)
    manifest = build_manifest(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1000, 2)
        file.write(b"\x55\x44")
    with pytest.raises(Damaged):
        load_span(folder, Span(0, 2), "w4", 1, manifest)
        load_ends(folder, "w4", 1, manifest)
    assert len(packed(home)) in (0, 2)  # of the layers, if the damage is in the ends
    if packed(home):
        with pytest.raises(Damaged):
            load_ends(folder, "w4", 1, manifest)


def test_another_packing_makes_files_of_its_own(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("llama", tmp_path / "llama", layers=1)
    manifest = build_manifest(folder)
    load_span(folder, Span(0, 1), "w4", 1, manifest)
    load_span(folder, Span(0, 1), "w8", 1, manifest)
    assert len(packed(home)) == 2
    monkeypatch.setattr(packing, "packing_digest", lambda: "of another version")
    load_span(folder, Span(0, 1), "w4", 1, manifest)
    assert len(packed(home)) == 3


@pytest.mark.parametrize(
    ("package", "file", "old", "new"),
    [
        ("engine", "compile_experts.py", "(op.up, op.down)", "(op.down, op.up)"),
        ("engine", "quantised.py", "def ", "def  "),
        ("program", "tensors.py", "def wide_weights", "def  wide_weights"),
        ("checkpoint", "quantised.py", "def ", "def  "),
    ],
)
def test_a_version_that_takes_matrices_in_another_order_makes_files_of_its_own(
    package: str, file: str, old: str, new: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ups and downs of experts of one size its first load took the one for the other, in silence."""
    folder = make_tiny("mixtral", tmp_path / "mixtral", layers=1)
    manifest, other = build_manifest(folder), tmp_path / "manyhands"
    load_span(folder, Span(0, 1), "w4", 1, manifest)
    for source in packing._SOURCES:
        shutil.copytree(source, other / source.name, ignore=lambda at, names: [n for n in names if n[-3:] != ".py"])
    monkeypatch.setattr(packing, "_SOURCES", tuple(other / source.name for source in packing._SOURCES))
    code = other / package / file
    for changed in (code.read_text(), code.read_text().replace(old, new, 1)):
        code.write_text(changed)
        packing.packing_digest.cache_clear()
        load_span(folder, Span(0, 1), "w4", 1, manifest)
        assert len(packed(home)) == 1 + (new in changed)
    packing.packing_digest.cache_clear()
