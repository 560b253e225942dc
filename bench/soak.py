"""Do streams survive for ten minutes while nodes are killed all the time, and is anything left behind?

    python -m bench.soak [--kills 200] [--minutes 10] [--streams 4] [--within 0.02] [--shape tales]

Six node processes, every third of the layers on two of them, and an origin with four streams at any time, greedy and hot.
At random moments a random node is killed with kill -9 (never both of a third at once: no set of nodes would cover the
model) and started again at its address. Every text is compared with the undisturbed one. File descriptors of all processes,
and memory of the nodes, are compared between the end of a calm warm-up and a calm end; memory of the origin, the one process
that lives through all kills, between half of them (by then allocators hold what they need) and the end. Nodes are compared
as a sum: a node's process at the end is another one than at the start, and six alike differ by 2 to 3 % at one moment.
Holds if every stream completes with the same text, file descriptors return, and so does memory, within `--within`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import finish, note, spread
from bench.shapes import checkpoint
from bench.swarm import Base, base, prompt_ids
from manyhands.checkpoint.config_fields import read_facts
from manyhands.config import RequestConfig
from manyhands.core import NodeAddr, SamplingParams, Span, even_cut
from manyhands.errors import ManyhandsError
from manyhands.member.process import start_ticks
from manyhands.origin import Origin

THIRDS, COPIES = 3, 2
LONG = 30  # minutes: shorter runs are stored beside long ones, not in their place
START_S = 60.0
NEW = 96


@dataclass(slots=True)
class Member:
    """A node process that comes back at its address. `pid` is 0 while it is down."""

    name: str
    third: int
    span: Span
    port: int = 0
    pid: int = 0
    node: str = ""

    @property
    def address(self) -> NodeAddr:
        return NodeAddr.parse(f"127.0.0.1:{self.port}")


@dataclass(slots=True)
class Tally:
    """What happened to the streams."""

    same: int = 0
    changed: int = 0
    failed: list[str] = field(default_factory=list)
    repairs: int = 0
    pauses_s: list[float] = field(
        default_factory=list
    )  # the longest wait for a token of every stream that was repaired


class Nursery:
    """Starts members through bench.nursery."""

    def __init__(self, process: asyncio.subprocess.Process, home: Base, folder: Path) -> None:
        self._process, self._home, self._folder = process, home, folder
        self._lock = asyncio.Lock()

    async def start(self, member: Member, killed: int = 0) -> None:
        """Start `member`, once process `killed`, which had its name, is gone; wait until it serves."""
        output = self._folder / f"{member.name}.out"
        arguments = ["serve", str(self._home.folder), "--layers", str(member.span), "--name", member.name]
        arguments += ["--listen", f"127.0.0.1:{member.port}", "--key", str(self._folder / f"{member.name}.key")]
        arguments += ["--threads", "1", "--json"]
        environment = {"MANYHANDS_TICKET": self._home.ticket.encode()}
        request = {"arguments": arguments, "environment": environment, "output": str(output)}
        for _ in range(round(START_S / 0.01)):
            if not killed or start_ticks(killed) is None:
                break
            await asyncio.sleep(0.01)
        async with self._lock:
            output.unlink(missing_ok=True)
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            pid = int(await self._process.stdout.readline())
        async with asyncio.timeout(START_S):
            while '"serving"' not in (said := output.read_text() if output.exists() else ""):
                if '"error"' in said:
                    raise SystemExit(f"{member.name} did not start: {said}")
                await asyncio.sleep(0.05)
        event = next(json.loads(line) for line in said.splitlines() if '"serving"' in line)
        member.port, member.node, member.pid = int(event["address"].rsplit(":", 1)[1]), event["node"], pid


@asynccontextmanager
async def nursery(home: Base) -> AsyncIterator[Nursery]:
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.nursery", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            yield Nursery(process, home, Path(folder))
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Seven requests of different lengths and temperatures. The last is longer than all that a repair sends again, so that hops
    have had room for as many rows before any kill."""
    return [
        (prompt_ids(length, i), SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.8 * (i % 2), seed=i))
        for i, length in enumerate((16, 28, 40, 52, 64, 76, 640))
    ]


async def stream(origin: Origin, ids: list[int], params: SamplingParams, tally: Tally, wanted: list[int]) -> None:
    answer = origin.answer(origin.request_ids(ids, params))
    last, pause_s = time.perf_counter(), 0.0
    try:
        async for _ in origin.stream(answer):
            now = time.perf_counter()
            if len(answer.token_ids) > 1:
                pause_s = max(pause_s, now - last)
            last = now
    except ManyhandsError as error:
        tally.failed.append(f"{type(error).__name__}: {error}")
        return
    tally.repairs += len(answer.repairs)
    if answer.repairs:
        tally.pauses_s.append(pause_s)
    if answer.token_ids == wanted:
        tally.same += 1
    else:
        tally.changed += 1


