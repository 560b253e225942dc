"""What does a hop add to a token beyond its compute, and how long until a session is open and answers?

A toy model of three layers on 1 and on 3 node processes (TLS on loopback, one thread each), beside the same layers in this
process as one span and as three. What two more hops add is the difference of the token times (p50 over the stream);
less the difference of the compute alone (three spans have three steps' fixed cost), halved, it is the hop's own.
`path`: token time on one node less the compute, that is, the way out and back with all thread hand-overs.
Opening: Open to ready and request to first token on open links (warm), and from a node that has no link yet (cold).
`begin`: a first token on one node less a token and a hop's own for the Open: what a request takes its origin before its
prompt is on its way (cli/rehearsal.py measures the same for a planner).
Holds if a hop adds at most 0.3 ms and the first token of a warm session comes within 50 ms.
Run: python -m bench.hop [--reps N] [--quick]
"""

import argparse
import itertools
import statistics
import sys
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from bench.report import finish, measuring, spread
from bench.shapes import checkpoint
from bench.swarm import Base, Run, base, generate, origin, prompt_ids
from manyhands.checkpoint.config_fields import read_facts
from manyhands.cli.connect import tls_node
from manyhands.cli.options import run as run_loop
from manyhands.config import RequestConfig
from manyhands.core import even_cut
from manyhands.engine.span import Piece
from manyhands.origin import Origin
from manyhands.worker.runner import load_ends, load_span

TARGET = {"hop_ms": 0.3, "first_byte_ms": 50.0}
HOPS = 3
PROMPT = 8


class Local:
    """The model in this process, cut into `cuts` spans, one after the other."""

    def __init__(self, folder: Path, cuts: int, threads: int) -> None:
        self.ends, self._threads = load_ends(folder, "bf16", threads), threads
        self.spans = [
            load_span(folder, span, "bf16", threads) for span in even_cut(read_facts(folder).num_layers, cuts)
        ]

    def token_s(self, ids: list[int], new: int) -> float:
        """The median time of a decoded token."""
        caches = [span.new_cache(len(ids) + new) for span in self.spans]
        times = []
        for _ in range(new):
            began = time.perf_counter()
            rows = self.ends.embed(ids)
            for span, cache in zip(self.spans, caches, strict=True):
                rows = span.step(rows.tobytes(), [Piece(cache, cache.length, len(ids))], self._threads)
            ids = [int(self.ends.logits(rows[-1:], 1, self._threads)[0].argmax())]
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])


def token_s(run: Run) -> float:
    return statistics.median([b - a for a, b in itertools.pairwise(run.at)])


async def cold(home: Base, warm: Origin) -> Run:
    """A request of a node that knows no other yet: dials, surveys, opens."""
    request = RequestConfig(draft="off")
    async with tls_node(home.ticket, None, request=request) as newcomer:
        return await generate(Origin(newcomer, home.model, home.device, warm.routes.addrs), prompt_ids(PROMPT), 2)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Milliseconds by what they are of."""
    samples: dict[str, list[float]] = defaultdict(list)
    ids = prompt_ids(PROMPT)
    async with AsyncExitStack() as stack:
        home = await stack.enter_async_context(base(folder, 1))
        origins = {count: await origin(stack, home, count, 1) for count in (1, HOPS)}
        locals_ = {
            count: await home.device.run(partial(Local, folder, count, home.device.most_threads)) for count in (1, HOPS)
        }

        def keep(name: str, seconds: float | None) -> None:
            samples[name].append((seconds or 0.0) * 1000)

        for rep in range(-1, options.reps):
            if rep == 0:
                samples.clear()  # the first one warmed up
            with measuring(f"rep {rep}"):
                for count, local in locals_.items():
                    keep(f"compute_{count}", await home.device.run(partial(local.token_s, ids, options.new)))
                for count, some in origins.items():
                    run = await generate(some, ids, options.new)
                    keep(f"token_{count}", token_s(run))
                    keep(f"warm_open_{count}", run.answer.timings.open_s)
                    keep(f"warm_first_{count}", run.ttft_s)
                    run = await cold(home, some)
                    keep(f"cold_open_{count}", run.answer.timings.open_s)
                    keep(f"cold_first_{count}", run.ttft_s)
    return samples


def report(samples: dict[str, list[float]]) -> int:
    rows = range(len(samples["token_1"]))
    more = HOPS - 1
    gross = [(samples[f"token_{HOPS}"][i] - samples["token_1"][i]) / more for i in rows]
    steps = [(samples[f"compute_{HOPS}"][i] - samples["compute_1"][i]) / more for i in rows]
    net = [a - b for a, b in zip(gross, steps, strict=True)]
    path = [samples["token_1"][i] - samples["compute_1"][i] for i in rows]
    out = {f"{name}_ms": spread(values, 3) for name, values in samples.items()}
    begin = [samples["warm_first_1"][i] - samples["token_1"][i] - net[i] for i in rows]
    own = {"hop": net, "hop_with_step": gross, "path": path, "begin": begin}
    out |= {f"{name}_ms": spread(values, 3) for name, values in own.items()}
    holds = {
        "hop": out["hop_ms"]["median"] <= TARGET["hop_ms"],
        "first_byte": out[f"warm_first_{HOPS}_ms"]["median"] <= TARGET["first_byte_ms"],
    }
    return finish("hop", out, TARGET, holds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=0, help="default: 9, or 3 with --quick")
    parser.add_argument("--new", type=int, default=100, help="tokens per stream")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.reps = options.reps or (3 if options.quick else 9)
    return report(run_loop(measure(options, checkpoint("toy"))))


if __name__ == "__main__":
    sys.exit(main())
