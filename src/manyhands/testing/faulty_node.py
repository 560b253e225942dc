"""A node process that can be made to misbehave: `python -m manyhands.testing.faulty_node serve ...`.

The file named by $MANYHANDS_FAULT_FILE says how, from the moment it exists: "slow SECONDS" delays every device step,
"poison nan|inf|scale|zero|nudge" spoils its results. Everything else is `manyhands serve`.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from manyhands.cli import main
from manyhands.wire.message import Payload
from manyhands.wire.tensor import decode_tensor, encode_tensor
from manyhands.worker import worker
from manyhands.worker.execute import Result, SpanModel, Work

FAULT_FILE = "MANYHANDS_FAULT_FILE"
# By what "scale" and "nudge" multiply: numbers of another order, and plausible ones.
SCALE, NUDGE = 1000.0, 1.5


def spoil(payload: Payload, count: int, how: str) -> Payload:
    """The payload with its tensor poisoned: all but nudge can be noticed by looking at it (worker/bounds.py)."""
    tensor = decode_tensor(payload, count).clone()
    match how:
        case "nan" | "inf":
            tensor.fill_(float(how))
        case "scale":
            tensor.mul_(SCALE)
        case "nudge":
            tensor.mul_(NUDGE)
        case "zero":
            tensor.zero_()
        case _:
            raise ValueError(f"no such poison: {how}")
    return encode_tensor(tensor)


class FaultySpanModel(SpanModel):
    """A SpanModel that does what the fault file says."""

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        kind, _, value = _order().partition(" ")
        if kind == "slow":
            time.sleep(float(value))
        results = super().run(works)
        return [_spoiled(r, value) if kind == "poison" else r for r in results]


def _spoiled(result: Result | Exception, how: str) -> Result | Exception:
    if not isinstance(result, Result) or result.payload is None or result.payload.dtype == "int32":
        return result
    return Result(result.position, result.count, result.content, spoil(result.payload, result.count, how))


def _order() -> str:
    try:
        return Path(os.environ[FAULT_FILE]).read_text().strip()
    except (KeyError, OSError):
        return ""


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    setattr(worker, "SpanModel", FaultySpanModel)  # noqa: B010 - replaced where it is looked up
    main()
