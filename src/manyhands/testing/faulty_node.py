"""A node process that can be made to misbehave: `python -m manyhands.testing.faulty_node serve ...`.

The file named by $MANYHANDS_FAULT_FILE says how, from the moment it exists: "slow SECONDS" delays every device step,
"poison nan|inf|scale|zero|nudge" spoils its results. Everything else is `manyhands serve`.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from manyhands.cli import main
from manyhands.testing.faulty_device import spoiled_all
from manyhands.worker import worker
from manyhands.worker.execute import Result, SpanModel, Work

FAULT_FILE = "MANYHANDS_FAULT_FILE"


class FaultySpanModel(SpanModel):
    """A SpanModel that does what the fault file says."""

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        kind, _, value = _order().partition(" ")
        if kind == "slow":
            time.sleep(float(value))
        results = super().run(works)
        return spoiled_all(works, results, value) if kind == "poison" else results


def _order() -> str:
    try:
        return Path(os.environ[FAULT_FILE]).read_text().strip()
    except (KeyError, OSError):
        return ""


if __name__ == "__main__":
    setattr(worker, "SpanModel", FaultySpanModel)  # noqa: B010 - replaced where it is looked up
    main()
