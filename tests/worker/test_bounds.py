"""manyhands.worker.bounds: what no model sends is refused, what a model sends never is."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given as given_by
from hypothesis import strategies as st

from manyhands.checkpoint.config_fields import read_facts
from manyhands.engine.span import Piece
from manyhands.errors import Corruption, ModelError
from manyhands.tales import model_path
from manyhands.testing.tiny import BOS, FAMILIES, make_tiny
from manyhands.wire.message import DType
from manyhands.worker.bounds import MAX_DRIFT, MAX_NORM, MIN_SEEN, RowBounds, norms
from tests.worker.pipeline import Loader

# How far inside the bound every honest row must be.
MARGIN = 8.0
WIDTH = 16
NORMS = st.floats(1e-2, 1e3)


TYPES: dict[DType, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Given = tuple[bytes, int, DType]  # what norms and RowBounds.admit take


def rows(*sizes: float, dtype: DType = "fp32", width: int = WIDTH) -> Given:
    """Rows of these norms, as rounded to `dtype`."""
    return given(torch.tensor(sizes)[:, None] * torch.full((width,), width**-0.5), dtype)


def given(numbers_TD: torch.Tensor, dtype: DType) -> Given:
    return numbers_TD.to(TYPES[dtype]).contiguous().view(torch.uint8).numpy().tobytes(), len(numbers_TD), dtype


def taught(*sizes: float) -> RowBounds:
    bounds = RowBounds()
    if sizes:
        bounds.admit(*rows(*sizes), "rows")
    return bounds


@given_by(st.lists(NORMS, min_size=1, max_size=5), st.sampled_from(sorted(TYPES)), st.integers(1, 50))
def test_the_smallest_and_the_largest_norm(sizes: list[float], dtype: DType, width: int) -> None:
    assert norms(*rows(*sizes, dtype=dtype, width=width), "rows") == pytest.approx((min(sizes), max(sizes)), rel=1e-2)


@given_by(st.integers(1, 4), st.integers(1, 70), st.sampled_from(sorted(TYPES)), st.integers(0, 2**31))
def test_norms_are_those_of_all_numbers(count: int, width: int, dtype: DType, seed: int) -> None:
    numbers_TD = torch.randn((count, width), generator=torch.Generator().manual_seed(seed))
    wanted = numbers_TD.to(TYPES[dtype]).double().norm(dim=1).tolist()
    assert norms(*given(numbers_TD, dtype), "rows") == pytest.approx((min(wanted), max(wanted)), rel=1e-5)


@pytest.mark.parametrize("count", [0, -1, 2, 5])
def test_bytes_that_are_not_so_many_rows_are_refused(count: int) -> None:
    with pytest.raises(ModelError, match="rows do not fit"):
        norms(bytes(6), count, "bf16", "rows")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2 * MAX_NORM, -3e38])
@pytest.mark.parametrize("seen", [0, 100])
@pytest.mark.parametrize("place", [(0, 1), (0, 3), (1, 3), (2, 3)])
@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_what_is_no_number_is_refused_at_any_time(
    value: float, seen: int, place: tuple[int, int], dtype: DType
) -> None:
    """Alone, as a decode step has it, or with finite rows beside it; and the next good one is admitted."""
    (at, count), bounds = place, taught(*[1.0] * seen)
    bad = torch.full((count, WIDTH), WIDTH**-0.5)
    bad[at, 5] = value
    with pytest.raises(Corruption, match="those are not finite"):
        bounds.admit(*given(bad, dtype), "those")
    bounds.admit(*rows(1.0), "those")


def test_zeros_are_refused_at_any_time() -> None:
    bounds = RowBounds()
    for _ in range(2):
        for zeros in (rows(1.0, 0.0), rows(0.0)):
            with pytest.raises(Corruption, match="all zeros"):
                bounds.admit(*zeros, "rows")
        bounds.admit(*rows(*[1.0] * MIN_SEEN), "rows")


@given_by(
    st.lists(st.floats(1, 60), min_size=MIN_SEEN, max_size=MIN_SEEN + 20), st.floats(1.01, 100), st.integers(1, 4)
)
def test_the_bound_is_a_multiple_of_what_was_seen(sizes: list[float], beyond: float, parts: int) -> None:
    """However the rows came. One beyond is refused as often as it comes: it teaches nothing; one within is admitted."""
    bounds = RowBounds()
    for part in range(parts):
        bounds.admit(*rows(*sizes[part::parts]), "rows")
    for bad in (max(sizes) * MAX_DRIFT * beyond, min(sizes) / MAX_DRIFT / beyond):
        for _ in range(2):
            with pytest.raises(Corruption, match="no model's"):
                bounds.admit(*rows(sizes[0], bad), "rows")
    bounds.admit(*rows(max(sizes) * MAX_DRIFT * 0.99, min(sizes) / MAX_DRIFT * 1.01), "rows")


def test_a_sink_alone_is_nothing_to_compare_with() -> None:
    """The first row may be hundreds of times larger than any that follows."""
    bounds = taught(300.0)
    for _ in range(MIN_SEEN - 1):
        bounds.admit(*rows(0.5), "rows")
    with pytest.raises(Corruption):
        bounds.admit(*rows(0.5 / MAX_DRIFT / 1.1), "rows")
    bounds.admit(*rows(300.0), "rows")


class Watched(RowBounds):
    """Notes how far outside of what was seen rows came."""

    worst = 0.0

    def _drift(self, least: float, most: float) -> float:
        self.worst = max(self.worst, super()._drift(least, most))
        return super()._drift(least, most)


class Layers:
    """A model cut into pairs of layers, the bounds at every boundary watched; the last one as the origin sees it."""

    def __init__(self, folder: Path) -> None:
        loader = Loader(folder, "bf16")
        self._pipeline = loader.cut(*range(0, read_facts(folder).num_layers + 1, 2))

    def worst(self, prompt: Sequence[int], chunk: int, new: int) -> float:
        """The furthest that any honest row came: the prompt in chunks, then the likeliest tokens one by one."""
        spans, ends = self._pipeline.spans, self._pipeline.ends
        bounds = [Watched() for _ in spans]
        caches = self._pipeline.session(len(prompt) + new)
        parts = [list(prompt[at : at + chunk]) for at in range(0, len(prompt), chunk)]
        position, hidden = 0, np.empty((0, 0), np.uint8)
        for _ in range(len(parts) + new):
            ids = parts.pop(0) if parts else [int(ends.logits(hidden[-1:], 1, 1)[0].argmax())]
            hidden = ends.embed(ids)
            for span, cache, bound in zip(spans, caches, bounds, strict=True):
                hidden = span.step(hidden.tobytes(), [Piece(cache, position, len(ids))], 1)
                if span is not spans[-1]:
                    bound.admit(hidden.tobytes(), len(hidden), "bf16", "honest rows")
                elif not parts:
                    bound.admit(hidden[-1:].tobytes(), 1, "bf16", "honest rows")
            position += len(ids)
        return max(bound.worst for bound in bounds)


@pytest.mark.parametrize("family", [*FAMILIES, "tales"])
def test_no_honest_row_comes_near_the_bound(family: str, tmp_path: Path) -> None:
    """A long prompt of random tokens, one of a single token, one of few different ones."""
    model = Layers(model_path() if family == "tales" else make_tiny(family, tmp_path / family, seed=3))
    ids = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [(ids, 60, 6), ([BOS], 1, 12), ([65] * 40 + [10] * 5 + [66, 67] * 20, 15, 0)]
    assert 0 < max(model.worst(*prompt) for prompt in prompts) < MAX_DRIFT / MARGIN