def usage(pid: int) -> tuple[float, int]:
    """(resident MB to a tenth, open file descriptors) of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1), len(os.listdir(f"/proc/{pid}/fd"))


async def measure(args: argparse.Namespace) -> dict[str, object]:
    folder = checkpoint(args.shape)
    spans = even_cut(read_facts(folder).num_layers, THIRDS)
    rng = random.Random(args.seed)
    tally, calm = Tally(), Tally()
    async with base(folder, 1, RequestConfig(standby=args.standby)) as home, nursery(home) as ward:
        members = [Member(f"{'ab'[c]}{t}", t, spans[t]) for c in range(COPIES) for t in range(THIRDS)]
        for member in members:
            await ward.start(member)
        origin = Origin(home.node, home.model, home.device, [m.address for m in members])
        asked = requests()
        wanted = []
        for ids, params in asked:
            wanted.append((await origin.complete(origin.request_ids(ids, params))).token_ids)
        stop = asyncio.Event()

        async def keep_asking(number: int, tally: Tally) -> None:
            turn = number
            while not stop.is_set():
                ids, params = asked[turn % len(asked)]
                await stream(origin, ids, params, tally, wanted[turn % len(asked)])
                turn += 1

        async def calm_down(seconds: float) -> dict[str, tuple[float, int]]:
            """Streams without kills for a while, then none; what every process uses then."""
            stop.clear()
            async with asyncio.TaskGroup() as group:
                for number in range(args.streams):
                    group.create_task(keep_asking(number, calm))
                await asyncio.sleep(seconds)
                stop.set()
            await asyncio.sleep(1)
            return {"origin": usage(os.getpid()), **{m.name: usage(m.pid) for m in members}}

        before = await calm_down(args.calm)
        note(f"before: {before}")
        kills, halfway_mb = 0, before["origin"][0]
        stop.clear()
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(args.streams):
                group.create_task(keep_asking(number, tally))
            while kills < args.kills and time.monotonic() - began < args.minutes * 60:
                due = began + (kills + rng.random()) * args.minutes * 60 / args.kills
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                up = [m for m in members if m.pid and all(t.pid for t in members if t.third == m.third)]
                if not up:
                    await asyncio.sleep(0.05)
                    continue
                victim = rng.choice(up)
                killed, victim.pid = victim.pid, 0
                with contextlib.suppress(ProcessLookupError):
                    os.kill(killed, signal.SIGKILL)
                kills += 1
                group.create_task(ward.start(victim, killed))
                if kills == max(1, args.kills // 2):
                    halfway_mb = usage(os.getpid())[0]
                if kills % 20 == 0:
                    note(f"{kills} kills, {tally.same} same, {tally.changed} changed, {len(tally.failed)} failed")
            stop.set()
        seconds = time.monotonic() - began
        after = await calm_down(args.calm)
        note(f"after: {after}")
    return {
        "kills": kills,
        "seconds": round(seconds),
        "streams_at_once": args.streams,
        "completed_same": tally.same,
        "completed_changed": tally.changed,
        "failed": tally.failed[:5],
        "num_failed": len(tally.failed),
        "repairs": tally.repairs,
        "longest_pause_s": spread(tally.pauses_s or [0.0], 3),
        "origin_halfway_mb": halfway_mb,
        "before_mb_fds": before,
        "after_mb_fds": after,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="tales")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--calm", type=float, default=20.0, help="seconds of undisturbed streams before and after")
    parser.add_argument("--within", type=float, default=0.02, help="share by which memory may have grown")
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    figures = asyncio.run(measure(args))
    before, after, halfway_mb = figures["before_mb_fds"], figures["after_mb_fds"], figures["origin_halfway_mb"]
    assert isinstance(before, dict) and isinstance(after, dict) and isinstance(halfway_mb, float)
    nodes_mb = [sum(mb for name, (mb, _) in look.items() if name != "origin") for look in (before, after)]
    figures["nodes_mb"] = [round(mb, 1) for mb in nodes_mb]
    holds = {
        "all_complete": not figures["num_failed"] and not figures["completed_changed"],
        "all_kills": figures["kills"] == args.kills,
        "fds_return": all(after[name][1] <= before[name][1] + 4 for name in before),
        "memory_returns": after["origin"][0] <= (1 + args.within) * halfway_mb
        and nodes_mb[1] <= (1 + args.within) * nodes_mb[0],
    }
    name = "soak" if args.minutes >= LONG else "soak-short"
    return finish(name, figures, {"failed": 0, "changed": 0, "kills": args.kills, "within": args.within}, holds)


if __name__ == "__main__":
    sys.exit(main())
