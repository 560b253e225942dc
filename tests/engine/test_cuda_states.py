"""States on a GPU: the CPU's bits for any sizes, chunks, sessions beside, steps back and forks, also when its memory is full.
The kernels run on the CPU (cuda_host.py), which fills freed memory with NaN and checks that no kernel writes there.
"""

import gc
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from manyhands.core import Span
from manyhands.engine import library
from manyhands.engine.cache import SessionCache, state_bytes
from manyhands.engine.compiled import Registers
from manyhands.engine.cuda import plan as cuda_plan
from manyhands.engine.cuda import source
from manyhands.engine.cuda import states as cuda_states
from manyhands.engine.cuda.operations import Tiles
from manyhands.engine.cuda.plan import CudaPlan, hold
from manyhands.engine.cuda.proof import PROVEN_CASES, OnGpu
from manyhands.engine.cuda.span import CudaCache
from manyhands.engine.golden_cases import BackEnd, CompanyMatters, Op, reals, stored
from manyhands.engine.golden_states import CASES as STATE_CASES
from manyhands.engine.library import Array, Plan, Team
from manyhands.engine.span import Piece
from manyhands.engine.states import MOST_BACK, MOST_KEPT
from manyhands.errors import ModelError, StateGone
from tests.engine.cuda_host import HostDevice, HostMemory
from tests.engine.cuda_spans import program, rows_of, spans
from tests.engine.state_layer import OUT, StateLayer

CONTEXT: Final = 4096
SMALL: Final = StateLayer(2, 1, 6, 20)
Part = tuple[int, int, int]  # session, start, count


class Both:
    """Sessions of a layer's operations on a GPU and on the CPU, whose rows must be the same."""

    def __init__(
        self, device: HostDevice, layer: StateLayer = SMALL, row_type: str = "bf16", narrow_keys: int = 128
    ) -> None:
        self.layer, self._row_type, self._team = layer, row_type, Team(1)
        registers, held = Registers(row_type, tuple(layer.widths), CONTEXT), hold(device, layer.ops)
        tiles, places = Tiles(narrow_keys=narrow_keys), library.apart(layer.widths)
        self.device, self.there = device, CudaPlan(device, registers, held, places, OUT, "f32", tiles=tiles)
        self.here = Plan(library.supported()[0], row_type, layer.widths, OUT, "f32", CONTEXT)
        for op in layer.ops:
            self.here.add(*op)
        self.sessions: list[tuple[CudaCache, SessionCache]] = []

    def begin(self, mark: int = 0) -> int:
        """A session; its number."""
        return self._add(CudaCache(self.device, self.there, 0, mark), SessionCache(self.here, 0, mark))

    def fork(self, number: int, positions: int, mark: int = 0) -> int:
        there, here = self.sessions[number]
        return self._add(there.fork(positions, 0, mark), here.fork(positions, 0, mark))

    def _add(self, there: CudaCache, here: SessionCache) -> int:
        self.sessions.append((there, here))
        return len(self.sessions) - 1

    def rows(self, count: int, seed: int) -> Array:
        drawn = np.ascontiguousarray(stored(reals(seed, count, self.layer.entering, around=0), self._row_type))
        return drawn.view(np.uint8).reshape(count, -1)

    def on_gpu(self, parts: Sequence[Part], rows: Array) -> Array:
        given = [self.sessions[number][0].begin(start, count) for number, start, count in parts]
        out = self.there.run(given, rows, len(rows))
        for number, start, count in parts:
            self.sessions[number][0].done(start + count)
        return out

    def on_cpu(self, parts: Sequence[Part], rows: Array) -> Array:
        segments, row = [], 0
        for number, start, count in parts:
            segments.append(self.sessions[number][1].segment(start, row, count))
            row += count
        out = self.here.run(self._team, 1, segments, rows.reshape(-1), row)
        for number, start, count in parts:
            self.sessions[number][1].done(start + count)
        return out

    def step(self, parts: Sequence[Part], seed: int, change: Callable[[Array], None] = lambda rows: None) -> None:
        rows = self.rows(sum(count for *_, count in parts), seed)
        change(rows)
        assert np.array_equal(self.on_gpu(parts, rows), self.on_cpu(parts, rows)), (parts, seed)

    def agrees(self, number: int) -> None:
        """Assert that both can go back to the same positions, and take the same memory."""
        there, here = self.sessions[number]
        assert there.length == here.length
        assert [there.reachable(at) for at in range(there.length + 2)] == [
            here.reachable(at) for at in range(here.length + 2)
        ]
        assert there.num_bytes == here.num_bytes


