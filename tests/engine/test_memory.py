"""What spans, ends and sessions hold: weights once, latents once, registers shared, scratch bounded."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from manyhands.core import Span
from manyhands.engine import golden_models, library
from manyhands.engine.cache import SessionCache
from manyhands.engine.compile import compile_layers
from manyhands.engine.cpu import CpuEnds
from manyhands.engine.golden_cases import draw, reals, stored
from manyhands.engine.layout import Segment
from manyhands.engine.library import Array, Plan, Team
from manyhands.engine.registers import Touched, lives, offsets
from manyhands.engine.weights import Stored
from manyhands.program.families import build_program
from manyhands.program.ops import Program

PLAN_BYTES, EXPERT_BYTES = 32 << 20, 24 << 20  # native/plan.c, native/experts.c


def program_of(family: str, **changes: Any) -> Program:
    return build_program({**golden_models.configs()[family], **changes})


def zeros(program: Program) -> dict[str, Stored]:
    """Tensors of a model that take no memory before they are read."""
    shapes = golden_models.shapes(program)
    return {name: Stored("bf16", np.broadcast_to(np.uint16(0x3C00), shape)) for name, shape in shapes.items()}


def test_a_latent_is_held_once() -> None:
    """1,152 bytes a position and layer at the shape of deepseek_v3: 512 + 64 numbers in bf16."""
    shape = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_hidden_layers": 1,
        "qk_head_dim": 72,
        "qk_nope_head_dim": 8,
    }
    program = program_of("deepseek_v3", **shape)
    plan = compile_layers(program, program.layers, zeros(program).__getitem__, "bf16", "scalar").plan("scalar")
    assert plan.block_bytes == 64 * 1152


def test_a_tied_head_is_held_once() -> None:
    program = program_of("llama_tied", vocab_size=20000)
    tensors, team = zeros(program), Team(1)
    table = np.asarray(draw(1, 20000 * program.hidden).astype(np.uint16) & 0xBFFF).reshape(20000, -1)
    tensors[program.embed.weight.name] = Stored("bf16", table)
    before = resident()
    ends = CpuEnds(program, tensors.__getitem__, "bf16", team, "scalar")
    assert resident() - before < 1.5 * table.nbytes + (4 << 20)
    assert np.array_equal(ends.embed([7, 19999]).view(np.uint16), table[[7, 19999]])


def test_what_a_dropped_cache_held_is_the_systems_at_once() -> None:
    """Also between caches that stay, where the C library's heap would keep it."""
    plan = Plan(library.supported()[0], "f32", [64, 64], 1, "f32", 2048)
    plan.add(library.ATTENTION, (0, 0, 0, 1, 1, 1, 64, 64, 0, 0, 1), (0.1, 0.0))
    large = np.ones(24 << 20, np.uint8)
    del large  # from here on glibc takes pieces of a MiB from its heap
    caches = [SessionCache(plan, 2048) for _ in range(40)]
    for cache in caches:
        cache.segment(0, 0, 2048)
    before, written = resident(), sum(cache.num_bytes for cache in caches)
    for cache in caches:
        for block in cache._blocks:
            block[:] = 1
    held = resident()
    assert held - before > 0.9 * written, "only what is written is resident"
    del caches[::2]
    assert held - resident() > 0.45 * written


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_registers_that_are_not_needed_at_once_share_columns() -> None:
    """x, a norm, gate and up, a product: what was read for the last time gives its columns away, at the next operation."""
    operations = [
        Touched((0,), 1, True),  # norm
        Touched((1,), 2, True),  # gate
        Touched((1,), 3, True),  # up
        Touched((2, 3), 2, True),  # gated
        Touched((2,), 4, True),  # down
        Touched((0, 4), 0, True),  # add
    ]
    assert lives(5, operations, 0) == [[(-1, 6)], [(0, 2)], [(1, 4)], [(2, 3)], [(4, 5)]]
    places = offsets([40, 40, 100, 100, 40], operations, 0)
    ends = [place + -(-width // 16) * 16 for place, width in zip(places, [40, 40, 100, 100, 40], strict=True)]
    assert all(place % 16 == 0 for place in places) and max(ends) == 48 + 112 + 112 + 48
    apart = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (2, 3), (2, 4)]
    assert all(ends[a] <= places[b] or ends[b] <= places[a] for a, b in apart)


def test_a_register_written_in_parts_begins_anew_in_each_layer() -> None:
    operations = [Touched((0,), 1, False), Touched((1,), 1, False), Touched((0, 1), 0, True)] * 2
    assert lives(2, operations, 0, [0, 3])[1] == [(0, 2), (3, 5)]
    assert lives(2, operations, 0)[1] == [(0, 5)]


WIDE = 40000


def wide(inner: int) -> Plan:
    """A gated block so wide that 240 rows of it would take hundreds of megabytes."""
    widths, packed = [64, inner, inner], library.pack(np.full((inner, 64), 0x3C00, np.uint16), "bf16")
    plan = Plan("avx2" if "avx2" in library.supported() else "scalar", "bf16", widths, 0, "bf16", 600)
    for target in (1, 2):
        plan.add(library.PRODUCT, (0, target, 0, 0), (), (packed, None))
    plan.add(library.GATE, (1, 2, 1, 1), (1.0, 0.0, 0.0))
    down = library.pack(np.full((64, inner), 0x3C00, np.uint16), "bf16")
    plan.add(library.PRODUCT, (1, 2, 0, 0, 0, inner, 0, 64), (), (down, None))
    plan.add(library.COPY, (2, 0, 0, 0, 64, 1, 0, 0))
    return plan


def run(plan: Plan, rows: Array) -> Array:
    segments = [Segment(None, 0, 0, i, 1) for i in range(len(rows))]
    return plan.run(Team(2), 2, segments, np.ascontiguousarray(rows).view(np.uint8).reshape(-1), len(rows))


def some_rows(seed: int) -> Array:
    """512 rows of 64 small numbers."""
    return stored(np.ascontiguousarray(reals(seed, 512, 64, around=-1)), "bf16")


def test_registers_are_bounded_and_rows_do_not_depend_on_it() -> None:
    """512 rows: at most PLAN_BYTES of registers and prepared rows; the bits are those of rows alone."""
    rows = some_rows(3)
    plan, alone = wide(WIDE), wide(WIDE)
    before = resident()
    whole = run(plan, rows)
    assert resident() - before < PLAN_BYTES + (12 << 20)
    for i in (0, 11, 12, 100, 511):
        assert np.array_equal(run(alone, rows[i : i + 1])[0], whole[i])


def test_experts_are_bounded() -> None:
    """512 rows through 8 of 8 wide experts: at most EXPERT_BYTES kept for them besides the registers."""
    experts, hidden, inner = 8, 64, 4096
    before = np.concatenate([library.pack(np.full((inner, hidden), 0x3C00, np.uint16), "bf16")] * experts)
    after = np.concatenate([library.pack(np.full((hidden, inner), 0x3C00, np.uint16), "bf16")] * experts)
    plan = Plan(library.supported()[0], "bf16", [hidden, experts, 16, hidden], 3, "bf16", 600)
    router = library.pack(stored(np.eye(8, 64, dtype=np.float32), "bf16"), "bf16")
    plan.add(library.PRODUCT, (0, 1, 0, 0), (), (router, None))
    plan.add(library.ROUTE, (1, 2, experts, 8, 0, 1, 1, 1), (1.0, 1e-20), ())
    plan.add(library.EXPERTS, (0, 2, 3, experts, 8, inner, 0, 1), (1.0, 0.0, 0.0), (before, before, after))
    rows = some_rows(4)
    start = resident()
    whole = run(plan, rows)
    assert resident() - start < EXPERT_BYTES + (12 << 20)
    assert np.array_equal(run(plan, rows[300:301])[0], whole[300])


def test_loading_copies_no_weight() -> None:
    """A span's matrices in numpy's memory: none but the packed ones, which lie outside it."""
    program = program_of("qwen2", hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    tensors = zeros(program)
    tracemalloc.start()
    try:
        plan = compile_layers(program, program.layers, tensors.__getitem__, "bf16", "scalar").plan("scalar")
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 1 << 20 and plan.block_bytes > 0


@pytest.mark.parametrize("places", [[-16, 0], [8, 0], [1 << 40, 0], [0, 24]])
def test_registers_at_impossible_places_are_refused(places: list[int]) -> None:
    from manyhands.errors import ModelError

    with pytest.raises(ModelError):
        Plan("scalar", "bf16", [16, 16], 0, "bf16", 8, places)


def test_spans_share_columns() -> None:
    """A layer's registers take little more than the widest of its blocks needs."""
    program = program_of("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=2)
    assert Span(0, 2).end == len(program.layers)
    plan = compile_layers(program, program.layers, zeros(program).__getitem__, "bf16", "scalar").plan("scalar")
    assert plan.columns <= 2 * 2048 + 2 * 512 and sum(plan.widths) > plan.columns + 1024
