"""Seconds per layer of a model on this machine. The part of place that is not pure.

What counts is a real device step (engine/span.py) on layers of the model: those on disk, or layers with random weights in
its config's shape. Where these do not fit, seconds follow from bytes and the memory's bandwidth. What a token and a request
take beside that is rehearsed with a small model (cli/rehearsal.py). Figures are kept for a day in
$MANYHANDS_HOME/measured.json. Blocking, and seconds long: call from a thread; it sets that thread's compute threads.
"""

import contextlib
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from manyhands.core import Span, weight_precision
from manyhands.errors import BadRequest
from manyhands.place.likeness import WEIGHT_BYTES, program_bytes, random_reader
from manyhands.place.machines import AWAKE_S, BEGIN_S, DOZE_S, NEW_S, OPEN_S, Machine
from manyhands.place.shape import Checkpoint, ModelShape
from manyhands.resources import available_memory, num_cores
from manyhands.route.chunks import LEAST_ROWS
from manyhands.route.cost import HOP_OVERHEAD_S

if TYPE_CHECKING:
    from manyhands.engine.span import EndsRunner, SpanRunner
    from manyhands.program.ops import Program
    from manyhands.wire.message import DType

# Of layers loaded to measure: more than any cache holds, so that weights come from memory as they do in earnest.
SAMPLE_BYTES: Final = 512_000_000
# Where it was not rehearsed: of bench/hop.py `path_ms` less `hop_ms`, 0.2 to 0.4 on the makes of bench/results.
ORIGIN_OVERHEAD_S: Final = 0.0004
MAX_AGE_S: Final = 86400.0
MAX_BYTES: Final = 16 << 20  # of what was measured before
ROWS: Final = 256  # RequestConfig.prefill_chunk
START: Final = 64  # the position of steps that are measured
STEPS: Final = 25
DOZES: Final = 9  # steps after a long pause: of a large model each takes long
_VERSION: Final = 7  # of what is measured and how


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of compute, as in Machine. `step_s`: of a step on whatever layers. `source`: layers that ran, or a guess from
    bytes and bandwidth.
    """

    layer_s: float
    row_s: float
    ends_s: float
    step_s: float
    doze: float
    pass_s: float
    source: Literal["layers", "bandwidth"]


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds beside the compute: what a hop adds to a step, what a token takes its origin (to draw it, the text, hand-overs
    between threads), what a request takes its origin before its prompt is on its way, what each hop beyond the first
    adds to that, and what the first step of a session takes a hop beyond hop_s."""

    hop_s: float = HOP_OVERHEAD_S
    origin_s: float = ORIGIN_OVERHEAD_S
    begin_s: float = BEGIN_S
    open_s: float = OPEN_S
    new_s: float = NEW_S


def this_machine(
    name: str,
    model: Checkpoint,
    home: Path,
    memory_bytes: int | None = None,
    rehearse: Callable[[], Overheads] = Overheads,
) -> Machine:
    """This machine as the origin and a host of `model`; `memory_bytes`: default what is available. Raises ModelError.

    `rehearse` measures the overheads; default: the usual ones.
    """
    now_s = time.time()
    room = available_memory() if memory_bytes is None else memory_bytes
    return machine_of(name, room, measured_speed(model, home, now_s), measured_overheads(home, now_s, rehearse))


def machine_of(name: str, memory_bytes: int, speed: Speed, overheads: Overheads) -> Machine:
    """A machine with this one's cores that is so fast."""
    return Machine(
        name,
        memory_bytes,
        speed.layer_s,
        speed.row_s,
        ends_s=speed.ends_s + overheads.origin_s,
        overhead_s=speed.step_s + overheads.hop_s,
        cores=num_cores(),
        doze=speed.doze,
        begin_s=overheads.begin_s,
        open_s=overheads.open_s,
        new_s=overheads.new_s,
        pass_s=speed.pass_s,
    )


def measured_speed(model: Checkpoint, home: Path, now_s: float) -> Speed:
    """As measure_speed, or what it said within MAX_AGE_S for the same machine, shape and versions."""
    key = _key(model.shape)
    known = _figures(home, key, now_s, ("layer_s", "row_s", "ends_s", "step_s", "doze", "pass_s"))
    if known is not None and known["layer_s"] > 0 and known["doze"] >= 1:
        return Speed(**known, source="layers")
    speed = measure_speed(model)
    if speed.source == "layers":
        _keep(home, key, {name: value for name, value in asdict(speed).items() if name != "source"}, now_s)
    return speed


