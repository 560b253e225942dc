"""A node that uses all that --memory gives it: weights, ends, every cache page, all logs. Prints its resident bytes."""

import json
import sys
from pathlib import Path
from typing import Any

import manyhands.cli.membership  # what `up` imports
import manyhands.member.hosting  # noqa: F401
from manyhands.checkpoint.manifest import build_manifest
from manyhands.config import WorkerConfig, home_from_env
from manyhands.core import Span
from manyhands.engine.cache import SessionCache
from manyhands.origin import OriginModel
from manyhands.place.budget import MemoryBudget
from manyhands.place.shape import look_up
from manyhands.worker.execute import SpanModel
from manyhands.worker.thread import computing

CAPACITY = 512  # positions of a session
LOGS = WorkerConfig().log_bytes


def resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def fill(cache: Any) -> None:
    """Write all of its memory."""
    if isinstance(cache, SessionCache):
        cache.segment(0, 0, CAPACITY)
        for block in cache._blocks:
            block.fill(1)
    else:
        for tensor in (*cache.keys.values(), *cache.values.values()):
            tensor.fill_(1)


def main(folder: Path, memory_bytes: int) -> None:
    shape = look_up(str(folder), "bf16", home_from_env()).shape
    span = Span(0, shape.num_layers)
    budget = MemoryBudget(shape, memory_bytes, 4096, with_ends=True)
    budget.check(span)
    with computing(1):
        model = SpanModel(folder, span, "bf16", False, 1, build_manifest(folder))
        origin = OriginModel(folder, "bf16")
        caches = []
        for _ in range(budget.cache_bytes([span], LOGS) // (CAPACITY * model.runner.bytes_per_token)):
            caches.append(model.runner.new_cache(CAPACITY))
            fill(caches[-1])
        logs = bytearray(b"\1" * budget.log_bytes([span], LOGS))
    told = {"resident": resident(), "caches": len(caches), "logs": len(logs), "layers": origin.num_layers}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