SHAPES: Final[dict[str, tuple[StateLayer, int]]] = {
    "as most models": (StateLayer(2, 1, 128, 64), 128),
    "the kernel of wide keys": (StateLayer(2, 1, 128, 33), 0),
    "wide keys": (StateLayer(2, 2, 256, 16), 128),
    "keys that fill no thread": (StateLayer(2, 1, 131, 5, 2), 128),
    "keys of one number": (StateLayer(3, 3, 1, 1, 1), 128),
    "keys of three numbers, the most taps": (StateLayer(4, 1, 3, 31, 32), 128),
    "sums of ragged tiles": (StateLayer(6, 3, 12, 65, 5, True), 128),
    "sums of wide keys": (StateLayer(4, 2, 200, 32, 4, True), 128),
    "decays of channels": (StateLayer(2, 2, 128, 128, by_channel=True), 128),
    "decays of channels, ragged": (StateLayer(4, 2, 19, 37, 3, by_channel=True), 128),
    "decays of channels, wide keys": (StateLayer(2, 1, 200, 5, by_channel=True), 128),
}


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_the_cpus_bits(name: str, device: HostDevice) -> None:
    """Steps of one row and of many, across blocks; then some of them anew, from a state and from what changed it since."""
    layer, narrow = SHAPES[name]
    for row_type in ("bf16", "f32"):
        both = Both(device, layer, row_type, narrow)
        both.begin(mark=40)
        at = 0
        for seed, (start, count) in enumerate(
            [(0, 33), (33, 1), (34, 2), (36, 70), (106, 1), (70, 3), (73, 9), (64, 40), (104, 60), (96, 1), (95, 2)]
        ):
            both.step([(0, start, count)], seed)
            at = start + count
        assert at == 97
        both.agrees(0)
    wide = layer.width > narrow
    name = "delta_by_channel" if layer.by_channel else "delta"
    assert (f"{name}_256" in device.launched, f"{name}_128" in device.launched) == (wide, not wide)


def kernels() -> str:
    """Those of the cases of states."""
    here = Path(source.__file__).parent
    return "".join(here.joinpath(f"{name}.cu").read_text(encoding="utf-8") for name in ("common", "rows", "states"))


CASES = [case for name, case in STATE_CASES.items() if name in PROVEN_CASES]


def reproduces_the_cases(device: HostDevice) -> bool:
    here, there = BackEnd("scalar", Team(1)), OnGpu("scalar", Team(1), device)
    try:
        return all(case(there) == case(here) for case in CASES)
    except CompanyMatters:
        return False


def test_threads_that_drift_apart_compute_the_same_bits() -> None:
    device = HostDevice(drifts=True, text=kernels())
    assert reproduces_the_cases(device) and all(memory.is_whole() for memory in device.memories)


@pytest.mark.parametrize("where", ["        store();\n", "        load(begun + STAGED);\n"])
def test_a_barrier_that_is_missing_shows(where: str) -> None:
    barrier, whole = "        __syncthreads();\n" + where, kernels()
    assert whole.count(barrier) == 1
    assert not reproduces_the_cases(HostDevice(drifts=True, text=whole.replace(barrier, where)))


@pytest.mark.parametrize("form", [{}, {"is_sum": True}, {"by_channel": True}])
def test_infinities_nans_and_denormals_are_the_cpus(form: dict[str, bool], device: HostDevice) -> None:
    """Infinities, NaNs, denormals, what flushes to zero, decays beyond softplus's bound; of one session, beside another."""
    both = Both(device, StateLayer(4, 2, 8, 20, 3, **form), "f32")
    both.begin()
    both.begin()

    def odd(rows: Array) -> None:
        numbers = rows.view(np.float32)
        numbers[1] *= np.float32(1e-38)
        numbers[2] *= np.float32(1e-30)
        numbers[3] = np.float32(-0.0)
        numbers[4, -8:] = np.linspace(-200, 200, 8)
        numbers[40, 3], numbers[41, 20], numbers[50, 60] = np.inf, -np.inf, np.nan
        numbers[47, -5] = np.inf

    both.step([(0, 0, 80), (1, 0, 5)], 3, odd)
    both.step([(1, 5, 5), (0, 80, 3)], 4)
    both.step([(0, 36, 3), (1, 2, 3)], 5)


