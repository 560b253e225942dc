"""Checkpoints of bitnet by the native engine: the logits of transformers, but for its rounding of rows to 8 bits."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from manyhands.core import Precision, Span
from manyhands.engine.span import Piece
from manyhands.errors import ModelError
from manyhands.worker.runner import load_ends, load_span
from tests.engine.test_quantised import numbers, types
from tests.quantised_files import write_tensors
from tests.ternary_files import DIVIDED, PACKED, TRAINED, bitnet, computing, is_matrix, stock, ternary_tiny

PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(40)]
KINDS: dict[str, dict[str, Any]] = {"trained": TRAINED, "packed": PACKED, "divided": DIVIDED}
WIDE: dict[str, Any] = {"hidden": 256, "intermediate_size": 512}


class Ours:
    """A session over a folder's model, in one span or several."""

    def __init__(self, folder: Path, precision: Precision = "fp32", cuts: int = 1) -> None:
        count = 3
        self._ends = load_ends(folder, precision, 1)
        bounds = [count * i // cuts for i in range(cuts + 1)]
        self._spans = [load_span(folder, Span(*cut), precision, 1) for cut in pairwise(bounds)]
        self._caches = [span.new_cache(128) for span in self._spans]
        self._at = 0

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        rows = self._ends.embed(ids)
        for span, cache in zip(self._spans, self._caches, strict=True):
            rows = span.step(rows.tobytes(), [Piece(cache, self._at, len(ids))], 1)
        self._at += len(ids)
        return self._ends.logits(rows, len(ids), 1)


def greedy(model: Ours, count: int) -> list[int]:
    ids = list(PROMPT)
    found = model.logits(ids[:25])
    found = model.logits(ids[25:])
    for _ in range(count):
        ids.append(int(found[-1].argmax()))
        found = model.logits(ids[-1:])
    return ids


def theirs(folder: Path, kind: str, ids: list[int], *, rounds: bool = False) -> NDArray[np.float32]:
    with computing(rounds=rounds), torch.inference_mode():
        found: NDArray[np.float32] = stock(folder, KINDS[kind])(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return found


def distance(found: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """Root mean square of the difference, of the exact numbers' own."""
    return float(np.sqrt(np.square(found - exact).mean() / np.square(exact).mean()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("bitnet", WIDE),
        ("bitnet", {"tie_word_embeddings": True, "hidden_act": "silu"}),
        ("bitnet", {"attention_bias": True}),
        ("bitnet", {"intermediate_size": 76, "num_key_value_heads": 4}),
        ("llama", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_logits_and_greedy_ids_are_transformers(kind: str, family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """In fp32, with rows as they are; trained weights are read of bitnet alone."""
    folder = ternary_tiny(tmp_path / "q", KINDS[kind], family=family, layers=3, **sizes)
    if kind == "trained" and family != "bitnet":
        with pytest.raises(ModelError, match="quantization_mode is 'online'; which is read of the family bitnet alone"):
            Ours(folder)
        return
    if kind == "packed" and "attention_bias" in sizes:
        with pytest.raises(ModelError, match=r"q_proj.bias beside a matrix with a scale of autobitlinear is not read"):
            Ours(folder)
        return
    ids = greedy(Ours(folder), 64)
    expected = theirs(folder, kind, ids)
    assert np.abs(Ours(folder).logits(ids) - expected).max() < 2e-5 * np.abs(expected).max()
    assert ids[len(PROMPT) :] == expected.argmax(1)[len(PROMPT) - 1 : -1].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_rounded_to_8_bits_change_logits_by_a_little(kind: str, tmp_path: Path) -> None:
    """What transformers does and we do not; small weights round rows too, 32 numbers at a time."""
    folder = ternary_tiny(tmp_path / "q", KINDS[kind], layers=3, **WIDE)
    exact, small = Ours(folder).logits(PROMPT), Ours(folder, "w4").logits(PROMPT)
    rounded = theirs(folder, kind, PROMPT, rounds=True)
    assert 0.005 < distance(small, exact) < 0.05 and 0.005 < distance(rounded, exact) < 0.05


@pytest.mark.parametrize("sizes", [WIDE, {}])
@pytest.mark.parametrize("kind", KINDS)
def test_small_weights_hold_the_codes_and_the_scale_in_fp16(kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    folder = ternary_tiny(tmp_path / "q", KINDS[kind], layers=3, **sizes)
    exact = numbers(folder)
    for name, held in numbers(folder, needs_blocks=True).items():
        scale = np.abs(exact[name]).max()
        np.testing.assert_array_equal(np.unique(exact[name] / scale), [-1, 0, 1])
        np.testing.assert_array_equal(held, np.sign(exact[name]) * np.float32(np.float16(scale)), name)
    assert {"TQ2_0" if sizes else "Q4_0"} <= types(folder)
    whole = Ours(folder, "w4").logits(PROMPT)
    assert Ours(folder, "w4", cuts=3).logits(PROMPT).tobytes() == whole.tobytes()
    assert Ours(folder, "w8").logits(PROMPT).tobytes() == whole.tobytes()
    assert distance(Ours(folder, "bf16").logits(PROMPT), Ours(folder).logits(PROMPT)) < 0.05


def test_a_scale_of_bf16_is_held_in_blocks_as_it_is(tmp_path: Path) -> None:
    folder = ternary_tiny(tmp_path / "q", PACKED, layers=3, dtype=torch.bfloat16, **WIDE)
    exact = numbers(folder)
    assert all(np.array_equal(held, exact[name]) for name, held in numbers(folder, needs_blocks=True).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_trained_weights_are_rounded_as_transformers_rounds_them(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = ternary_tiny(tmp_path / "q", TRAINED, layers=3, dtype=dtype, **WIDE)
    for name, found in numbers(folder).items():
        expected = bitnet.WeightQuant.forward(None, load_file(folder / "model.safetensors")[name].float()).numpy()
        np.testing.assert_array_equal(np.sign(found), np.sign(expected))
        np.testing.assert_allclose(found, expected, rtol=3e-7)


def change(folder: Path, name: str, made: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = made(tensors.get(name))
    write_tensors(folder, {key: tensor for key, tensor in tensors.items() if tensor is not None})


MATRIX = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("kind", "name", "made", "said"),
    [
        ("packed", f"{MATRIX}_scale", lambda one: one * 0, "its scale is 0; one number above 0 is needed"),
        ("packed", f"{MATRIX}_scale", lambda one: one / 0, "its scale is inf; one number above 0 is needed"),
        ("packed", f"{MATRIX}_scale", lambda one: one.repeat(2), "its scale is 2 numbers; one number above 0"),
        ("packed", f"{MATRIX}_scale", lambda one: None, "lacks the scales of model.layers.1.mlp.down_proj"),
        ("packed", f"{MATRIX}_scale", lambda one: one * 1e-6, r"not held at w4 or w8: its scale .* is none of fp16"),
        ("divided", f"{MATRIX}_scale", lambda one: one * 1e-9, r"not held at w4 or w8: its scale .* is none of fp16"),
        ("packed", MATRIX, lambda one: one | 3, "a code is 3; 0, 1 and 2 stand for -1, 0 and 1"),
        ("packed", MATRIX, lambda one: one[:-1], r"down_proj.weight is stored as \[60, 96\]"),
        ("packed", MATRIX, lambda one: one.float(), "is stored as F32 beside a scale; 4 outputs to a byte are needed"),
        ("packed", MATRIX, lambda one: one.to(torch.int8), "is stored as I8 beside a scale; 4 outputs to a byte are"),
        ("trained", MATRIX, lambda one: one / 0, "a weight is no finite number: the file is damaged"),
        ("trained", MATRIX, lambda one: one.to(torch.int8), "is stored as I8, or has a scale; BF16, F16, F32 alone"),
        ("trained", f"{MATRIX}_scale", lambda one: torch.ones(1), "is stored as F32, or has a scale; BF16, F16"),
    ],
)
def test_what_is_not_as_it_is_stored_is_refused_in_one_line(
    kind: str, name: str, made: Any, said: str, tmp_path: Path
) -> None:
    folder = ternary_tiny(tmp_path / "q", KINDS[kind], layers=3)
    change(folder, name, made)
    with pytest.raises(ModelError, match=said) as error:
        Ours(folder, "w4")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_rows_of_no_whole_blocks_are_refused_at_small_weights(tmp_path: Path) -> None:
    folder = ternary_tiny(tmp_path / "q", PACKED, layers=3, intermediate_size=76)
    assert is_matrix(MATRIX)
    with pytest.raises(ModelError, match=r"down_proj.weight is not held at w4 or w8: 76 inputs are no multiple of 32"):
        Ours(folder, "w8")
