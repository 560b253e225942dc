"""engine/cuda without a GPU: its kernels, compiled for the CPU (cuda_host.h), compute the native engine's bits.

What a GPU itself computes is proven where it is used: by the same digests, at start.
"""

import re
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.core import Span
from manyhands.engine import golden_models, library
from manyhands.engine.compile import compile_layers
from manyhands.engine.compiled import Registers
from manyhands.engine.cuda import proof, source
from manyhands.engine.cuda.device import CudaMemory
from manyhands.engine.cuda.operations import FAST, launches
from manyhands.engine.cuda.plan import MOST_ROWS, CudaLayers, CudaPlan, Positions, hold
from manyhands.engine.cuda.proof import PROVEN_TILES, OfGpu, OnGpu, failures
from manyhands.engine.cuda.span import CudaSpan
from manyhands.engine.golden_cases import CASES, BackEnd, Op, reals, stored
from manyhands.engine.golden_small import blocks
from manyhands.engine.library import Array, Team
from manyhands.engine.quants import KEPT, pack_blocks
from manyhands.engine.span import Piece
from manyhands.errors import ContextOverflow, CutError, ModelError
from manyhands.program.ops import Program
from tests.engine.cuda_host import GRID_SIDE, HostDevice
from tests.engine.cuda_spans import program, rows_of, spans
from tests.nightly import daily

Bytes = NDArray[np.uint8]


def is_refused(program: Program) -> bool:
    """Whether no GPU computes it."""
    return program.has_index or program.has_entries or program.has_scans or program.has_streams or program.has_biases


FAMILIES = [name for name in golden_models.configs() if not is_refused(program(name))]
# Sinks, experts and biases; latents, groups of experts and shared ones; convolutions and linear attention.
BY_DAY = ["llama", "gpt_oss", "deepseek_v3", "qwen3_next"]


@pytest.mark.parametrize("family", daily(BY_DAY, [name for name in FAMILIES if name not in BY_DAY]))
def test_whole_models_reproduce_the_golden_digests(family: str, device: HostDevice) -> None:
    assert golden_models.failures(OfGpu(device), [family]) == ()


def matrices(device: HostDevice, kind: str, packed: Callable[[int, int], Array]) -> None:
    """Products with weights of a type, of rows of each shape of block, and experts. packed: a matrix [n, k]."""
    number, k, n = library.TYPES[kind], 256, 20
    op = (library.PRODUCT, (0, 1, number, 0), (), (packed(n, k), None))
    for tiles, counts in ((FAST, (1, 2, 3, 4, 6, 8, 60)), *((tiles, (5,)) for tiles in PROVEN_TILES[1:])):
        plan = CudaPlan(device, Registers("f32", (k, n), 1024), hold(device, [op]), [0, k], 1, "f32", tiles=tiles)
        for count in counts:
            plan.run([Positions(0, 0, count)], reals(2, count, k).view(np.uint8), count)
    scores = (library.PRODUCT, (0, 3, 2, 0), (), (library.pack(reals(5, 2, k), "f32"), None))
    route = (library.ROUTE, (3, 1, 2, 1, 0, 1, 1, 1), (1.0, 1e-20), (None,))
    both = [np.concatenate([packed(*shape)] * 2) for shape in ((k, k), (k, k), (n, k))]
    mixture = (library.EXPERTS, (0, 1, 2, 2, 1, k, number, 1, number), (1.0, 0.0, 0.0), (*both, None, None, None))
    widths = (k, 2, n, 2)
    held = hold(device, [scores, route, mixture])
    plan = CudaPlan(device, Registers("f32", widths, 64), held, library.apart(widths), 2, "f32")
    plan.run([Positions(0, 0, 3)], reals(6, 3, k).view(np.uint8), 3)
    relu2 = library.ACTIVATIONS.index("relu2")
    plain = (library.EXPERTS, (0, 1, 2, 2, 1, k, number, relu2, number), (1.0, 0.0, 0.0), (None, *both[1:]))
    each = (library.ROUTE, (3, 1, 2, 2, 1, 0, 1, 1), (1.0, 1e-20), (None,))
    scaled = (library.EXPERTS, (0, 1, 2, 2, 2, k, number, 1, number, 1), (1.0, 0.0, 0.0), (both[0], both[1], both[0]))
    for several, ops in (([2, n, 2], [scores, route, plain]), ([4, k, 2], [scores, each, scaled])):
        run = (reals(6, 3, k), "f32", several, ops, 2)
        found, wanted = (
            machine.run(*run) for machine in (OnGpu("scalar", Team(1), device), BackEnd("scalar", Team(1)))
        )
        assert np.array_equal(found, wanted)