@pytest.mark.parametrize("is_sum", [False, True])
def test_a_decay_is_the_cpus_at_any_rate(is_sum: bool, device: HostDevice) -> None:
    """Rates of nothing, of infinities and of either sign; doubles that become the least floats."""
    rates = np.array([0.0, 1e-310, 1e-300, 0.3, 87.0, 87.3365, 88.0, 103.0, 710.0, -0.5, -1.0, -90.0, np.inf, np.nan])
    bias = np.zeros(len(rates), np.float32)
    bias[3:5] = 1e-40, -1e-40
    ops: list[Op] = [(library.DECAY, (0, 1), (), (None if is_sum else rates, bias))]
    x = np.concatenate([np.linspace(-120, 120, 97), [0.54, 88.4, 0.0, -0.0, 1e-40, np.inf, -np.inf, np.nan]])
    rows = np.repeat(x.astype(np.float32)[:, None], len(rates), axis=1)
    wanted = BackEnd(library.supported()[0], Team(1)).run(rows, "f32", [len(rates)], ops, 1)
    assert np.array_equal(OnGpu("scalar", Team(1), device).run(rows, "f32", [len(rates)], ops, 1), wanted)
    assert np.isfinite(wanted.view(np.float32)).any()


@pytest.mark.parametrize("bound", [-5.0, -100.0])
def test_a_bounded_decay_is_the_cpus_at_any_rate(bound: float, device: HostDevice) -> None:
    rates = np.array([0.0, 1e-40, 0.3, 1.0, 87.0, 1e30, np.inf, np.nan], np.float32)
    ops: list[Op] = [(library.DECAY, (0, 1, 2), (bound,), (rates, reals(3, len(rates))))]
    x = np.concatenate([np.linspace(-120, 120, 97), [0.0, -0.0, 1e-40, np.inf, -np.inf, np.nan]])
    rows = np.repeat(x.astype(np.float32)[:, None], len(rates), axis=1)
    wanted = BackEnd(library.supported()[0], Team(1)).run(rows, "f32", [len(rates)], ops, 1)
    assert np.array_equal(OnGpu("scalar", Team(1), device).run(rows, "f32", [len(rates)], ops, 1), wanted)
    assert len(np.unique(wanted.view(np.float32)[:97])) > 30


@pytest.mark.parametrize(("width", "narrow"), [(6, 128), (130, 128), (6, 0)])
def test_signs_of_zeros_are_the_cpus(width: int, narrow: int, device: HostDevice) -> None:
    """Nothing is added for what a thread has beyond the end of a key: a sum that flushed to -0 would become 0."""
    layer = StateLayer(2, 1, width, 3)
    copies: list[Op] = [(op[0], (0, *op[1][1:]), (), ()) for op in layer.ops if op[0] == library.COPY]
    x = np.ones((40, layer.entering), np.float32)
    x[:, :width], x[:, width : 2 * width] = -1e-20, 1e-20
    x[:, 2 * width :][:, : layer.parts[2]] = np.sign(reals(1, 40, layer.parts[2]))
    ops, team = [*copies, layer.ops[-1]], Team(1)
    wanted = BackEnd(library.supported()[0], team).run(x, "f32", layer.widths[1:], ops, OUT)
    found = OnGpu("scalar", team, device, Tiles(narrow_keys=narrow)).run(x, "f32", layer.widths[1:], ops, OUT)
    assert np.array_equal(found, wanted)
    signs = np.signbit(wanted.view(np.float32))
    assert not wanted.view(np.float32).any() and signs.any() and not signs.all()


