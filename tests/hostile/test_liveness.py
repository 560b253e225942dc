"""F13 and its siblings: a cut is found in 4 s on every lane, one way too; a busy peer is not a dead one."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from manyhands.config import RequestConfig
from manyhands.net.liveness import FOUND_S, PATIENCE_S
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Link
from manyhands.origin.node import FullNode
from manyhands.testing.clock import run_virtual
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import memory_node
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Lane
from tests.kill import Bench, kept_models, request_of
from tests.net.links import ANYWHERE

ROOT = Path(__file__).parents[2]
LANES: tuple[Lane, ...] = ("control", "data", "bulk")


@asynccontextmanager
async def linked_nodes() -> AsyncIterator[tuple[Faults, FullNode, FullNode, dict[Lane, Link]]]:
    """Two nodes with a link of every lane, dialled by the first, and nothing to do."""
    faults, network = Faults(), MemoryNetwork()
    async with memory_node(network, "a", faults.wrap) as a, memory_node(network, "b", faults.wrap) as b:
        addr = await b.listen(ANYWHERE)
        links = {lane: await a.pool.get(addr, lane) for lane in LANES}
        await asyncio.sleep(10)
        yield faults, a, b, links
        for node in (a, b):
            faults.thaw(node)


async def ended_after_s(links: dict[Lane, Link], limit_s: float) -> dict[Lane, float]:
    """When each link ended from now on, those that did within the limit."""
    begin, ended = asyncio.get_running_loop().time(), dict[Lane, float]()
    while asyncio.get_running_loop().time() - begin < limit_s:
        await asyncio.sleep(0.05)
        for lane, link in links.items():
            if link.is_closed:
                ended.setdefault(lane, asyncio.get_running_loop().time() - begin)
    return ended


@pytest.mark.parametrize("direction", ["there", "back", "both"])
@pytest.mark.parametrize("phase_s", [0.0, 0.2, 0.49])
def test_a_cut_is_found_on_every_lane(direction: str, phase_s: float) -> None:
    async def main() -> None:
        async with linked_nodes() as (faults, a, b, links):
            await asyncio.sleep(phase_s)
            if direction != "back":
                faults.cut(a, b)
            if direction != "there":
                faults.cut(b, a)
            ended = await ended_after_s(links, 2 * FOUND_S)
            assert set(ended) == set(LANES) and max(ended.values()) <= FOUND_S + 0.1, ended

    run_virtual(main())


@pytest.mark.parametrize("lane", ["data", "bulk"])
def test_a_cut_of_one_lane_ends_that_link_alone(lane: Lane) -> None:
    """The others answer their probes, as links by way of a relay would: they stay."""

    async def main() -> None:
        async with linked_nodes() as (faults, a, b, links):
            faults.cut(a, b, lane)
            ended = await ended_after_s(links, 20.0)
            assert set(ended) == {lane} and ended[lane] <= FOUND_S + 0.1

    run_virtual(main())


def test_a_frozen_node_is_found_on_every_lane() -> None:
    async def main() -> None:
        async with linked_nodes() as (faults, _, b, links):
            faults.freeze(b)
            ended = await ended_after_s(links, 2 * FOUND_S)
            assert set(ended) == set(LANES) and max(ended.values()) <= FOUND_S + 0.1, ended

    run_virtual(main())


def test_a_node_that_is_held_up_again_and_again_is_kept_while_it_answers_within_ten_seconds() -> None:
    """As beside ten busy processes a core: longer and longer stalls. A freeze for good is found after all."""

    async def main() -> None:
        async with linked_nodes() as (faults, _, b, links):
            for stall_s in (0.3, 0.8, 1.5, 2.5, 4.0, 6.0, 9.0, 5.0, 9.0):
                faults.freeze(b)
                await asyncio.sleep(stall_s)
                faults.thaw(b)
                await asyncio.sleep(1.5)
                assert not any(link.is_closed for link in links.values()), stall_s
            faults.freeze(b)
            assert set(await ended_after_s(links, PATIENCE_S + 2)) == set(LANES)

    run_virtual(main())


@pytest.mark.parametrize(("wanted", "is_given_up"), [(False, False), (True, True)])
def test_a_member_that_nothing_waits_for_may_be_silent_for_ten_seconds(wanted: bool, is_given_up: bool) -> None:
    """It loads its layers beside busy processes: it answered quickly until now, so nothing tells how late it will be."""

    async def main() -> None:
        faults, network = Faults(), MemoryNetwork()
        async with memory_node(network, "a", faults.wrap) as a, memory_node(network, "b", faults.wrap) as b:
            addr = await b.listen(ANYWHERE)
            control = await a.pool.get(addr, "control")
            await asyncio.sleep(10)
            faults.freeze(b)
            dial = asyncio.ensure_future(a.pool.get(addr, "data") if wanted else asyncio.sleep(0))
            ended = await ended_after_s({"control": control}, PATIENCE_S - 1)
            assert bool(ended) == is_given_up and all(after_s <= FOUND_S + 0.1 for after_s in ended.values())
            faults.thaw(b)
            await asyncio.gather(dial, return_exceptions=True)
            await asyncio.sleep(2)
            assert control.is_closed == is_given_up

    run_virtual(main())


def test_a_member_that_nothing_waits_for_is_given_up_in_the_end() -> None:
    async def main() -> None:
        faults, network = Faults(), MemoryNetwork()
        async with memory_node(network, "a", faults.wrap) as a, memory_node(network, "b", faults.wrap) as b:
            control = await a.pool.get(await b.listen(ANYWHERE), "control")
            faults.freeze(b)
            assert await ended_after_s({"control": control}, PATIENCE_S + 2)
            faults.thaw(b)

    run_virtual(main())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("live") / "qwen3", seed=21), models)


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 2)])
def test_a_cut_between_hops_pauses_slow_machines_for_five_seconds_at_most(
    bench: Bench, sender: int, receiver: int
) -> None:
    """Steps are overdue after 15 s only: the neighbours find the cut and name it to the origin."""

    async def main() -> None:
        request = RequestConfig(prefill_chunk=16, step_floor_s=15.0)
        async with bench.scene(spares=["0-5", "0-5"], request=request) as scene:
            a, b = scene.hops[sender], scene.hops[receiver]
            for node in scene.hops[:3]:
                scene.faults.slow(node, 0.5)
            cut_at: list[float] = []

            def cut() -> None:
                scene.faults.cut(a, b)
                cut_at.append(asyncio.get_running_loop().time())

            scene.faults.at("decode", scene.hops[2], cut, 6)
            origin = scene.swarm.origin
            answer = origin.answer(origin.request_ids(*request_of("hot", 0)))
            scene.answers.append(answer)
            pauses, last = [], None
            async for _ in origin.stream(answer):
                now = asyncio.get_running_loop().time()
                if cut_at and last is not None:
                    pauses.append(now - last)
                last = now
            assert answer.token_ids == bench.wanted["hot", 0]
            assert len(answer.repairs) == 1 and max(pauses) <= 5.0 + 3 * 0.5, pauses
            scene.faults.freeze(a)
            scene.faults.freeze(b)

    bench.play(main)


def test_a_hop_that_is_starved_again_and_again_is_not_repaired(bench: Bench) -> None:
    """A busy machine: each stall longer than a step may take, each answer within 10 s. No repair, the same text."""

    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"]) as scene:
            node = scene.hops[1]

            async def starve() -> None:
                for stall_s in (0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 9.0, 2.0, 9.0):
                    scene.faults.freeze(node)
                    await asyncio.sleep(stall_s)
                    scene.faults.thaw(node)
                    await asyncio.sleep(1.0)

            for each in scene.hops[:3]:
                scene.faults.slow(each, 0.4)
            starving: list[asyncio.Task[None]] = []
            scene.faults.at("decode", node, lambda: starving.append(asyncio.create_task(starve())), 2)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert starving and not scene.answers[0].repairs
            await starving[0]

    bench.play(main)


def test_a_starved_hop_keeps_its_place_while_another_is_replaced(bench: Bench) -> None:
    """It answers Open after 8 s, more than reopen_timeout_s: the deadline stretches with what was measured before."""

    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"]) as scene:
            starved, dying = scene.hops[1:3]

            async def starve() -> None:
                for stall_s in (1.0, 8.0):
                    scene.faults.freeze(starved)
                    if stall_s > 1.0:
                        scene.faults.die(dying)
                    await asyncio.sleep(stall_s)
                    scene.faults.thaw(starved)
                    await asyncio.sleep(1.0)

            for each in scene.hops[:3]:
                scene.faults.slow(each, 0.4)
            starving: list[asyncio.Task[None]] = []
            scene.faults.at("decode", starved, lambda: starving.append(asyncio.create_task(starve())), 2)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert [repair.lost for repair in scene.answers[0].repairs] == [(dying.name,)]
            await starving[0]

    bench.play(main)


def test_where_every_node_is_slow_repairs_do_not_follow_each_other(bench: Bench) -> None:
    """Every node takes 1.2 s a step all of a sudden, so that every step is overdue; there are six spares to try."""

    async def main() -> None:
        async with bench.scene(spares=["0-5"] * 6) as scene:

            def slow() -> None:
                for node in scene.hops:
                    scene.faults.slow(node, 1.2)

            scene.faults.at("decode", scene.hops[1], slow, 5)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert len(scene.answers[0].repairs) <= 3

    bench.play(main)


# -- a real line ------------------------------------------------------------------------------------------------------


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def two_places(number: int) -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable, 10.77.0.1 and .2. Skips, saying why, where the machine does not allow it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a real cut needs root and ip (iproute2)")
    one, two = (f"mhcut{os.getpid()}{number}{end}" for end in "ab")
    try:
        try:
            sh("ip", "netns", "add", one)
            sh("ip", "netns", "add", two)
            sh("ip", "link", "add", "mh0", "netns", one, "type", "veth", "peer", "name", "mh0", "netns", two)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for place, address in ((one, "10.77.0.1/24"), (two, "10.77.0.2/24")):
            sh("ip", "-n", place, "addr", "add", address, "dev", "mh0")
            sh("ip", "-n", place, "link", "set", "mh0", "up")
        yield one, two
    finally:
        for place in (one, two):
            subprocess.run(["ip", "netns", "del", place], check=False, capture_output=True)


def start(place: str, *words: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", place, sys.executable, "-m", "tests.hostile.cut_node", *words]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def test_a_real_one_way_cut_ends_both_links_at_both_ends() -> None:
    """Frames of one direction, there or back, go to a hardware address that no machine has: no error, no acknowledgement, no
    reset. Both cuts at once, each on a line of its own: it takes the seconds that silence is borne."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cut_one_way, (0, 1)))


def cut_one_way(cut_at: int) -> None:
    with two_places(cut_at) as places, contextlib.ExitStack() as stack:
        listener = stack.enter_context(start(places[1], "listen", "10.77.0.2"))
        stack.callback(listener.kill)
        assert listener.stdout is not None
        port = listener.stdout.readline().strip()
        dialler = stack.enter_context(start(places[0], "dial", "10.77.0.2", port))
        stack.callback(dialler.kill)
        assert dialler.stdout is not None
        assert dialler.stdout.readline() == listener.stdout.readline() == "open\n"
        time.sleep(1.0)
        target = ("10.77.0.2", "10.77.0.1")[cut_at]
        nowhere = ("lladdr", "02:00:00:00:00:99", "dev", "mh0", "nud", "permanent")
        sh("ip", "-n", places[cut_at], "neigh", "replace", target, *nowhere)
        began = time.monotonic()
        for end in (dialler, listener):
            assert end.stdout is not None
            ended = [end.stdout.readline().split(maxsplit=3) for _ in range(2)]
            assert {lane for _, lane, *_ in ended} == {"control", "data"}
            took = [float(at) - began for _, _, at, _ in ended]
            assert max(took) < 3 * PATIENCE_S, ended  # 4 s where nothing else runs
