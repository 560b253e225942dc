"""Attention whose scores take a number by distance, and products of groups that share weights: against their definition,
natively and in torch; what does not fit is refused, and what no GPU computes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from manyhands.core import Span
from manyhands.engine import library
from manyhands.engine.cache import SessionCache
from manyhands.engine.cuda.operations import check
from manyhands.engine.library import Plan, Team
from manyhands.engine.span import Piece
from manyhands.engine.torch import TorchSpan
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.ops import Attention, GroupedProduct, Layer, Part, Product, Weight
from manyhands.testing.tiny import tiny_config


def by_definition(
    rows: NDArray[np.float64], shape: tuple[int, ...], sinks: NDArray[np.float32] | None
) -> NDArray[np.float64]:
    """Attention of rows [T, query | key | value | biases], in float64."""
    heads, kv_heads, width, window, extent = shape
    parts = np.cumsum([heads * width, kv_heads * width, kv_heads * width])
    query, key, value, biases = (
        part.reshape(len(rows), -1, n)
        for part, n in zip(np.split(rows, parts, 1), (width,) * 3 + (extent,), strict=True)
    )
    out = np.zeros((len(rows), heads, width))
    for p in range(len(rows)):
        first = max(0, p - window + 1) if window > 0 else p - p % -window if window else 0
        for h in range(heads):
            near = key[first : p + 1, h * kv_heads // heads]
            added = np.array([biases[p, h, p - j] if p - j < extent else 0.0 for j in range(first, p + 1)])
            scores = near @ query[p, h] * 0.3 + added
            top = max(scores.max(), -np.inf if sinks is None else float(sinks[h]))
            weights = np.exp(scores - top)
            total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[h]) - top))
            out[p, h] = weights @ value[first : p + 1, h * kv_heads // heads] / total
    return out.reshape(len(rows), -1)


@pytest.mark.parametrize("window", [0, 9, 70, -33])
@pytest.mark.parametrize("extent", [1, 40, 133])
@pytest.mark.parametrize("back_end", library.supported())
def test_scores_by_distance_are_as_defined(back_end: str, extent: int, window: int) -> None:
    heads, kv_heads, width, count, random = 4, 2, 8, 140, np.random.default_rng(extent)
    widths = [heads * width, kv_heads * width, kv_heads * width, heads * extent]
    sinks = random.normal(size=heads).astype(np.float32) if extent == 40 else None
    rows = random.normal(size=(count, sum(widths))).astype(np.float32)
    plan = Plan(back_end, "f32", [sum(widths), *widths, heads * width], 5, "f32", 256)
    for i, n in enumerate(widths):
        plan.add(library.COPY, (0, i + 1, sum(widths[:i]), 0, n, 1, 0, 0))
    plan.add(library.ATTENTION, (1, 2, 3, 5, heads, kv_heads, width, width, window, 0, 0, 0, 4), (0.3, 0.0), (sinks,))
    cache = SessionCache(plan)
    found = plan.run(Team(2), 2, [cache.segment(0, 0, count)], rows, count).view(np.float32)
    right = by_definition(rows.astype(np.float64), (heads, kv_heads, width, window, extent), sinks)
    assert np.abs(found - right).max() < 1e-5


@pytest.mark.parametrize("window", [0, 9, -33])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("back_end", library.supported())
def test_scores_by_slopes_are_as_defined(back_end: str, kv_heads: int, window: int) -> None:
    """A distance d is worth slope * -d: the same as numbers by distance that say so."""
    heads, width, count, random = 4, 8, 140, np.random.default_rng(kv_heads)
    widths = [heads * width, kv_heads * width, kv_heads * width]
    slopes = np.array([0.5, 0.25, 0.0, 3.0], np.float32)
    rows = random.normal(size=(count, sum(widths))).astype(np.float32)
    plan = Plan(back_end, "f32", [sum(widths), *widths, heads * width], 4, "f32", 256)
    for i, n in enumerate(widths):
        plan.add(library.COPY, (0, i + 1, sum(widths[:i]), 0, n, 1, 0, 0))
    plan.add(library.ATTENTION, (1, 2, 3, 4, heads, kv_heads, width, width, window), (0.3, 0.0), (None, slopes))
    cache = SessionCache(plan)
    found = plan.run(Team(2), 2, [cache.segment(0, 0, count)], rows, count).view(np.float32)
    biases = np.broadcast_to(-np.outer(slopes, np.arange(count)).reshape(-1), (count, heads * count))
    right = by_definition(
        np.concatenate([rows, biases], 1).astype(np.float64), (heads, kv_heads, width, window, count), None
    )
    assert np.abs(found - right).max() < 1e-5


@pytest.mark.parametrize("is_latent", [0, 1])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_slopes_that_do_not_fit_are_refused(count: int, is_latent: int) -> None:
    """Or with latents, with chosen positions, with numbers by distance."""
    plan = Plan("scalar", "f32", [32, 32, 8, 8, 32], 4, "f32", 64)
    slopes = np.ones(4 if is_latent else count, np.float32)
    places = (1, 2, 2 if is_latent else 3, 4, 4, 1, 8, 8, 0, is_latent)
    with pytest.raises(ModelError, match="tensor has another size"):
        plan.add(library.ATTENTION, places, (0.3, 0.0), (None, slopes))
    for more in ((3,), (0, 1)):
        with pytest.raises(ModelError, match="the engine refused"):
            plan.add(library.ATTENTION, (*places[:9], 0, 0, *more), (0.3, 0.0), (None, np.ones(4, np.float32)))


@pytest.mark.parametrize(
    ("place", "value"), [(12, 5), (12, 6), (12, -1), (12, 99), (9, 1), (11, 1)], ids=lambda value: str(value)
)
def test_biases_that_do_not_fit_are_refused(place: int, value: int) -> None:
    plan = Plan("scalar", "f32", [32, 32, 16, 16, 40, 32, 41], 5, "f32", 64)
    numbers = [1, 2, 3, 5, 4, 2, 8, 8, 0, 0, 0, 0, 4]
    plan.add(library.ATTENTION, numbers, (0.3, 0.0), (None,))
    numbers[place] = value
    with pytest.raises(ModelError, match="the engine refused"):
        plan.add(library.ATTENTION, numbers, (0.3, 0.0), (None,))


def test_groups_that_share_weights_have_those_of_one() -> None:
    plan, packed = Plan("scalar", "f32", [24, 48], 1, "f32", 64), library.pack(np.ones((16, 8), np.float32), "f32")
    for numbers, count in (
        ((0, 8, 0, 16, 3, 8, 16, 1), 3),
        ((0, 8, 0, 16, 3, 8, 16, 2), 1),
        ((0, 8, 0, 16, 3, 8, 16, 0), 1),
    ):
        with pytest.raises(ModelError, match="the engine refused"):
            plan.add(
                library.PRODUCT, (0, 1, library.TYPES["f32"], 0, *numbers), (), (np.concatenate([packed] * count), None)
            )
    plan.add(library.PRODUCT, (0, 1, library.TYPES["f32"], 0, 0, 8, 0, 16, 3, 8, 16, 1), (), (packed, None))


def test_torch_adds_to_scores_by_distance() -> None:
    """In a layer of attention alone."""
    random = torch.Generator().manual_seed(1)
    shapes = {"q": (32, 16), "k": (16, 16), "v": (16, 16), "r": (20, 16), "b": (40, 5)}
    tensors = {name: torch.randn(shape, generator=random) * 0.3 for name, shape in shapes.items()}
    parts = tuple(Part(name, Weight(name, shapes[name])) for name in "qkvr")
    attend = Attention("q", "k", "v", "x", 4, 2, 8, 8, 0.3, biases="b", window=30)
    layer = Layer((Product("x", parts), GroupedProduct("r", "b", Weight("b", shapes["b"]), 4, is_shared=True), attend))
    program = replace(build_program(tiny_config("llama", layers=1).to_dict()), layers=(layer,))
    span = TorchSpan(program, Span(0, 1), tensors.__getitem__)
    x = torch.randn(50, 16, generator=random)
    found = span.step(x, [Piece(span.new_cache(50), 0, 50)]).numpy()
    biases = (x @ tensors["r"].T).view(50, 4, 5) @ tensors["b"].T
    rows = torch.cat([*(x @ tensors[name].T for name in "qkv"), biases.flatten(1)], 1).double().numpy()
    assert np.abs(found - by_definition(rows, (4, 2, 8, 30, 40), None)).max() < 1e-5


def test_the_kernels_of_a_gpu_refuse_both() -> None:
    attention = [1, 2, 3, 5, 4, 2, 8, 8, 0, 0, 0, 0]
    check(library.ATTENTION, [*attention, 0])
    with pytest.raises(ModelError, match="a GPU adds no numbers by distance to scores"):
        check(library.ATTENTION, [*attention, 4])
    with pytest.raises(ModelError, match="a GPU computes no products of groups that share weights"):
        check(library.PRODUCT, [0, 1, library.TYPES["f32"], 0, 0, 8, 0, 16, 3, 8, 16, 1])