def test_sessions_share_a_step_at_any_positions(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are computed side by side; some go back, one of them just behind a block, some begin."""
    monkeypatch.setattr(cuda_states, "SESSIONS", 2)
    both = Both(device)
    for _ in range(5):
        both.begin()
    both.step([(number, 0, 30 + 17 * number) for number in range(4)], 1)
    both.step([(0, 30, 1), (1, 32, 1), (2, 64, 3), (3, 20, 1), (4, 0, 2)], 2)
    both.step([(3, 21, 60), (4, 2, 1), (1, 31, 33), (0, 0, 1)], 3)
    both.step([(number, both.sessions[number][0].length, 1) for number in (4, 2, 0, 1, 3)], 4)
    for number in range(5):
        both.agrees(number)


def test_rows_that_go_in_turns(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's rows are cut where sessions are not: each goes on in the next turn from where it was, whatever it began from."""
    monkeypatch.setattr(cuda_plan, "MOST_ROWS", cuda_plan.LEAST_ROWS)
    both = Both(device)
    assert both.there.most_rows == cuda_plan.LEAST_ROWS
    for _ in range(3):
        both.begin()
    both.step([(0, 0, 5), (1, 0, 90), (2, 0, 3)], 1)
    both.step([(2, 3, 14), (1, 70, 50), (0, 4, 40)], 2)  # from a block, with 6 positions between
    both.step([(1, 96, 17), (0, 44, 1)], 3)
    both.step([(0, 45, 15), (1, 113, 2), (2, 17, 1)], 4)  # one turn of sixteen rows ends within two of a session


def test_recorded_steps_go_on_from_whatever_state_there_is(device: HostDevice) -> None:
    """A step is recorded once for its number of rows: the addresses of states are data of it."""
    both = Both(device)
    both.begin()
    before = device.recorded
    for turn, start in enumerate((0, 4, 8, 12, 16, 20, 24, 28, 32, 29, 33, 31, 5, 9, 2, 0)):
        both.step([(0, start, 4)], turn)
        if start in (8, 32, 5):
            both.step([(both.fork(0, 6), 6, 4)], turn + 20)
    assert device.recorded - before == 1


def test_neither_a_fork_nor_its_source_sees_what_the_other_writes(device: HostDevice) -> None:
    for at in (40, 64, 70):
        both = Both(device)
        source = both.begin(mark=50)
        both.step([(source, 0, 70)], 1)
        first, second = both.fork(source, at), both.fork(source, at)
        both.step([(first, at, 40)], 2)
        both.step([(source, 35, 50)], 3)
        both.step([(second, at, 3), (first, at + 5, 2), (source, 34, 1)], 4)
        third = both.fork(first, 32)
        both.sessions[source] = both.sessions[first] = both.sessions[third]
        gc.collect()
        both.step([(third, 32, 5), (second, 33, 40)], 5)


def test_no_session_goes_on_from_a_state_that_is_gone(device: HostDevice) -> None:
    both = Both(device)
    both.begin()
    both.step([(0, 0, 200)], 1)
    launched, reached = len(device.launched), both.sessions[0][0].reachable(40)
    assert reached < 40
    for start in (40, 201):
        with pytest.raises(StateGone, match=f"position {start} was left long ago"):
            both.on_gpu([(0, start, 1)], both.rows(1, 2))
    assert len(device.launched) == launched and both.sessions[0][0].length == 200
    both.agrees(0)
    both.step([(0, reached, 90)], 3)


def test_memory_of_states_is_bounded_and_given_back(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length, at any time; and as much as a plan counts for a session."""
    made = program("qwen3_next")
    on_gpu, on_cpu = spans(device, made)
    assert on_gpu.session_bytes == on_cpu.session_bytes == sum(state_bytes(layer, 2) for layer in made.layers) > 0
    assert on_gpu.bytes_per_token == on_cpu.bytes_per_token
    both, most, plain = Both(device), list[int](), device.allocate

    def allocate(num_bytes: int) -> HostMemory:
        memory = plain(num_bytes)
        most.append(num_state_blocks(device, both))
        return memory

    monkeypatch.setattr(device, "allocate", allocate)
    both.begin(mark=72)
    at, limit = 0, (MOST_KEPT + 1) * both.there.state_bytes + both.there.now_bytes
    for turn, count in enumerate([3, 200, 1, 31, 31, 2, 60, 0, 339, 684, 0, 1, 33, 90, 64]):
        at = at if count else 0
        both.step([(0, at, count or 1)], turn)  # 0: from nothing again, where there are as many as there can be
        at += count or 1
        both.agrees(0)
        assert both.sessions[0][0].num_bytes <= limit
    assert max(most) == MOST_KEPT + 1
    fork = both.fork(0, both.sessions[0][0].reachable(at - MOST_BACK))
    both.step([(fork, both.sessions[fork][0].length, 3)], 50)
    both.sessions.clear()
    assert num_state_blocks(device, both) == 0


def num_state_blocks(device: HostDevice, both: Both) -> int:
    """Blocks of states on the device."""
    gc.collect()
    return sum(len(memory) == both.there.state_bytes and not memory.is_dropped for memory in device.memories)


def test_a_step_without_room_loses_nothing(device: HostDevice) -> None:
    """For blocks of states, some of them, and of the second of two sessions; also from nothing, and for forks."""
    both = Both(device)
    for _ in range(3):
        both.begin()
    both.step([(0, 0, 64), (1, 0, 50)], 1)
    for _ in range(2):
        both.fork(0, 64)
    refused: list[tuple[list[Part], tuple[int, ...]]] = [  # and with room for so many blocks of states
        ([(0, 64, 200)], (0, 2)),
        ([(2, 0, 90)], (0, 1)),
        ([(1, 50, 3), (3, 64, 200)], (0, 1)),
        ([(4, 40, 1)], (0,)),
    ]
    for parts, rooms in refused:
        for blocks in rooms:
            device.room = blocks * both.there.state_bytes
            with pytest.raises(ModelError, match="not free on the GPU"):
                both.on_gpu(parts, both.rows(sum(count for *_, count in parts), 2))
            for there, here in (both.sessions[number] for number, *_ in parts):
                assert [there.reachable(at) for at in range(65)] == [here.reachable(at) for at in range(65)]
    with pytest.raises(ModelError, match="not free on the GPU"):
        both.fork(0, 40)
    device.room = None
    for turn, (parts, _) in enumerate(refused):
        both.step(parts, turn)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_becomes_of_sessions_their_bits_are_the_cpus(seed: int, device: HostDevice) -> None:
    """Steps, steps back, forks, ends and a GPU that is full, at random."""
    chance, both = random.Random(seed), Both(device, StateLayer(4, 2, 8, 20, 4, seed == 1), ("bf16", "f32")[seed % 2])
    live, full = [both.begin(mark=chance.choice([0, 70]))], 0
    both.step([(live[0], 0, 3)], seed)
    for turn in range(60):
        if chance.random() < 0.3 and len(live) < 6:
            source = chance.choice(live)
            length = both.sessions[source][0].length
            at = both.sessions[source][0].reachable(chance.randint(0, length))
            live.append(both.fork(source, at, chance.choice([0, at])) if at else both.begin())
        if len(live) > 2 and chance.random() < 0.1:
            gone = live.pop(chance.randrange(len(live)))
            both.sessions[gone] = both.sessions[live[0]]
        parts = []
        for number in chance.sample(live, chance.randint(1, min(3, len(live)))):
            there = both.sessions[number][0]
            back = chance.choice([0, 0, 0, 1, 9, 64, MOST_BACK, 1000])
            parts.append((number, there.reachable(max(0, there.length - back)), chance.choice([1, 1, 3, 33, 70])))
        rows = both.rows(sum(count for *_, count in parts), 100 * seed + turn)
        device.room = chance.choice([None, None, both.there.state_bytes])
        try:
            found = both.on_gpu(parts, rows)
        except ModelError:
            device.room, full = None, full + 1
            found = both.on_gpu(parts, rows)
        device.room = None
        assert np.array_equal(found, both.on_cpu(parts, rows)), turn
        for number in live:
            assert both.sessions[number][0].length == both.sessions[number][1].length
    assert full


def test_keys_that_are_too_wide_are_refused(device: HostDevice) -> None:
    with pytest.raises(ModelError, match="linear attention with keys of 257 numbers: a GPU takes 256 at most"):
        hold(device, StateLayer(1, 1, 257, 4).ops)
    made = program("qwen3_next", linear_key_head_dim=272)
    with pytest.raises(ModelError, match="keys of 272 numbers"):
        spans(device, made)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("qwen3_next", {}),
        ("lfm2", {"layer_types": ["conv"] * 3, "num_hidden_layers": 3}),
        ("granitemoehybrid_mamba", {}),
        ("nemotron_h", {}),
        ("falcon_h1", {}),
    ],
)
def test_layers_with_states_and_without_are_the_cpus(family: str, changed: dict[str, Any], device: HostDevice) -> None:
    """Also of a part of them, and where none caches positions; sessions that go back and fork share steps."""
    made = program(family, **changed)
    on_gpu, on_cpu = spans(device, made)
    count, chance = len(made.layers), random.Random(4)
    for part in (Span(0, count), Span(1, 2)):
        live = [(on_gpu.new_cache(0, part, 50), on_cpu.new_cache(0, part, 50)) for _ in range(2)]
        for turn in range(5):
            parts = []
            for there, here in chance.sample(live, chance.randint(1, min(3, len(live)))):
                start = there.reachable(max(0, there.length - chance.choice([0, 0, 0, 3, 40])))
                parts.append((there, here, start, chance.choice([1, 2, 34])))
            rows = rows_of(made, sum(part[3] for part in parts), seed=turn)
            found = on_gpu.step(rows, [Piece(there, start, rows) for there, _, start, rows in parts], 1)
            wanted = on_cpu.step(rows.copy(), [Piece(here, start, rows) for _, here, start, rows in parts], 1)
            assert np.array_equal(found, wanted), turn
            there, here = chance.choice(live)
            at = there.reachable(chance.randint(0, there.length))
            if at and len(live) < 4:
                live.append((on_gpu.fork(there, at, 0), on_cpu.fork(here, at, 0)))
