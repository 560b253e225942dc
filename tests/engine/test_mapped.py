"""Files whose tensors begin at odd bytes, as those of safetensors before 0.3 may."""

import weakref
from pathlib import Path

import pytest

from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.verify import ignore
from manyhands.core import Span
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.span import Piece
from manyhands.errors import ModelError
from manyhands.testing.tiny import make_tiny
from manyhands.worker.runner import load_ends, load_span


def make_odd(folder: Path) -> Path:
    """One byte more in the header, so that no number begins at a multiple of its size."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    more = 1 + length % 2
    file.write_bytes((length + more).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * more + raw[8 + length :])
    (folder / "manyhands.manifest.json").unlink(missing_ok=True)
    assert any(entry.start % 2 for entry in read_entries(folder))
    return folder


def logits(folder: Path) -> bytes:
    ends, span = load_ends(folder, "bf16", 1), load_span(folder, Span(0, 2), "bf16", 1)
    rows = span.step(ends.embed([1, 2, 3]).tobytes(), [Piece(span.new_cache(8), 0, 3)], 1)
    return ends.logits(rows, 3, 1).tobytes()


def test_tensors_at_odd_bytes_have_the_same_bits_and_one_copy_at_a_time(tmp_path: Path) -> None:
    """All copies were kept until the last layer had been loaded: a span took twice its bytes."""
    even = logits(make_tiny("llama", tmp_path / "llama", layers=2))
    folder = make_odd(tmp_path / "llama")
    assert logits(folder) == even
    with MappedTensors(folder, ignore) as tensors:
        copies = [weakref.ref(tensors.read(entry.name).array) for entry in tensors.entries]
        assert [copy() is None for copy in copies] == [*[True] * (len(copies) - 1), False]
        last = tensors.entries[-1].name
        assert tensors.read(last) is tensors.read(last)


def test_a_table_that_stays_in_its_file_is_refused_at_an_odd_byte(tmp_path: Path) -> None:
    """It was copied, which no memory holds."""
    folder = make_odd(make_tiny("gemma3n_text", tmp_path / "gemma"))
    with pytest.raises(ModelError, match=r"embed_tokens_per_layer.* no multiple of the size of its numbers") as refused:
        load_ends(folder, "bf16", 1)
    assert "\n" not in str(refused.value)
