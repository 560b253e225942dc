"""Numbers and lists of a GGUF header that large lists would be made of, or that take long to read: refused in one line."""

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.checkpoint.gguf import Gguf, GgufTensor
from manyhands.checkpoint.gguf_architectures import ARCHITECTURES
from manyhands.checkpoint.gguf_model import config_json
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.errors import ModelError
from manyhands.testing.gguf import write_gguf
from tests.checkpoint.test_gguf import change
from tests.gguf_files import tiny_gguf

HUGE = 1 << 60
LONG = 1 << 22


@contextmanager
def refused(message: str) -> Iterator[None]:
    """What is within is refused in one line, in a moment and with little memory."""
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as caught:
            yield
        assert tracemalloc.get_traced_memory()[1] < 8 << 20  # a switch for each number of a long list
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and time.process_time() - began < 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_more_layers_than_a_recipe_may_have_are_refused_before_lists_of_as_many_are_made(arch: str) -> None:
    """A header of 16 kB of minimax-m3 took 6 GB."""
    facts = {"general.architecture": arch, f"{arch}.block_count": HUGE}
    embedding = GgufTensor("token_embd.weight", "F32", (264, 64), 0, 4 * 264 * 64, "f.gguf")
    with refused(f"its block_count is {HUGE}; at most 1024 layers are read"):
        config_json(Gguf("f.gguf", facts, (embedding,), 0), lambda tensor: b"")


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("minimax_m3_vl_text", "block_count", 1025, "its block_count is 1025; at most 1024"),
        ("lfm2", "attention.head_count_kv", np.ones(LONG, np.uint8), "a whole number from 0 for each of 4 layers"),
        ("hy_v4", "swiglu_clamp_exp", np.arange(LONG, dtype=np.float32), "one number for all layers is needed"),
        ("hy_v4", "swiglu_clamp_exp", np.full(4, np.nan, np.float32), "one number for all layers is needed"),
        ("bailing_hybrid", "swiglu_clamp_exp", np.ones(LONG, np.float64), "a number for each of 4 layers is needed"),
    ],
)
def test_a_long_list_is_not_gone_through(family: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    raw = tiny_gguf(family, tmp_path / "f.gguf", layers=4)[0].read_bytes()
    arch = change(raw).facts["general.architecture"]
    config_json(change(raw), lambda tensor: b"")  # imports what it needs
    found = change(raw, **{f"{arch}.{key}".replace(".", "__"): value})
    with refused(message):
        config_json(found, lambda tensor: b"")


def test_a_head_of_countless_columns_makes_no_list_of_factors(tmp_path: Path) -> None:
    raw = tiny_gguf("gemma4_text", tmp_path / "f.gguf", layers=4)[0].read_bytes()
    wide = {f"gemma4__attention__{kind}_length": HUGE for kind in ("key", "value")}
    found = change(raw, **wide)
    with refused(f"rope_freqs.weight is not {HUGE // 2} factors"):
        config_json(found, lambda tensor: b"\0\0\x80\x3f" * tensor.shape[0])


@pytest.mark.parametrize("key", ["general.alignment", "general.architecture"])
def test_a_list_in_place_of_a_value_is_shown_on_one_line(key: str, tmp_path: Path) -> None:
    facts = {"general.architecture": "llama", key: np.full(4000, 1.25, np.float32)}
    with pytest.raises(ModelError, match=r"is array\(\[1.25, 1.25") as caught:
        config_json(read_gguf(write_gguf(tmp_path / "f.gguf", facts, [])), lambda tensor: b"")
    assert "\n" not in str(caught.value)
