"""Small weights: what is rounded, what is kept, and products against the same arithmetic in double."""

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.blocks import dequantise
from manyhands.engine.cpu import CpuEnds, CpuSpan
from manyhands.engine.golden_cases import BackEnd, reals, stored
from manyhands.engine.golden_models import configs, tensors
from manyhands.engine.golden_small import blocks
from manyhands.engine.library import TYPES, Team
from manyhands.engine.memory import Memory
from manyhands.engine.quants import HELD, KEPT, pack_blocks, packed_bytes, round_weights
from manyhands.engine.weights import Stored, kept_type, matrix
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.tensors import wide_weights

GOOD = np.random.default_rng(7)


def numbers(packed: NDArray[np.uint8], kind: str, n: int, k: int) -> NDArray[np.float32]:
    """What a packed matrix holds, row by row."""
    return library.embed("scalar", packed, kind, (n, k), range(n), 1.0, "f32").view(np.float32)


def rounded_rows(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rows as integers of 8 bit times a scale, a group of 32 at a time."""
    groups = x.reshape(len(x), -1, 32)
    most = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / most))
    return np.asarray((codes.astype(np.float64) * (most / np.float32(127))).reshape(x.shape))


@pytest.mark.parametrize("form", KEPT)
def test_blocks_are_kept_as_they_are(form: str) -> None:
    raw = blocks(3, 37, 5, form)
    want = dequantise(raw, form)  # the gguf package's: test_gguf.py
    if form == "MXFP4":  # powers of two that are denormal in fp32 are zero
        want.reshape(37, 5, 32)[raw.reshape(37, 5, 17)[..., 0] < 2] = 0
    assert np.array_equal(numbers(pack_blocks(raw, form), KEPT[form], *want.shape), want)
    filled = np.full(packed_bytes(KEPT[form], *want.shape), 255, np.uint8)
    assert np.array_equal(pack_blocks(raw, form, None, filled), pack_blocks(raw, form, None, np.zeros_like(filled)))
    rows = np.array([36, 0, 5, 5], np.int64)
    assert np.array_equal(numbers(pack_blocks(raw, form, rows), KEPT[form], 4, want.shape[1]), want[rows])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 33])
@pytest.mark.parametrize("form", KEPT)
def test_products_are_those_of_rounded_rows(form: str, count: int) -> None:
    raw, team = blocks(5, 20, 3, form), Team(2)
    x = GOOD.standard_normal((count, 3 * BLOCKS[form][0]), np.float32)
    want = rounded_rows(x) @ dequantise(raw, form).astype(np.float64).T
    ops = [(library.PRODUCT, (0, 1, TYPES[KEPT[form]], 0), (), (pack_blocks(raw, form), None))]
    for name in library.supported():
        found = BackEnd(name, team).run(x, "f32", [20], ops, 1).view(np.float32).reshape(count, 20)
        assert np.abs(found - want).max() <= 2e-6 * np.abs(want).max()


@pytest.mark.parametrize("count", [1, 5, 17, 100])
def test_products_of_the_same_rows_may_be_of_any_types(count: int) -> None:
    """Some of which AMX multiplies in tiles, and some not, for which rows are prepared otherwise."""
    forms, sizes, k = (
        ("NVFP4_32", "Q8_0", "Q6_K", "NVFP4_32", "IQ3_S", "Q2_K", "IQ2_XS"),
        [40, 33, 16, 70, 20, 17, 40],
        512,
    )
    packed = [pack_blocks(blocks(n, n, k // BLOCKS[form][0], form), form) for form, n in zip(forms, sizes, strict=True)]
    ops = [(library.PRODUCT, (0, 1 + i, TYPES[KEPT[form]], 0), (), (packed[i], None)) for i, form in enumerate(forms)]
    x = reals(9, count, k, spread=9)
    for out in range(1, len(sizes) + 1):
        found = {BackEnd(name, Team(2)).run(x, "f32", sizes, ops, out).tobytes() for name in library.supported()}
        assert len(found) == 1


@pytest.mark.parametrize("count", [1, 2, 5, 33])
def test_zeros_change_no_bit_of_what_codes_of_five_bits_give(count: int) -> None:
    """A code less its zero is a code of 5 bit: integers are exact, so both sums are rounded alike. All codes with all zeros."""
    n, depth, team = 33, 8, Team(2)
    raw = blocks(6, n, depth, "Q4_Z").reshape(n, depth, 19)
    raw[..., 2] = np.arange(n * depth).reshape(n, depth) % 16
    codes = np.concatenate([raw[..., 3:] & 15, raw[..., 3:] >> 4], -1) - (raw[..., 2:3] & 15) + np.uint8(16)
    fives = np.empty((n, depth, 22), np.uint8)
    fives[..., :2], fives[..., 6:] = raw[..., :2], (codes[..., :16] & 15) | codes[..., 16:] << 4
    fives[..., 2:6] = np.packbits(codes >> 4, axis=-1, bitorder="little")
    x = reals(8, count, 32 * depth, spread=9)
    for name in library.supported():
        both = []
        for form, rows in (("Q4_Z", raw), ("Q5_0", fives)):
            packed = pack_blocks(rows.reshape(n, -1), form)
            ops = [(library.PRODUCT, (0, 1, TYPES[KEPT[form]], 0), (), (packed, None))]
            both.append(BackEnd(name, team).run(x, "f32", [n], ops, 1).tobytes())
        assert both[0] == both[1]
    assert packed_bytes("w4z", 4096, 4096) * 8 / 4096**2 == 4.625


@pytest.mark.parametrize(("kind", "error"), [("w8", 0.006), ("w4", 0.09)])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 33), (50, 96), (16, 1000)])
def test_rounding_is_near_and_the_same_of_any_view(kind: str, error: float, n: int, k: int) -> None:
    x = GOOD.standard_normal((2 * n, k)).astype(np.float32)
    given = stored(x, "bf16")
    right = (given[:n].astype(np.uint32) << 16).view(np.float32)
    packed = round_weights("scalar", given[:n], "bf16", kind)
    assert packed.nbytes == packed_bytes(kind, n, k)
    assert np.sqrt(np.mean((numbers(packed, kind, n, k) - right) ** 2)) < error * max(
        1.0, float(np.abs(right).max()) / 3
    )
    rows = np.arange(n)[::-1].astype(np.int64).copy()
    for name in library.supported():
        assert np.array_equal(round_weights(name, np.ascontiguousarray(given[:n].T).T, "bf16", kind), packed)
        assert np.array_equal(round_weights(name, given[:n][::-1].copy(), "bf16", kind, rows), packed)
        assert np.array_equal(round_weights(name, right, "f32", kind), packed)


def test_the_least_error_of_five_scales_is_kept() -> None:
    """Better than a scale of a 8th of the largest number, which Q4_0 has."""
    x = GOOD.standard_normal((64, 32)).astype(np.float32)
    most = x[np.arange(64), np.abs(x).argmax(1)][:, None]
    scale = (most / -8).astype(np.float16).astype(np.float32)
    plain = x - scale * np.clip(np.rint(x / scale), -8, 7)
    ours = x - numbers(round_weights("scalar", x, "f32", "w4"), "w4", 64, 32)
    assert np.all((ours**2).sum(1) <= (plain**2).sum(1) * 1.0001) and (ours**2).sum() < 0.95 * (plain**2).sum()


def test_of_eight_bits_too() -> None:
    """A sixth less than with the one scale of Q8_0, a 127th of the largest number."""
    x = GOOD.standard_normal((256, 32)).astype(np.float32)
    scale = (np.abs(x).max(1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    plain = x - scale * np.rint(x / scale)
    ours = x - numbers(round_weights("scalar", x, "f32", "w8"), "w8", 256, 32)
    assert np.all((ours**2).sum(1) <= (plain**2).sum(1) * 1.0001) and (ours**2).sum() < 0.9 * (plain**2).sum()


@pytest.mark.parametrize(("kind", "theirs"), [("w8", "Q8_0"), ("w4", "Q4_0")])
@pytest.mark.parametrize("shift", [0, 16])
def test_rounding_what_is_on_a_grid_is_as_near_as_the_gguf_packages(kind: str, theirs: str, shift: int) -> None:
    """Weights of a model that was stored with 4 bits, in groups aligned to ours and shifted against them."""
    draw = np.random.default_rng(3)
    grid = dequantise(
        gguf.quants.quantize(draw.standard_normal((64, 288), np.float32), gguf.GGMLQuantizationType.Q4_0), "Q4_0"
    )
    x = np.ascontiguousarray(grid[:, shift : shift + 256])
    type_ = gguf.GGMLQuantizationType[theirs]
    stated = gguf.quants.dequantize(gguf.quants.quantize(x, type_), type_)
    ours = numbers(round_weights("scalar", x, "f32", kind), kind, 64, 256)
    assert np.square(ours - x).sum() <= 1.01 * np.square(stated - x).sum() + 1e-9


@pytest.mark.parametrize("kind", ["w8", "w4"])
def test_outlier_channels_cost_only_their_own_groups(kind: str) -> None:
    """As in large models: a few inputs a hundred times as large as the others, whose weights are as small."""
    draw, team = np.random.default_rng(4), Team(1)
    x, weight = (draw.standard_normal(shape).astype(np.float32) for shape in ((24, 1024), (48, 1024)))
    sizes = np.ones(1024, np.float32)
    sizes[draw.choice(1024, 5, replace=False)] = 100

    packed = round_weights("scalar", weight / sizes, "f32", kind)
    held, x = numbers(packed, kind, 48, 1024).astype(np.float64).T, x * sizes
    ops = [(library.PRODUCT, (0, 1, TYPES[kind], 0), (), (packed, None))]
    found = BackEnd(library.supported()[0], team).run(x, "f32", [48], ops, 1).view(np.float32).reshape(24, 48)
    steps = np.abs(x).max(1, keepdims=True) / 127
    of_whole_rows = (np.rint(x / steps) * steps).astype(np.float64) @ held
    ours, theirs = (float(np.square(y - x.astype(np.float64) @ held).sum()) for y in (found, of_whole_rows))
    assert ours < 0.25 * theirs


def test_numbers_of_another_kind_stay_in_their_group() -> None:
    """A group with an infinity or NaN is NaN; its neighbours are as without. Too small is zero, too large the largest."""
    x = reals(1, 3, 128)
    clean = numbers(round_weights("scalar", x, "f32", "w8"), "w8", 3, 128)
    x[0, 5], x[1, 40], x[2, 96:], x[2, 64:96] = np.inf, np.nan, 1e-30, 1e30
    for kind in ("w8", "w4"):
        found = numbers(round_weights("scalar", x, "f32", kind), kind, 3, 128)
        assert np.isnan(found[0, :32]).all() and np.isnan(found[1, 32:64]).all()
        assert not found[2, 96:].any() and np.isfinite(found[2]).all() and found[2, 64] > 4e5
        if kind == "w8":
            assert np.array_equal(found[0, 32:], clean[0, 32:]) and np.array_equal(found[1, 64:], clean[1, 64:])


def test_rows_do_not_touch_each_other() -> None:
    """Rows that are not finite, zero or huge beside others."""
    packed, team = round_weights("scalar", reals(2, 32, 64), "f32", "w4"), Team(2)
    ops = [(library.PRODUCT, (0, 1, TYPES["w4"], 0), (), (packed, None))]
    x = reals(3, 9, 64)
    alone = BackEnd("scalar", team).run(x[4:5], "f32", [32], ops, 1)
    x[1], x[2, 3], x[3, 4], x[5] = 0, np.inf, np.nan, 1e30
    for name in library.supported():
        found = BackEnd(name, team).run(x, "f32", [32], ops, 1)
        assert np.array_equal(found[4:5], alone)
        values = found.view(np.float32)
        assert not values[1].any() and np.isnan(values[2:4]).all() and np.isfinite(values[5]).all()


def test_what_does_not_fit_is_refused() -> None:
    raw, code, room = (
        blocks(1, 16, 3, "Q8_0"),
        library.load().mh_pack_blocks,
        np.zeros(packed_bytes("w8", 16, 96), np.uint8),
    )

    def pack(
        kind: int = 3, count: int = raw.nbytes, n: int = 16, depth: int = 3, size: int = room.nbytes, words: int = 0
    ) -> int:
        return int(code(kind, raw.ctypes.data, count, n, depth, None, room.ctypes.data, size, None, words))

    assert pack() == 0
    wrong = [
        pack(kind=2),
        pack(kind=3 + len(KEPT)),
        pack(words=1),
        pack(kind=9),
        pack(kind=4),
        pack(count=raw.nbytes - 1),
        pack(n=17),
        pack(n=0),
        pack(depth=4),
    ]
    assert all([*wrong, pack(depth=1 << 40), pack(depth=0), pack(size=room.nbytes - 1), pack(depth=1 << 23, size=-1)])
    with pytest.raises(ModelError):
        pack_blocks(raw, "Q8_0", np.array([16], np.int64))
    with pytest.raises(ModelError, match="Q4_0"):
        pack_blocks(raw, "Q4_0")
    with pytest.raises(ModelError):
        round_weights("scalar", reals(1, 4, 4), "f32", "w4m")
    with pytest.raises(ModelError):
        packed_bytes("w8", 0, 4)
    with pytest.raises(ModelError):
        library.embed("scalar", np.zeros((16, 34), np.uint8), "w8", (16, 32), [0], 1.0, "f32")
    plan = library.Plan("scalar", "f32", [96, 16], 1, "f32", 8)
    for held in (room[:-1], pack_blocks(blocks(1, 16, 3, "Q4_0"), "Q4_0")):
        with pytest.raises(ModelError):
            plan.add(library.PRODUCT, (0, 1, TYPES["w8"], 0), (), (np.ascontiguousarray(held), None))


def test_blocks_are_held_as_they_are_whatever_the_precision() -> None:
    raw, found = blocks(1, 16, 3, "Q4_0"), Stored("Q4_0", blocks(1, 16, 3, "Q4_0"))
    assert [kept_type(form, "w8") for form in ("Q4_0", "Q6_K", "bf16")] == ["w4", "w6k", "w8"]
    assert {form: kept_type(form, "w4") for form in BLOCKS} == HELD
    kept = matrix((found, None), "w8", Memory(), "scalar")
    assert kept.type == "w4" and np.array_equal(kept.array, pack_blocks(raw, "Q4_0"))


@pytest.mark.parametrize(("precision", "bits"), [("w8", 8.5), ("w4", 4.5)])
def test_routers_and_norms_are_not_rounded(precision: Precision, bits: float) -> None:
    """Of a mixture: everything that is large is small weights, the router keeps 16 bits, head and embedding have 8."""
    program, team = build_program(configs()["mixtral"]), Team(1)
    read = tensors(program, precision).__getitem__
    assert all("gate.weight" in name for layer in program.layers for name in wide_weights(layer))
    span = CpuSpan(program, Span(0, 1), read, precision, team, "scalar")
    kinds = dict.fromkeys((*TYPES.values(), -1), 0)
    for kind, given, _, held in span._layers.ops:
        if kind == library.PRODUCT:
            kinds[given[2]] += 1
        if kind == library.EXPERTS:
            assert (given[6], given[8]) == (TYPES[precision], TYPES[precision])
            inner, hidden, experts = given[5], program.hidden, given[3]
            assert isinstance(held[0], np.ndarray) and held[0].nbytes == experts * packed_bytes(
                precision, inner, hidden
            )
            assert abs(held[0].nbytes * 8 / (experts * inner * hidden) - bits) < 3
    assert kinds[TYPES["bf16"]] == 1 and kinds[TYPES[precision]] == 4
    ends = CpuEnds(program, read, precision, team, "scalar")
    assert ends._table is not None and ends._table.type == "w8"
