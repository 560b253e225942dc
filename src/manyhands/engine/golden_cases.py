"""The cases of the golden digests: every operation on fixed input, as bytes. Small weights: golden_small.py."""

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.engine import library
from manyhands.engine.cache import SessionCache
from manyhands.engine.filed import Given
from manyhands.engine.library import ACTIVATIONS, Array, Plan, Team

POSITIONS: Final = 1024
EDGES: Final = (0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000)  # and with a sign
Op = tuple[int, Sequence[int], Sequence[float], Sequence[Given]]
# Heads, key heads, width, value width, window, soft cap, sinks.
AttentionShape = tuple[int, int, int, int, int, float, bool]
ATTENTION_SHAPES: Final[tuple[AttentionShape, ...]] = (
    (4, 2, 16, 16, 0, 0.0, False),
    (3, 1, 40, 24, 70, 0.0, True),
    (2, 2, 33, 17, 5, 2.5, False),
)


def draw(seed: int, count: int) -> NDArray[np.uint64]:
    """Numbers that are the same wherever integers are (SplitMix64)."""
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def reals(seed: int, *shape: int, around: int = 0, spread: int = 4) -> NDArray[np.float32]:
    """fp32 numbers of either sign whose exponents are the `spread` ones up to `around`."""
    z = draw(seed, math.prod(shape))
    exponent = np.uint64(127 + around) - (z >> np.uint64(40)) % np.uint64(spread)
    bits = (z & np.uint64(0x807FFFFF)) | exponent << np.uint64(23)
    return np.ascontiguousarray(bits.astype(np.uint32).view(np.float32).reshape(shape))


def stored(x: NDArray[np.float32], type_name: str) -> Array:
    """fp32 numbers as bits of bf16 (cut off), fp16 or fp32."""
    if type_name == "bf16":
        return np.asarray((x.view(np.uint32) >> 16).astype(np.uint16))
    return np.asarray(x.astype(np.float16).view(np.uint16) if type_name == "f16" else x)


class CompanyMatters(Exception):
    """A machine on which a row's bits depend on the rows beside it."""


# Rows [rows, bytes of a row] at positions from the given one on -> the rows that leave, of one session.
Step = Callable[[int, Array], Array]


