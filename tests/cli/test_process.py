"""What a serving process does to its own memory."""

import subprocess
import sys

import pytest

from manyhands.cli.process import GARBAGE, FullRuns, heap_trimmer

# Freed blocks below one that is kept: glibc alone gives none of them back.
HOLES = """
import ctypes
from manyhands.cli.process import heap_trimmer
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
blocks = [libc.malloc(64 << 10) for _ in range(1024)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
kept = libc.malloc(64 << 10)
for block in blocks:
    libc.free(block)
before = resident_mb()
heap_trimmer()(0)
print(before - resident_mb())
"""


@pytest.mark.skipif(heap_trimmer() is None, reason="not glibc")
def test_free_pages_below_what_is_kept_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 50


# A large block is freed, and then what a thread had of the C heap while another used it too: MB that stay resident.
FREED = """
import ctypes, sys, threading
from manyhands.cli.process import heap_trimmer, share_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
if sys.argv[1] == "shared":
    share_heap()
def use(size, number):
    blocks = [libc.malloc(size) for _ in range(number)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in reversed(blocks):
        libc.free(block)
use(24 << 20, 1)
heap_trimmer()(0)
before = resident_mb()
thread = threading.Thread(target=use, args=(8000, 3000))
thread.start()
thread.join()
use(8000, 3000)
heap_trimmer()(0)
print(resident_mb() - before)
"""


@pytest.mark.skipif(heap_trimmer() is None, reason="not glibc")
def test_what_threads_have_freed_is_given_back() -> None:
    def kept_mb(heaps: str) -> float:
        done = subprocess.run([sys.executable, "-c", FREED, heaps], capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert kept_mb("shared") < 4 < 12 < kept_mb("")


# What only the collector frees, in a process that makes no objects.
CYCLE = """
import asyncio, gc, weakref
from manyhands.cli import process
process.TRIM_S = 0.05
class Node: pass
async def main():
    async with process.steady_memory():
        gc.disable()  # it does not come by itself
        node = Node()
        node.itself, left = node, weakref.ref(node)
        del node
        async with asyncio.timeout(60):
            while left() is not None:
                await asyncio.sleep(0.05)
asyncio.run(main())
"""


def test_a_process_at_rest_frees_cycles() -> None:
    subprocess.run([sys.executable, "-c", CYCLE], check=True)


# As many objects as a gateway with thousands of streams has, young and old ones, and none of them garbage.
MANY = """
import asyncio, gc
from manyhands.cli import process
async def main():
    runs = []
    async with process.steady_memory():
        gc.callbacks.append(lambda phase, told: runs.append(told["generation"]))
        held = [[number] for number in range(1_000_000)]
    gc.callbacks.pop()
    assert runs and max(runs) == 1, max(runs, default=None)
    assert gc.get_threshold()[2] < 1000
asyncio.run(main())
"""


def test_no_full_run_begins_by_itself_while_a_process_serves() -> None:
    subprocess.run([sys.executable, "-c", MANY], check=True)


def test_full_runs_are_due_at_rest_after_garbage_and_after_two_minutes() -> None:
    runs = FullRuns(now=0.0, used_s=5.0)

    def look(at: float, used_s: float, freed: int = 0) -> bool:
        if is_due := runs.are_due(at, used_s):
            runs.ran(at, freed)
        return is_due

    assert not look(30.0, 35.0)  # a whole core
    assert look(60.0, 35.1)  # at rest
    seen = [look(60.0 + at, 35.1 + at) for at in range(30, 300, 30)]
    assert seen == [False, False, False, True, False, False, False, True, False]
    assert not look(360.0, 365.0)
    assert look(390.0, 365.1, freed=GARBAGE + 1)
    assert look(420.0, 395.0, freed=GARBAGE) and not look(450.0, 425.0)
