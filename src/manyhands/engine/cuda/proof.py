"""Golden digests on a GPU: it is used only after it reproduced those that the arithmetic class depends on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine import golden, library
from manyhands.engine.compiled import Registers
from manyhands.engine.cuda.device import CudaDevice
from manyhands.engine.cuda.launch import THREADS, Launch, Place, args
from manyhands.engine.cuda.operations import FAST, Tiles
from manyhands.engine.cuda.plan import CudaPlan, hold
from manyhands.engine.cuda.span import CudaCache, CudaEnds, CudaSpan
from manyhands.engine.golden_biases import CASES as BIAS_CASES
from manyhands.engine.golden_cases import CASES, POSITIONS, BackEnd, Op, Step
from manyhands.engine.golden_mixes import CASES as MIX_CASES
from manyhands.engine.golden_small import CASES as SMALL_CASES
from manyhands.engine.golden_states import CASES as STATE_CASES
from manyhands.engine.golden_variants import CASES as VARIANT_CASES
from manyhands.engine.library import FUNCTIONS, Array, Team
from manyhands.engine.weights import Read
from manyhands.program.ops import Program

# As in use; and so that cases, which have few rows and narrow keys, also run in the tiles of many rows, large and small, and
# by the kernel of wide keys.
PROVEN_TILES: Final = (FAST, Tiles(0, 0, 1, 0), Tiles(0, 0, 1 << 30, 0, 0, 0))
_COLUMNS: Final = "numbers of columns"  # which other models have too than those of streams
_OTHERS: Final = ("pools of entries", "scales of heads")  # of models that a GPU refuses
_SLOPED: Final = {name: case for name, case in BIAS_CASES.items() if name.startswith("attention with slopes")}
_CASES: Final = {**_SLOPED, **CASES, **STATE_CASES, **SMALL_CASES, **VARIANT_CASES, _COLUMNS: MIX_CASES[_COLUMNS]}
PROVEN_CASES: Final = {name: case for name, case in _CASES.items() if name not in _OTHERS}


def failures(device: CudaDevice, team: Team) -> list[str]:
    """The operations whose golden digests a device does not reproduce; those of caches of 8 bit it does not have."""
    right, found = golden.recorded(), dict.fromkeys(PROVEN_CASES, True)
    for tiles in PROVEN_TILES:
        machine = OnGpu(golden.choose(), team, device, tiles)
        for name, case in PROVEN_CASES.items():
            is_tiled = (
                name.startswith(("product", "attention", "states")) and name not in _SLOPED
            )  # one kernel has slopes
            if tiles == FAST or is_tiled or name in SMALL_CASES:
                found[name] = found[name] and golden.digest_of(case, machine) in _right(name, right)
    return [name for name, is_right in found.items() if not is_right]


def _right(name: str, right: Mapping[str, str]) -> list[str]:
    """What a case may give: of tininess what one or the other kind of CPU does, whichever the GPU sits beside."""
    kind = name.partition(" ")[0]
    return [digest for case, digest in right.items() if case == name or kind == "tininess" == case.partition(" ")[0]]


@dataclass(frozen=True, slots=True)
class OnGpu(BackEnd):
    """A device that the cases of operations run on. What they do beside plans, the CPU's back end does."""

    device: CudaDevice
    tiles: Tiles = FAST

    def sessions(self, row_type: str, widths: Sequence[int], ops: Sequence[Op], out: int) -> Callable[[], Step]:
        registers = Registers(row_type, tuple(widths), POSITIONS)
        held, places = hold(self.device, ops), library.apart(widths)
        plan = CudaPlan(self.device, registers, held, places, out, "f32", tiles=self.tiles)

        def begin() -> Step:
            cache = CudaCache(self.device, plan, POSITIONS)

            def step(start: int, rows: Array) -> Array:
                out = plan.run([cache.begin(start, len(rows))], rows, len(rows))
                cache.done(start + len(rows))
                return out

            return step

        return begin

    def apply(self, function: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
        there, found = (self.device.allocate(x.nbytes) for _ in range(2))
        self.device.upload(there, x)
        out = self.device.staging(x.nbytes)
        given = args(
            Place(there.address), out=Place(found.address), n=(x.size, FUNCTIONS.index(function)), reals=(1.0,)
        )
        self.device.launch([Launch("apply", (-(-x.size // THREADS), 1, 1), given)])
        self.device.fetch(out, found.address)
        self.device.wait()
        return out.view(np.float32).copy()


class OfGpu:
    """A device, as golden_models.RunnerMaker."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._team = device, Team(2)

    def span(self, program: Program, span: Span, read: Read, precision: Precision) -> CudaSpan:
        return CudaSpan(program, span, read, precision, self._device)

    def ends(self, program: Program, read: Read, precision: Precision) -> CudaEnds:
        return CudaEnds(program, read, precision, self._team, self._device)
