"""Golden digests of small weights (golden_small.json): what is rounded, and products with ragged edges and of odd numbers."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS, GRIDS
from manyhands.engine import library
from manyhands.engine.golden_cases import EDGES, BackEnd, Op, draw, product, reals, stored
from manyhands.engine.grids import stand_in
from manyhands.engine.library import TYPES, WIDE
from manyhands.engine.quants import KEPT, pack_blocks, round_weights

_HALVES: Final = {  # where blocks have numbers in fp16
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "Q4_Z", "IQ4_NL", "IQ4_XS", *GRIDS), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "MXFP4": (),
    "NVFP4_32": (),
}
SHAPES: Final = ((50, 70, 29), (16, 257, 5), (33, 32, 1), (7, 96, 3))  # outputs, inputs, rows


def uneven(seed: int, *shape: int) -> NDArray[np.float32]:
    """Numbers whose size differs from group to group, with edges among them and groups of zeros."""
    x = reals(seed, *shape, spread=6)
    flat = x.reshape(-1)
    flat[::7] *= 40
    flat[64:96] = 0
    edges = np.array([bits | sign for bits in EDGES for sign in (0, 1 << 31)], np.uint32).view(np.float32)
    flat[-len(edges) :] = edges
    return x


def put_half(blocks: NDArray[np.uint8], form: str, at: int, halves: NDArray[np.float16] | NDArray[np.uint16]) -> None:
    """Set the fp16 at byte `at` of blocks [..., bytes]; `halves` [..., 1]. In IQ1_M the one whose bits begin four words."""
    bits = halves.view(np.uint16)
    if form != "IQ1_M":
        blocks[..., at : at + 2] = bits.astype("<u2").view(np.uint8)
        return
    fours = (bits >> np.array([0, 4, 8, 12], np.uint16) & np.uint16(15)).astype(np.uint8)
    blocks[..., 49::2] = blocks[..., 49::2] & 15 | fours << np.uint8(4)


def blocks(seed: int, n: int, depth: int, form: str) -> NDArray[np.uint8]:
    """Rows of blocks (dtypes.BLOCKS): codes of every value, -128 among them; finite scales and minima."""
    size = BLOCKS[form][1]
    found = (draw(seed, n * depth * size) >> np.uint64(20)).astype(np.uint8).reshape(n, depth, size)
    halves = _HALVES[form]
    factors = stored(reals(seed + 1, n, depth, len(halves), around=-3, spread=12), "f16")
    for i, at in enumerate(halves):
        put_half(found, form, at, factors[..., i : i + 1])
    if form == "Q8_0":
        found[0, 0, 2:] = 128
    if form == "MXFP4":
        found[..., 0] = found[..., 0] % 24 + 112
        found[0, :, 0] = np.arange(depth)  # of the least powers of two
    if form == "NVFP4_32":
        drawn = draw(seed + 1, n) >> np.uint64(20)
        exponents = np.uint64(107) + (drawn >> np.uint64(23)) % np.uint64(24)
        scales = drawn & np.uint64(0x7FFFFF) | exponents << np.uint64(23)
        found[..., :4] = scales.astype(np.uint32).view(np.uint8).reshape(n, 1, 4)
        found[..., 4:6] = np.minimum(found[..., 4:6] & 127, 126)
    return np.ascontiguousarray(found.reshape(n, depth * size))


def multiplied(machine: BackEnd, packed: NDArray[np.uint8], kind: str, x: NDArray[np.float32], n: int) -> bytes:
    ops: list[Op] = [(library.PRODUCT, (0, 1, TYPES[kind], 2), (), (packed, reals(9, n)))]
    return b"".join(machine.run(x, row_type, [n], ops, 1).tobytes() for row_type in ("bf16", "f32"))


def rounded(kind: str) -> Callable[[BackEnd], bytes]:
    """Matrices of every type, rounded; their rows as embeddings; their products."""

    def case(machine: BackEnd) -> bytes:
        found = []
        for n, k, rows in SHAPES:
            for name in WIDE:
                with np.errstate(over="ignore"):
                    given = stored(uneven(n + k, n, k), name)
                packed = round_weights(machine.back_end, given, name, kind)
                table = library.embed(machine.back_end, packed, kind, (n, k), range(n), 1.5, "f32")
                x = reals(2, rows, k, spread=9)
                found += [packed.tobytes(), table.tobytes(), multiplied(machine, packed, kind, x, n)]
        return b"".join(found)

    return case


def stored_blocks(form: str) -> Callable[[BackEnd], bytes]:
    """Products with what a GGUF file holds, also of rows that are not finite, are zero, or nearly."""

    def case(machine: BackEnd) -> bytes:
        found = []
        for n, depth, rows in ((35, 3, 13), (16, 9, 2), (5, 1, 1)):
            packed = pack_blocks(blocks(n, n, depth, form), form, grid=stand_in(form))
            k = depth * BLOCKS[form][0]
            x = reals(3, rows, k, spread=9)
            x[rows // 2] = uneven(4, k)
            x[-1] *= np.float32(2.0**-99)
            found.append(multiplied(machine, packed, KEPT[form], x, n))
        return b"".join(found)

    return case


def experts(machine: BackEnd) -> bytes:
    """Experts whose downs are of another type than their gates and ups; parts of one product of different types."""
    k, n, count, found = 40, 64, 6, []
    for before, after in (("w8", "w4"), ("w4", "w4m"), ("w4m", "bf16"), ("bf16", "w8")):
        scores = library.pack(stored(reals(5, count, k), "bf16"), "bf16")
        ops: list[Op] = [(library.PRODUCT, (0, 1, 0, 0), (), (scores,))]
        ops.append((library.ROUTE, (1, 2, count, 2, 0, 1, 1, 1), (1.0, 1e-20), ()))
        gates, ups = (several(machine, 10 * i + 20, count, n, k, before) for i in range(2))
        shape = (0, 2, 3, count, 2, n, TYPES[before], 1, TYPES[after])
        ops.append((library.EXPERTS, shape, (1.0, 0.0, 0.0), (gates, ups, several(machine, 50, count, k, n, after))))
        for target, kind in ((4, "w8"), (5, before)):
            ops.append((library.PRODUCT, (3, target, TYPES[kind], 0), (), (several(machine, 60, 1, 20, k, kind),)))
        ops.append((library.COPY, (4, 5, 0, 0, 9, 1, 0, 0), (), ()))
        found.append(machine.run(reals(16, 33, k), "bf16", [count, 4, k, 20, 20], ops, 5).tobytes())
    return b"".join(found)


def scaled_sources(machine: BackEnd) -> bytes:
    """Experts whose sources are times what sigmoids say, and then rounded to groups."""
    k, n, count, found = 40, 64, 4, []
    for kind, top_k in (("w8", 1), ("w4m", 3)):
        gates, ups = (several(machine, seed, count, n, k, kind) for seed in (70, 80))
        ops = [product(5, 0, 1, count, k), (library.ROUTE, (1, 2, count, top_k, 1, 0, 1, 1), (1.0, 1e-20), ())]
        shape = (0, 2, 3, count, top_k, n, TYPES[kind], 1, TYPES[kind], 1)
        ops.append((library.EXPERTS, shape, (1.0, 0.0, 0.0), (gates, ups, several(machine, 90, count, k, n, kind))))
        found.append(machine.run(reals(16, 33, k), "bf16", [count, 2 * top_k, k], ops, 3).tobytes())
    return b"".join(found)


def several(machine: BackEnd, seed: int, count: int, n: int, k: int, kind: str) -> library.Array:
    """`count` random matrices one behind the other; of w4m as blocks, for K filled up to whole groups."""
    if kind == "w4m":
        return np.concatenate([pack_blocks(blocks(seed + i, n, -(-k // 32), "Q4_1"), "Q4_1") for i in range(count)])
    given = [stored(reals(seed + i, n, k), "bf16") for i in range(count)]
    if kind == "bf16":
        return np.concatenate([library.pack(x, "bf16") for x in given])
    return np.concatenate([round_weights(machine.back_end, x, "bf16", kind) for x in given])


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    "small rounded w8": rounded("w8"),
    "small rounded w4": rounded("w4"),
    **{f"small {form}": stored_blocks(form) for form in KEPT},
    "small experts": experts,
    "small experts of scaled sources": scaled_sources,
}