def measured_overheads(home: Path, now_s: float, rehearse: Callable[[], Overheads]) -> Overheads:
    """As `rehearse` says, or said within MAX_AGE_S on the same machine with the same version."""
    facts = [_VERSION, platform.node(), platform.machine(), num_cores(), _version("manyhands")]
    key = "overheads " + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    known = _figures(home, key, now_s, ("hop_s", "origin_s", "begin_s", "open_s", "new_s"))
    if known is not None:
        return Overheads(**known)
    overheads = rehearse()
    if overheads != Overheads():
        _keep(home, key, asdict(overheads), now_s)
    return overheads


def _key(shape: ModelShape) -> str:
    from manyhands.engine import golden
    from manyhands.engine.library import FORCED

    engine = [golden.arithmetic(), os.environ.get(FORCED), _version("torch")]
    facts = [_VERSION, platform.node(), platform.machine(), num_cores(), *engine, shape.precision]
    sizes = [shape.layer_bytes, shape.ends_bytes, shape.hidden_bytes, shape.context]
    return hashlib.sha256(json.dumps([*facts, *sizes]).encode()).hexdigest()[:32]


def _version(package: str) -> str | None:
    """The version of an installed package, which is not imported; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_measured(path: Path) -> dict[str, Any]:
    """What was measured before, by key; empty where the file cannot be read."""
    from manyhands.files import read_plain

    try:
        found = json.loads(read_plain(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError, BadRequest):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(home: Path, key: str, figures: Mapping[str, float], now_s: float) -> None:
    from manyhands.files import write_atomic

    path = home / "measured.json"
    with contextlib.suppress(OSError):  # only to save time
        write_atomic(path, json.dumps({**read_measured(path), key: {**figures, "at": now_s}}, indent=1).encode())


def _figures(home: Path, key: str, now_s: float, names: Sequence[str]) -> dict[str, float] | None:
    """What was kept under `key` within MAX_AGE_S, if it is whole."""
    entry = read_measured(home / "measured.json").get(key)
    try:
        assert isinstance(entry, dict)
        figures = {name: float(entry[name]) for name in names}
        is_fresh = 0 <= now_s - float(entry["at"]) < MAX_AGE_S and all(0 <= value < 1e6 for value in figures.values())
        return figures if is_fresh else None
    except (AssertionError, KeyError, TypeError, ValueError):
        return None


def measure_speed(model: Checkpoint) -> Speed:
    """Run layers of the model here; see the module for what stands in for them."""
    from manyhands.worker.choice import program_of

    shape, folder = model.shape, model.folder
    largest, ends_bytes, copies = max(shape.layer_bytes), shape.ends_bytes, 2  # packed from what is mapped
    if folder is None:  # made, written and then packed, of the config's sizes, whatever the checkpoint's tensors say
        program, copies = program_of(model.config, shape.precision), 3
        largest, ends_bytes = map(max, (largest, ends_bytes), program_bytes(program, shape.precision))
    count = min(shape.num_layers, max(2, SAMPLE_BYTES // largest))
    if shape.process_bytes + copies * (ends_bytes + count * largest) > available_memory():
        return _speed_by_bandwidth(shape)
    return _speed_of_likeness(program, count, shape) if folder is None else _speed_of_folder(folder, count, shape)


def _speed_of_folder(folder: Path, count: int, shape: ModelShape) -> Speed:
    from manyhands.worker.runner import load_ends, load_span

    span = load_span(folder, Span(0, count), shape.precision, num_cores())
    return _speed_of_layers(span, load_ends(folder, shape.precision, num_cores()), count, shape)


def _speed_of_likeness(program: "Program", count: int, shape: ModelShape) -> Speed:
    """Of layers of a Program with random weights."""
    from manyhands.program.tensors import ends_tensors, layer_tensors, whole_tensors
    from manyhands.worker.runner import ends_of, span_of

    shapes = ends_tensors(program, embed=True, head=True)
    for layer in program.layers[:count]:
        shapes |= layer_tensors(layer)
    read, threads = random_reader(shapes, whole_tensors(program)), num_cores()
    ends = ends_of(program, read, shape.precision, threads)
    return _speed_of_layers(span_of(program, Span(0, count), read, shape.precision, threads), ends, count, shape)


def _speed_of_layers(span: "SpanRunner", ends: "EndsRunner", count: int, shape: ModelShape) -> Speed:
    from manyhands.worker.execute import WIRE_DTYPES, fastest_threads

    whole, dtype, (start, least, most) = Span(0, count), WIRE_DTYPES[shape.precision], steps_within(shape.context)
    steps = {threads: stepping(span, whole, 1, threads, dtype, start) for threads in (1, num_cores())}
    threads = fastest_threads(lambda threads: steps[threads](), num_cores())
    one, every = (stepping(span, part, 1, threads, dtype, start) for part in (Span(0, 1), whole))
    one_s, all_s = paired(one, every)
    layer_s = (all_s - one_s) / (count - 1) if count > 1 else one_s
    if not layer_s > 0:  # layers too small to tell from noise
        layer_s = all_s / count
    few, many = (stepping(span, whole, rows, num_cores(), dtype, start) for rows in (least, most))
    few_s, many_s = paired(few, many, steps=3)
    fixed_s = max(0.0, all_s - count * layer_s)
    few_s, many_s = (max(0.0, each_s - fixed_s) / count for each_s in (few_s, many_s))
    pass_s, row_s = of_chunks(few_s, many_s, least, most)
    ends_s, _ = paired(ending(ends, dtype), lambda: None)
    return Speed(layer_s, row_s, ends_s, fixed_s, _doze(every), pass_s, "layers")


def steps_within(context: int) -> tuple[int, int, int]:
    """The position of steps that are measured, and rows of a small and of a large chunk there, in `context` positions."""
    start = min(START, context // 4)
    most = min(ROWS, context - start)
    return start, max(1, min(LEAST_ROWS, most // 2)), most


def of_chunks(few_s: float, many_s: float, few: int = LEAST_ROWS, many: int = ROWS) -> tuple[float, float]:
    """Seconds of a chunk and of each of its rows, from what chunks of `few` and of `many` rows take: neither is below 0. Where
    the machine wavered so much that these contradict each other, rows alone count.
    """
    row_s = (many_s - few_s) / (many - few) if many > few else 0.0
    pass_s = many_s - many * row_s
    return (pass_s, row_s) if pass_s > 0 and row_s > 0 else (0.0, many_s / many)


def stepping(
    runner: "SpanRunner", span: Span, rows: int, threads: int, dtype: "DType", start: int = START
) -> Callable[[], object]:
    """One device step of a session at position `start`, bytes to bytes."""
    import numpy as np

    from manyhands.engine.span import Piece
    from manyhands.engine.states import MARGIN
    from manyhands.wire.rows import store

    cache = runner.new_cache(start + rows, span, start + MARGIN)  # which can be gone back to, where there are states
    hidden_TD = np.random.default_rng(0).standard_normal((max(start, rows), runner.hidden_size), np.float32)
    before, given = (bytes(store(hidden_TD[:count], dtype).data) for count in (start, rows))
    if start:
        runner.step(before, [Piece(cache, 0, start)], threads)
    return lambda: runner.step(given, [Piece(cache, start, rows)], threads)


def ending(ends: "EndsRunner", dtype: "DType") -> Callable[[], None]:
    """What the origin does between two tokens: logits, the likeliest, its embedding."""
    from manyhands.wire.message import ITEMSIZE

    row, threads = bytes(ends.hidden_size * ITEMSIZE[dtype]), num_cores()

    def turn() -> None:
        ends.embed([int(ends.logits(row, 1, threads)[0].argmax())])

    return turn


def _doze(step: Callable[[], object]) -> float:
    """How many times longer a step takes after DOZE_S than after AWAKE_S."""
    awake_s, dozing_s = paired(step, step, DOZES, (AWAKE_S, DOZE_S))
    return max(1.0, dozing_s / awake_s)


def paired(
    first: Callable[[], object],
    second: Callable[[], object],
    steps: int = STEPS,
    pauses_s: tuple[float, float] = (AWAKE_S, AWAKE_S),
) -> tuple[float, float]:
    """Median seconds of each, interleaved, after its pause: steps of a route come with pauses, too."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps + 2):
        for run, kept, pause_s in zip((first, second), times, pauses_s, strict=True):
            time.sleep(pause_s)
            began = time.perf_counter()
            run()
            kept.append(time.perf_counter() - began)
    return statistics.median(times[0][2:]), statistics.median(times[1][2:])  # two to warm up


def _speed_by_bandwidth(shape: ModelShape) -> Speed:
    """A decode step reads every weight once; a prefill row takes two operations for each."""
    import numpy as np

    parts = [np.zeros((1 << 26) // num_cores(), np.float32) for _ in range(num_cores())]
    square = np.ones((512, 512), np.float32)
    squares = [square] * num_cores()  # one product a core: BLAS has one thread (cli/__init__.py)
    with ThreadPoolExecutor(num_cores()) as pool:
        read_s, product_s = paired(
            lambda: list(pool.map(np.sum, parts)), lambda: list(pool.map(square.dot, squares)), steps=5
        )
    byte_s = read_s / sum(part.nbytes for part in parts)
    weight_s = product_s / len(squares) / 512**3
    layer = max(shape.layer_bytes)
    row_s = weight_s * layer / WEIGHT_BYTES[weight_precision(shape.precision)]
    return Speed(layer * byte_s, row_s, shape.ends_bytes * byte_s, 0.0, 1.0, 0.0, "bandwidth")
