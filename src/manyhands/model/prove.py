"""Does this machine keep rows apart? Shown on the kernels themselves, once for every arithmetic class and CPU.

Exactness rests on it (docs/exactness.md), and it depends on CPU, libraries and settings: AMX kernels and MKL's AVX2 branch
on Intel CPUs broke it, and no family's tiny self-test is wide enough to show that.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from manyhands.checkpoint.folder import write_atomic
from manyhands.core import UNPROVEN, Precision
from manyhands.model.arithmetic import arithmetic_class
from manyhands.model.attention import attention, running
from manyhands.model.cache import LayerShape, ShardCache, ShardSegment, StepPlan
from manyhands.model.linear import DTYPES, pack

logger = logging.getLogger(__name__)

# [columns, rows] of weights: where oneDNN's AMX kernels begin to cut the sum, a wide, a deep, a deep and narrow one.
_SHAPES = ((512, 1024), (896, 4864), (4864, 896), (16384, 128))
_ROWS, _COUNTS, _STARTS = 200, (1, 2, 3, 4, 6, 16, 17, 31, 32, 33, 65, 128), (0, 1, 37)
_LENGTH, _HEADS, _KEY_HEADS, _WIDTH = 560, 8, 2, 64


def proven_class(precision: Precision, home: Path) -> str:
    """The arithmetic class of this machine, ending with UNPROVEN if rows depend on each other here.

    The verdict is kept under `home`; finding it takes about a second. Not for the event loop.
    """
    name = arithmetic_class(precision)
    path = home / "arithmetic.json"
    mark = f"{name} on {_cpu()} with {os.environ.get('MKL_CBWR')}"
    verdicts = _read(path)
    if mark not in verdicts:
        verdicts[mark] = keeps_rows_apart(precision)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(verdicts, indent=1).encode())
    if not verdicts[mark]:
        logger.warning("%s: rows depend on each other on this machine; answers through it are not exact", mark)
    return name if verdicts[mark] else name + UNPROVEN


def keeps_rows_apart(precision: Precision) -> bool:
    """Whether products and attention give a row the same bits alone, in any company, and on any number of threads."""
    return _products_do(precision) and _attention_does(precision)


def _products_do(precision: Precision) -> bool:
    for columns, rows in _SHAPES:
        product = pack(_normal(rows, columns, 1, precision), None)
        x_MK = _normal(_ROWS, columns, 2, precision)
        want = product(x_MK)
        for _ in _threads():
            for count in _COUNTS:
                for start in _STARTS:
                    if not torch.equal(product(x_MK[start : start + count]), want[start : start + count]):
                        return False
    return True


def _attention_does(precision: Precision) -> bool:
    query, key, value = (
        _normal(_LENGTH, heads * _WIDTH, seed, precision).view(1, _LENGTH, heads, _WIDTH).transpose(1, 2)
        for heads, seed in ((_HEADS, 3), (_KEY_HEADS, 4), (_KEY_HEADS, 5))
    )
    cache = ShardCache({0: LayerShape(_KEY_HEADS, _WIDTH, _WIDTH, query.dtype)}, _LENGTH)

    def attend(start: int, count: int) -> Tensor:
        part = slice(start, start + count)
        module = torch.nn.Module()
        module.layer_idx = 0  # type: ignore[assignment]
        with running(StepPlan([ShardSegment(cache, start, 0, count)])):
            return attention(module, query[:, :, part], key[:, :, part], value[:, :, part], None)[0]

    want = attend(0, _LENGTH)
    for _ in _threads():
        for start in (0, 100, 256, 509):
            for count in (1, 3, 9, 33):
                if not torch.equal(attend(start, count), want[:, start : start + count]):
                    return False
    return True


def _normal(rows: int, columns: int, seed: int, precision: Precision) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values: Tensor = torch.randn(rows, columns, generator=generator).div_(columns**0.5)
    return values.to(DTYPES[precision])


def _threads() -> Iterator[int]:
    """One thread, then as many as before."""
    with _restored() as before:
        for count in dict.fromkeys((1, before)):
            torch.set_num_threads(count)
            yield count


@contextmanager
def _restored() -> Iterator[int]:
    before = torch.get_num_threads()
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "an unknown CPU")


def _read(path: Path) -> dict[str, bool]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, bool)} if isinstance(found, dict) else {}