@dataclass(frozen=True, slots=True)
class BackEnd:
    """A back end of the CPU with a team: what a case runs on."""

    back_end: str
    team: Team

    def sessions(self, row_type: str, widths: Sequence[int], ops: Sequence[Op], out: int) -> Callable[[], Step]:
        """What begins sessions of operations over registers of these widths."""
        plan = Plan(self.back_end, row_type, widths, out, "f32", POSITIONS)
        for kind, numbers, numbers_real, tensors in ops:
            plan.add(kind, numbers, numbers_real, tensors)

        def begin() -> Step:
            cache = SessionCache(plan)

            def step(start: int, rows: Array) -> Array:
                out = plan.run(self.team, 2, [cache.segment(start, 0, len(rows))], rows.reshape(-1), len(rows))
                cache.done(start + len(rows))
                return out

            return step

        return begin

    def apply(self, function: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """A function of one number, number by number."""
        return library.apply(self.back_end, function, x)

    def run(self, x: NDArray[np.float32], row_type: str, widths: Sequence[int], ops: Sequence[Op], out: int) -> Array:
        """Rows of one session through operations, whole and then cut in two: both must agree. The rows' bytes."""
        begin, found = self.sessions(row_type, [x.shape[1], *widths], ops, out), []
        rows = stored(x, row_type)
        rows = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
        for cut in (len(rows), len(rows) // 3):
            step = begin()
            parts = [step(start, rows[start:end]) for start, end in ((0, cut), (cut, len(rows))) if start < end]
            found.append(np.concatenate(parts))
        if not np.array_equal(found[0], found[1]):
            raise CompanyMatters("a row's bits depend on the rows beside it")
        return found[0]


def product(
    seed: int, source: int, target: int, n: int, k: int, type_name: str = "bf16", activation: str = "none"
) -> Op:
    """A random product with a bias."""
    packed = library.pack(stored(reals(seed, n, k), type_name), type_name)
    numbers = (source, target, library.TYPES[type_name], ACTIVATIONS.index(activation))
    return library.PRODUCT, numbers, (), (packed, reals(seed + 1, n))


def functions(machine: BackEnd) -> bytes:
    """All functions of one number, at edges and between."""
    edges = np.array([bits | sign for bits in EDGES for sign in (0, 1 << 31)], np.uint32).view(np.float32)
    x = np.concatenate([edges, reals(1, 4096, around=7, spread=32), np.linspace(-105, 105, 4001).astype(np.float32)])
    return b"".join(machine.apply(name, x).tobytes() for name in library.FUNCTIONS)


def products(row_type: str, weight_type: str) -> Callable[[BackEnd], bytes]:
    """Products with ragged edges, of few rows and many."""

    def case(machine: BackEnd) -> bytes:
        found = []
        for n, k, rows, activation in ((50, 70, 29, "none"), (16, 257, 5, "gelu_tanh"), (33, 32, 1, "relu2")):
            ops = [product(n, 0, 1, n, k, weight_type, activation)]
            found.append(machine.run(reals(2, rows, k), row_type, [n], ops, 1).tobytes())
        return b"".join(found)

    return case


def edges(machine: BackEnd) -> bytes:
    """Products that cancel, overflow, are not numbers, or have denormal operands."""
    found = []
    for seed, around, spread in ((3, 0, 2), (4, 66, 8), (5, -60, 3), (6, -100, 28)):
        weight = stored(reals(seed, 32, 96, around=around, spread=spread), "bf16")
        weight[:8, :8] = 1 + np.arange(64).reshape(8, 8)  # denormals
        weight[9:11, 3], weight[11, 5] = (0x7F80, 0xFF80), 0x7FC1
        ops: list[Op] = [(library.PRODUCT, (0, 1, 0, 0), (), (library.pack(weight, "bf16"), None))]
        found.append(machine.run(reals(seed + 1, 9, 96, around=around, spread=spread), "bf16", [32], ops, 1).tobytes())
    return b"".join(found)


def tininess(machine: BackEnd) -> bytes:
    """Results that only their rounding lifts to the least normal number: x86 keeps them, ARM flushes them to zero."""
    weight = np.full((16, 32), np.float32(2.0**-126 * (1 + 2.0**-13)), np.float32)
    ops: list[Op] = [(library.PRODUCT, (0, 1, 2, 0), (), (library.pack(weight, "f32"), None))]
    x = np.zeros((2, 32), np.float32)
    x[0, 0] = x[1, 31] = 1 - 2.0**-13
    return machine.run(x, "f32", [16], ops, 1).tobytes()


def norms(machine: BackEnd) -> bytes:
    """Both kinds, whole rows and heads, with and without weight, bias and offset."""
    found = []
    for width, groups, is_layer, offset in ((100, 1, 0, 0.0), (96, 3, 0, 1.0), (64, 4, 1, 0.0), (37, 1, 1, 0.0)):
        for weight, bias in ((None, None), (reals(7, width // groups), None), (reals(8, width), reals(9, width))):
            ops: list[Op] = [(library.NORM, (0, 1, groups, is_layer), (1e-5, offset), (weight, bias))]
            found.append(machine.run(reals(10, 4, width, around=3), "f32", [width], ops, 1).tobytes())
    return b"".join(found)


def rotary(machine: BackEnd) -> bytes:
    """Halves and pairs, whole heads and parts of them."""
    found = []
    for heads, width, offset, turns, pairs in (
        (2, 32, 0, 16, 0),
        (3, 20, 4, 7, 1),
        (2, 48, 16, 16, 1),
        (1, 80, 0, 20, 0),
    ):
        rates = np.array([0.7**i for i in range(turns)], np.float32)
        ops: list[Op] = [(library.ROTARY, (0, heads, width, offset, turns, pairs), (1.25,), (rates,))]
        found.append(machine.run(reals(11, 40, heads * width), "f32", [1], ops, 0).tobytes())
    return b"".join(found)


def attention(
    row_type: str, shapes: Sequence[AttentionShape] = ATTENTION_SHAPES, *, has_codes: bool = False
) -> Callable[[BackEnd], bytes]:
    """Grouped heads, odd widths, windows, sinks and soft caps over several blocks of keys, in a cache of codes or not."""

    def case(machine: BackEnd) -> bytes:
        found = []
        for heads, key_heads, width, value_width, window, cap, sinks in shapes:
            widths = [heads * width, key_heads * width, key_heads * value_width, heads * value_width]
            ops = [product(20 + i, 0, i + 1, n, 24) for i, n in enumerate(widths[:3])]
            numbers = (1, 2, 3, 4, heads, key_heads, width, value_width, window, 0, int(has_codes))
            ops.append((library.ATTENTION, numbers, (width**-0.5 / 16, cap), (reals(30, heads) if sinks else None,)))
            found.append(machine.run(reals(12, 150, 24), row_type, widths, ops, 4).tobytes())
        return b"".join(found)

    return case


def latents(row_type: str) -> Callable[[BackEnd], bytes]:
    """Products of columns in groups around attention whose values are the beginning of its keys."""

    def case(machine: BackEnd) -> bytes:
        found, k = [], 24
        for heads, width, rank, rotary in ((3, 20, 33, 7), (5, 8, 48, 16)):
            key_width = rank + rotary
            widths = [heads * width, heads * key_width, key_width, heads * rank, heads * width]
            ops = [product(70, 0, 1, heads * width, k), product(72, 0, 2, heads * key_width, k)]
            ops.append(product(74, 0, 3, key_width, k))
            shapes = ((rank, width, 1, 2, width, key_width), (width, rank, 4, 5, rank, width))
            before, after = (grouped(76 + i, heads, *shape) for i, shape in enumerate(shapes))
            numbers = (2, 3, 3, 4, heads, 1, key_width, rank, 0, 1)
            ops += [before, (library.ATTENTION, numbers, (0.02, 0.0), (None,)), after]
            found.append(machine.run(reals(17, 80, k), row_type, widths, ops, 5).tobytes())
        return b"".join(found)

    return case


def grouped(seed: int, groups: int, n: int, k: int, source: int, target: int, step: int, target_step: int) -> Op:
    """Random products of the columns of each group, with biases."""
    packed = [library.pack(stored(reals(seed + i, n, k), "bf16"), "bf16") for i in range(groups)]
    numbers = (source, target, 0, 0, 0, k, 0, n, groups, step, target_step)
    return library.PRODUCT, numbers, (), (np.concatenate(packed), reals(seed, groups * n))


def embeddings(machine: BackEnd) -> bytes:
    """Rows of tables of every type, row by row and packed, scaled and not."""
    found = []
    for name in library.WIDE:
        table = stored(reals(18, 37, 300), name)
        for scale, row_type in ((1.0, "f32"), (17.3, "bf16")):
            ids = [0, 36, 5, 16]
            rows = library.embed(machine.back_end, table, name, table.shape, ids, scale, row_type)
            packed = library.pack(table, name)
            if not np.array_equal(
                library.embed(machine.back_end, packed, name, table.shape, ids, scale, row_type), rows
            ):
                raise AssertionError("a packed table has other rows")
            found.append(rows.tobytes())
    return b"".join(found)


def columns(machine: BackEnd) -> bytes:
    """Gates of every activation, with and without a limit, or one once activated; add, multiply and soft caps."""
    found, k, n = [], 24, 40
    pair = [product(40, 0, 1, n, k), product(42, 0, 2, n, k)]
    for number in range(len(ACTIVATIONS)):
        for alpha, limit, offset in ((1.0, 0.0, 0.0), (1.702, 7.0, 1.0), (1.0, -0.7, 0.0)):
            ops: list[Op] = [*pair, (library.GATE, (1, 2, 3, number), (alpha, limit, offset), ())]
            found.append(machine.run(reals(13, 5, k), "bf16", [n, n, n], ops, 3).tobytes())
    ops = [product(44, 0, 1, k, k), product(46, 0, 2, 1, k), (library.MULTIPLY, (1, 2, 1), (), ())]
    ops += [
        (library.ADD, (1, 0), (0.3,), ()),
        (library.ADD, (1, 1), (1.0,), ()),
        (library.SOFTEN, (0,), (0.5, 3.0), ()),
    ]
    found += [machine.run(reals(14, 5, k), kind, [k, 1], ops, 0).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def scales(machine: BackEnd) -> bytes:
    """Rows times the factors of their positions: of every position another, of some the same, of all one."""
    found = []
    for beta, length in ((0.1, 8), (0.37, 1), (1e3, 3), (0.1, POSITIONS)):
        ops: list[Op] = [(library.SCALE, (0, length), (beta,), ())]
        found += [machine.run(reals(17, 80, 40), kind, [1], ops, 0).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def routes(machine: BackEnd) -> bytes:
    """Both scores, groups, corrections, then experts with biases; copied columns and products of columns."""
    found, k, experts = [], 24, 12
    for sigmoid, normalise, groups, correction, biased in ((0, 1, 1, 0, 1), (0, 0, 3, 0, 0), (1, 1, 3, 1, 0)):
        ops = [product(50, 0, 1, experts, k)]
        held = (reals(52, experts, around=-3) if correction else None,)
        ops.append((library.ROUTE, (1, 2, experts, 3, sigmoid, normalise, groups, min(2, groups)), (0.7, 1e-20), held))
        packed = [
            library.pack(stored(reals(53, experts * n, m), "bf16"), "bf16") for n, m in ((32, k), (32, k), (32, 32))
        ]
        biases = [reals(54 + i, experts, 32) if biased else None for i in range(3)]
        shape = (0, 2, 3, experts, 3, 32, 0, 1)
        ops.append((library.EXPERTS, shape, (1.5, 6.0, 0.5), (*packed, *biases)))
        ops.append((library.COPY, (3, 4, 1, 2, 5, 3, 7, 6), (), ()))
        ops.append(
            (library.PRODUCT, (3, 4, 0, 0, 3, 20, 20, 9), (), (library.pack(stored(reals(60, 9, 20), "bf16"), "bf16"),))
        )
        found += [
            machine.run(reals(16, 33, k), kind, [experts, 6, 32, 40], ops, 4).tobytes() for kind in ("bf16", "f32")
        ]
    return b"".join(found)


def doubles(_: BackEnd) -> bytes:
    """exp, log, sine, cosine, power in double."""
    x = reals(15, 4000, around=8, spread=16).astype(np.float64)
    found = [library.double(name, np.abs(x) if name in ("log", "pow") else x, -0.37) for name in library.DOUBLES]
    return b"".join(array.tobytes() for array in found)


def tables(_: BackEnd) -> bytes:
    """Rotary tables, some positions of each 4,096 to 131,072."""
    frequencies = library.double("exp", np.arange(64, dtype=np.float64) * -0.2)
    found = [library.rope(list(frequencies), 1.0, 40, first) for first in range(0, 131072, 4096)]
    return b"".join(array.tobytes() for pair in found for array in pair)


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    "functions": functions,
    **{f"product {x} {w}": products(x, w) for x in ("bf16", "f32") for w in library.WIDE},
    "product edges": edges,
    f"tininess {platform.machine()}": tininess,
    "norms": norms,
    "rotary": rotary,
    "attention bf16": attention("bf16"),
    "attention f32": attention("f32"),
    "latents bf16": latents("bf16"),
    "latents f32": latents("f32"),
    "embeddings": embeddings,
    "columns": columns,
    "position scales": scales,
    "routes and experts": routes,
    "doubles": doubles,
    "tables": tables,
}
