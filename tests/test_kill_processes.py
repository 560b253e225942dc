"""The kill matrix with real processes: kill -9 to any hop, while the prompt or the answer is computed, in a ring and in a star.

Twelve cells over TLS on loopback; the text is the undisturbed one, and one repair did it. In virtual time there are many
more: tests/test_kill_matrix.py.
"""

import asyncio
import itertools
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, Literal

import pytest

from bench.swarm import Base, base
from manyhands.core import PathKind, SamplingParams, Span, even_cut
from manyhands.local import NodeOptions, NodeProcess, node_processes
from manyhands.origin import Answer, Origin
from manyhands.testing.tiny import make_tiny

pytestmark = pytest.mark.nightly
Phase = Literal["prefill", "decode"]
LAYERS, HOPS, NEW, AT_TOKEN = 6, 3, 24, 8
PROMPT: Final = tuple((7 * i) % 251 for i in range(900))
PATHS: Final[tuple[PathKind, ...]] = ("ring", "star")
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")
HANG_S = 60.0  # of one cell


async def start(stack: AsyncExitStack, home: Base, span: Span, *, is_spare: bool = False) -> NodeProcess:
    options = NodeOptions(str(home.folder), threads=1, num_spares=int(is_spare))
    return (await stack.enter_async_context(node_processes([span], options, home.ticket)))[0]


async def asked(origin: Origin, path: PathKind, victim: NodeProcess | None = None, phase: Phase = "decode") -> Answer:
    """One request; `victim` dies once a part of the prompt has been computed, or after AT_TOKEN tokens."""
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=4)
    answer = origin.answer(origin.request_ids(PROMPT, params))

    async def kill_in_prefill() -> None:
        while answer.session is None or not answer.session.returns.reached:  # noqa: ASYNC110 - a session has no event for it
            await asyncio.sleep(0)
        assert victim is not None and not answer.token_ids
        victim.process.send_signal(signal.SIGKILL)

    killing = asyncio.ensure_future(kill_in_prefill()) if victim is not None and phase == "prefill" else None
    async with asyncio.timeout(HANG_S):
        async for _ in origin.stream(answer, path=path):
            if victim is not None and phase == "decode" and len(answer.token_ids) == AT_TOKEN:
                victim.process.send_signal(signal.SIGKILL)
        if killing is not None:
            await killing
    return answer


def test_every_cell(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "tiny", layers=LAYERS, seed=5)
    spans = even_cut(LAYERS, HOPS)

    async def main() -> list[str]:
        wrong: list[str] = []
        async with base(folder, 1) as home, AsyncExitStack() as stack:
            spare = await start(stack, home, Span(0, LAYERS), is_spare=True)
            nodes = [await start(stack, home, span) for span in spans]
            for phase, path, hop in itertools.product(PHASES, PATHS, range(HOPS)):
                addrs = [node.address for node in (*nodes, spare)]
                origin = Origin(home.node, home.model, home.device, addrs)
                wanted = (await asked(origin, path)).token_ids
                answer = await asked(origin, path, nodes[hop], phase)
                if (answer.token_ids, len(answer.repairs)) != (wanted, 1):
                    wrong.append(f"{phase} {path} hop {hop}: {answer.repairs} {answer.token_ids == wanted}")
                nodes[hop] = await start(stack, home, spans[hop])
        return wrong

    assert asyncio.run(main()) == []