def wide(kind: str, n: int, k: int) -> Array:
    return library.pack(stored(reals(n, n, k), kind), kind)


def small(form: str, n: int, k: int) -> Array:
    return pack_blocks(blocks(n, n, k // BLOCKS[form][0], form), form)


def test_operations_reproduce_the_golden_digests_with_every_kernel(device: HostDevice) -> None:
    """Those that no case needs are launched for weights of each type, and counted."""
    assert failures(device, Team(1)) == []
    for kind in library.WIDE:
        matrices(device, kind, partial(wide, kind))
    for form, kind in KEPT.items():
        matrices(device, kind, partial(small, form))
    named = re.findall(r"KERNEL(?:_OF)?\((\w+)", source.text())
    there = {
        name for name in named if not name.startswith(("few_", "many_", "expert_", "attend_many_")) and name != "name"
    }
    floats, codes = ("BF16", "F16", "F32"), [kind.upper() for kind in KEPT.values()]
    there |= {f"few_{kind}_{n}" for kind in floats for n in (1, 2, 3, 4, 6, 8)} | {f"some_{kind}" for kind in floats}
    there |= {f"few_{kind}_{n}" for kind in codes for n in (1, 2, 4, 8)} | {"expert_sum", "expert_scale"}
    there |= {f"many_{kind}" for kind in (*floats, *codes)}
    there |= {f"expert_{kind}" for kind in (*floats, *codes)}
    there |= {f"attend_many_{kind}_{columns}" for kind in ("BF16", "F32") for columns in (64, 128)}
    assert there - set(device.launched) == set()


@pytest.mark.parametrize(
    "kind", ["bf16", "f16", "f32", "w8", "w4m", "w6k", "w4n", "w4x", "w3k", "w2k", "w4h", "w4s", "w4t", "w3s", "w2s"]
)
def test_tiles_with_ragged_edges_are_the_cpus_bits(kind: str, device: HostDevice) -> None:
    """Two products of the same rows, of numbers of rows about those of a tile, and of no whole tile of columns."""
    k, sizes = (256, (20, 200)) if kind in KEPT.values() else (100, (70, 66))
    forms = {kept: form for form, kept in KEPT.items()}
    packed = [small(forms[kind], n, k) if kind in forms else wide(kind, n, k) for n in sizes]
    ops = [
        (library.PRODUCT, (0, 1 + i, library.TYPES[kind], i), (), (packed[i], reals(7, n))) for i, n in enumerate(sizes)
    ]
    counts = (33, 63, 64, 65, 127, 129)
    for row_type, count, out in (*(("bf16", count, 1 + i % 2) for i, count in enumerate(counts)), ("f32", 65, 1)):
        x = reals(count, count, k, spread=9)
        x[3, 5], x[4], x[7, :9] = np.inf, np.nan, 1e-40
        wanted = BackEnd("scalar", Team(1)).run(x, row_type, sizes, ops, out)
        for tiles in PROVEN_TILES if kind in library.WIDE else PROVEN_TILES[:2]:
            found = OnGpu("scalar", Team(1), device, tiles).run(x, row_type, sizes, ops, out)
            assert np.array_equal(found, wanted), (count, row_type, tiles)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_steps_of_any_size_are_the_cpus_bits(family: str, device: HostDevice) -> None:
    """One row to 200, across blocks of keys, and each size again, when its step is recorded."""
    made = program(family)
    on_gpu, on_cpu = spans(device, made)
    rows, at, before = rows_of(made, 420), 0, device.recorded
    there, here = on_gpu.new_cache(500), on_cpu.new_cache(500)
    for count in (1, 200, 5, 1, 7, 64, 1, 16, 33, 2, 5, 70, 5):
        wanted = on_cpu.step(rows[at : at + count].copy(), [Piece(here, at, count)], 1)
        assert np.array_equal(on_gpu.step(rows[at : at + count].tobytes(), [Piece(there, at, count)], 1), wanted), (
            at,
            count,
        )
        at += count
    assert device.recorded - before == 2 and on_gpu.is_ready(5) and on_gpu.is_ready(1) and not on_gpu.is_ready(70)


def test_steps_of_so_many_sizes_are_recorded_and_no_more(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded step takes memory on the GPU: companions of every size must not fill it."""
    most = 6
    monkeypatch.setattr("manyhands.engine.cuda.plan.RECORDED", most)
    made = program("llama")
    on_gpu, on_cpu = spans(device, made)
    rows, before = rows_of(made, most + 4), device.recorded
    there, here = on_gpu.new_cache(64), on_cpu.new_cache(64)
    for count in range(1, most + 5):
        for _ in range(3):
            wanted = on_cpu.step(rows[:count].copy(), [Piece(here, 0, count)], 1)
            assert np.array_equal(on_gpu.step(rows[:count].tobytes(), [Piece(there, 0, count)], 1), wanted), count
    assert device.recorded - before == most and not on_gpu.is_ready(most + 1)


def test_a_row_does_not_depend_on_its_company_nor_on_what_was_taken_back(device: HostDevice) -> None:
    made = program("gemma2")
    on_gpu, _ = spans(device, made)
    rows = rows_of(made, 90)

    def alone(parts: Sequence[tuple[int, int]]) -> Bytes:
        cache = on_gpu.new_cache(128)
        return np.concatenate([on_gpu.step(rows[a:b], [Piece(cache, a, b - a)], 1) for a, b in parts])

    wanted = alone([(0, 90)])
    assert np.array_equal(alone([(0, 66), (66, 67), (67, 90)]), wanted)
    one, two = on_gpu.new_cache(128), on_gpu.new_cache(128)
    on_gpu.step(rows[:60], [Piece(one, 0, 60)], 1)
    wrong = rows_of(made, 5, seed=9)
    on_gpu.step(wrong, [Piece(one, 60, 5)], 1)  # taken back below
    both = on_gpu.step(np.concatenate([rows[:80], rows[60:63]]), [Piece(two, 0, 80), Piece(one, 60, 3)], 1)
    assert np.array_equal(both, np.concatenate([wanted[:80], wanted[60:63]])) and (one.length, two.length) == (63, 80)


def test_a_session_may_be_on_some_of_the_layers(device: HostDevice) -> None:
    made = program("llama")
    on_gpu, _ = spans(device, made)
    count, rows = len(made.layers), rows_of(made, 20)
    whole = on_gpu.step(rows, [Piece(on_gpu.new_cache(64), 0, 20)], 1)
    before = len(device.memories)
    first, rest = on_gpu.new_cache(64, Span(0, 1)), on_gpu.new_cache(64, Span(1, count))
    between = on_gpu.step(rows, [Piece(first, 0, 20)], 1)
    assert np.array_equal(on_gpu.step(between, [Piece(rest, 0, 20)], 1), whole)
    assert len(device.memories) == before + 4  # a block and a table of each: parts share the memory of steps
    with pytest.raises(ModelError, match="different layers"):
        on_gpu.step(rows[:2], [Piece(first, 20, 1), Piece(rest, 20, 1)], 1)
    with pytest.raises(CutError, match="not among"):
        on_gpu.new_cache(64, Span(1, count + 1))


def test_more_rows_than_a_step_takes_go_in_turns(device: HostDevice) -> None:
    made = program("llama", num_hidden_layers=1, max_position_embeddings=MOST_ROWS + 100)
    on_gpu, on_cpu = spans(device, made)
    count = MOST_ROWS + 30
    rows = rows_of(made, count)
    there = on_gpu.step(rows, [Piece(on_gpu.new_cache(count), 0, count)], 1)
    assert np.array_equal(there, on_cpu.step(rows.copy(), [Piece(on_cpu.new_cache(count), 0, count)], 1))
    assert on_gpu._plan.most_rows == MOST_ROWS


@pytest.mark.parametrize(("chosen", "groups", "most"), [(128, 1, 511), (2, 4096, 511), (4, 64, MOST_ROWS)])
def test_no_grid_has_more_blocks_than_a_gpu_takes(chosen: int, groups: int, most: int, device: HostDevice) -> None:
    """A row's experts, and a key head's queries, are blocks of one direction: fewer rows go at once where they are many."""
    matrix = np.zeros(chosen * 16 * 32, np.float32)
    mixture = (library.EXPERTS, (0, 1, 2, chosen, chosen, 8, 2, 1, 2), (1.0, 0.0, 0.0), (matrix, matrix, matrix))
    heads: Op = (library.ATTENTION, (3, 4, 4, 5, groups, 1, 4, 4, 0, 0, 0), (0.5, 0.0), ())
    widths, held = (8, 2 * chosen, 8, groups * 4, 4, groups * 4), hold(device, [mixture, heads])
    plan = CudaPlan(device, Registers("f32", widths, 2048), held, library.apart(widths), 2, "f32")
    assert plan.most_rows == most
    at_most = [1, *(max(asked.grid[1:]) for asked in launches(plan._room, held, 0, most))]
    beyond = [1, *(max(asked.grid[1:]) for asked in launches(plan._room, held, 0, most + 1))]
    assert max(at_most) <= GRID_SIDE and (most == MOST_ROWS or max(beyond) > GRID_SIDE)


def test_numbers_that_are_none_stay_in_their_rows(device: HostDevice) -> None:
    """Infinities and NaNs of one session leave another's rows as they were, and are the CPU's."""
    made = program("mixtral")
    on_gpu, on_cpu = spans(device, made, "fp32")
    rows = rows_of(made, 12, kind="f32").view(np.float32).copy()
    rows[3, 5], rows[4, :] = np.inf, np.nan
    given = rows.view(np.uint8)
    whole = on_gpu.step(given, [Piece(on_gpu.new_cache(64), 0, 12)], 1)
    assert np.array_equal(whole, on_cpu.step(given.copy(), [Piece(on_cpu.new_cache(64), 0, 12)], 1))
    assert np.isnan(whole.view(np.float32)[4]).all() and not np.isnan(whole.view(np.float32)[:3]).any()


def test_what_a_gpu_cannot_compute_is_refused(device: HostDevice) -> None:
    made = program("llama")
    read = golden_models.tensors(made, "w8").__getitem__
    with pytest.raises(ModelError, match="no caches of 8 bit"):
        CudaSpan(made, Span(0, 1), read, "bf16+c8", device)
    with pytest.raises(CutError, match="out of range"):
        CudaSpan(made, Span(0, 99), read, "bf16", device)
    wide = program("llama", head_dim=1056)
    with pytest.raises(ModelError, match="1024 and 512 at most"):
        spans(device, wide)


def test_steps_that_do_not_fit_are_refused_before_anything_is_computed(device: HostDevice) -> None:
    made = program("llama", max_position_embeddings=128)
    on_gpu, _ = spans(device, made)
    cache, rows = on_gpu.new_cache(128), rows_of(made, 129)
    launched = len(device.launched)
    with pytest.raises(ContextOverflow, match="position 128 is beyond the 128"):
        on_gpu.step(rows, [Piece(cache, 0, 129)], 1)
    with pytest.raises(ModelError, match="bytes are not 2 rows"):
        on_gpu.step(rows[:1], [Piece(cache, 0, 2)], 1)
    with pytest.raises(ModelError, match="two pieces of one session"):
        on_gpu.step(rows[:2], [Piece(cache, 0, 1), Piece(cache, 0, 1)], 1)
    assert len(device.launched) == launched and cache.length == 0


@pytest.mark.nightly
def test_threads_that_drift_apart_reproduce_the_golden_digests() -> None:
    """What a missing barrier leaves to chance shows (test_cuda_states.py plants some)."""
    assert failures(HostDevice(drifts=True), Team(1)) == []


def test_a_device_with_other_bits_is_found(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose norms are off by a bit, say."""
    right = device.fetch

    def wrong(host: Bytes, source: int) -> None:
        right(host, source)
        if "norm" in device.launched[-3:]:
            host[0] ^= 1

    monkeypatch.setattr(device, "fetch", wrong)
    monkeypatch.setattr(proof, "PROVEN_CASES", {name: CASES[name] for name in ("functions", "norms", "rotary")})
    assert failures(device, Team(1)) == ["norms"]


@pytest.mark.parametrize(("targets", "together"), [((1, 2), 1), ((1, 1), 2)])
def test_products_of_one_source_into_one_register_are_launched_by_themselves(
    targets: Sequence[int], together: int, device: HostDevice
) -> None:
    """Blocks of one launch are computed at once."""
    k, n = 64, 20
    number, widths = library.TYPES["bf16"], (k, n, n)
    ops = [(library.PRODUCT, (0, target, number, 0), (), (wide("bf16", n, k), None)) for target in targets]
    plan = CudaPlan(device, Registers("f32", widths, 64), hold(device, ops), library.apart(widths), 1, "f32")
    plan.run([Positions(0, 0, 3)], reals(2, 3, k).view(np.uint8), 3)
    assert sum(name.startswith("few_BF16") for name in device.launched) == together


def test_an_operation_that_overwrites_what_it_reads_is_not_launched(device: HostDevice) -> None:
    """Blocks of a product read rows while others write: compile.py keeps them apart, for every family. What layers keep takes
    as much memory as on the CPU."""
    for family in FAMILIES:
        made = program(family)
        compiled = compile_layers(made, made.layers, golden_models.tensors(made, "bf16").__getitem__, "bf16", "scalar")
        assert not [op for op in compiled.ops if op[0] == library.PRODUCT and op[1][0] == op[1][1]], family
        layers = CudaLayers(device)
        layers.take(compiled)
        there, here = layers.plan(compiled), compiled.plan("scalar")
        assert (there.block_bytes, there.state_bytes, there.now_bytes) == (
            here.block_bytes,
            here.state_bytes,
            here.now_bytes,
        ), family


def test_the_host_holds_the_weights_of_one_layer_at_a_time(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may have more memory than its host."""
    made = program("llama")
    alive: list[weakref.ref[Array]] = []
    most: list[int] = []
    upload = device.upload

    def watched(target: CudaMemory, array: Array) -> None:
        alive.append(weakref.ref(array))
        most.append(sum(one() is not None for one in alive))
        upload(target, array)

    monkeypatch.setattr(device, "upload", watched)
    tensors = golden_models.tensors(made, "bf16").__getitem__
    CudaSpan(made, Span(0, 1), tensors, "bf16", device)
    of_one = max(most)
    alive.clear()
    most.clear()
    CudaSpan(made, Span(0, len(made.layers)), tensors, "bf16", device)
    assert len(made.layers) > 1 and len(most) > 1.5 * of_one and max(most) <= of_one + 1


def test_cases_of_operations_run_on_the_device_alone(device: HostDevice) -> None:
    """None of the CPU's back ends computes what a GPU is proven by."""
    before = {name: library.calls(name) for name in library.supported()}
    OnGpu("scalar", Team(1), device).run(reals(1, 3, 32), "f32", [], [(library.SOFTEN, (0,), (2.0, 0.0), ())], 0)
    assert {name: library.calls(name) for name in library.supported()} == before
