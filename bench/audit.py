"""What does it cost an answer that hops keep hashes of its rows, and how long does an audit take, against its prompt?

Arms, interleaved, over the same three node processes and a spare (TLS on loopback, a compute thread each): no audits; hashes
that are never asked for; every answer audited, by the spare. Each answer has PROMPT tokens of prompt and NEW more.
Holds if with hashes the first token and the tokens after it come at 0.98x of the speed without (medians of the ratios rep by
rep), and an audit takes at most 3x as long as the first token: the one spare computes prompt and answer again, of all hops.
Run: python -m bench.audit [--shape 0.5b|tales] [--reps N]
"""

import argparse
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import finish, measuring, note, paired, spread
from bench.shapes import checkpoint
from bench.swarm import base, prompt_ids
from manyhands.checkpoint.config_fields import read_facts
from manyhands.cli.options import run as run_loop
from manyhands.config import RequestConfig
from manyhands.core import SamplingParams, Span, even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.origin import Origin
from manyhands.swarm.ticket import Ticket

TARGET = {"first_token_x": 0.98, "decode_x": 0.98, "audit_x": 3.0}
SHARES = {"none": 0.0, "hashes": 1e-9, "audits": 1.0}
NODES, PROMPT, NEW = 3, 512, 64


@dataclass(slots=True)
class Samples:
    """Of one arm: seconds to the first token, tokens/s after it, seconds from the last token to the end."""

    first_s: list[float] = field(default_factory=list)
    decode_tps: list[float] = field(default_factory=list)
    audit_s: list[float] = field(default_factory=list)


async def one(origin: Origin, salt: int, samples: Samples, outcome: str | None) -> None:
    answer = origin.answer(
        origin.request_ids(prompt_ids(PROMPT, salt), SamplingParams(max_tokens=NEW, ignore_eos=True))
    )
    began, at = time.perf_counter(), list[float]()
    async for _ in origin.stream(answer):
        at.append(time.perf_counter())
    ended = time.perf_counter()
    found = None if answer.audit is None else answer.audit.outcome
    if found != outcome:
        raise SystemExit(f"the audit found {answer.audit}, not {outcome}")
    samples.first_s.append(at[0] - began)
    samples.decode_tps.append((len(at) - 1) / (at[-1] - at[0]))
    samples.audit_s.append(ended - at[-1])


async def measure(folder: Path, reps: int) -> dict[str, Samples]:
    arms = {name: Samples() for name in SHARES}
    num_layers = read_facts(folder).num_layers
    spans = [*even_cut(num_layers, NODES), Span(0, num_layers)]
    ticket = Ticket.new("bench")
    async with AsyncExitStack() as stack:
        options = NodeOptions(str(folder), "bf16", threads=1, num_spares=1)
        nodes = await stack.enter_async_context(node_processes(spans, options, ticket))
        origins = {}
        for name, share in SHARES.items():
            request = RequestConfig(draft="off", reuse=False, audit=share)
            home = await stack.enter_async_context(base(folder, 1, request, ticket))
            origins[name] = Origin(home.node, home.model, home.device, [node.address for node in nodes])
        note("the nodes are ready")
        for rep in range(-1, reps):  # the first warms up
            for name, origin in origins.items():
                with measuring(name):
                    wanted = "passed" if name == "audits" else None
                    await one(origin, rep, arms[name] if rep >= 0 else Samples(), wanted)
    return arms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["0.5b", "tales"], default="0.5b")
    parser.add_argument("--reps", type=int, default=15)
    options = parser.parse_args()
    arms = run_loop(measure(checkpoint(options.shape), options.reps))
    none, hashes, audits = arms["none"], arms["hashes"], arms["audits"]
    figures: dict[str, Any] = {
        "first_token_x": paired(none.first_s, hashes.first_s),
        "decode_x": paired(hashes.decode_tps, none.decode_tps),
        "audit_x": paired(audits.audit_s, audits.first_s),
        "first_token_s": spread(none.first_s, 4),
        "audit_s": spread(audits.audit_s, 4),
        "positions": PROMPT + NEW,
    }
    holds = {
        "first_token_x": figures["first_token_x"]["median"] >= TARGET["first_token_x"],
        "decode_x": figures["decode_x"]["median"] >= TARGET["decode_x"],
        "audit_x": figures["audit_x"]["median"] <= TARGET["audit_x"],
    }
    return finish("audit", figures, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
