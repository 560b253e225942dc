"""A team of threads takes no more of the CPU than its work does, whatever shares the cores; a span little more than weights."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import reals, stored
from manyhands.engine.layout import Segment
from manyhands.engine.library import Plan, Team

ROOT = Path(__file__).parents[2]
N, K, STEPS = 2048, 1024, 60


def product() -> Plan:
    plan = Plan(library.supported()[0], "bf16", [K, N], 1, "bf16", 8)
    for _ in range(4):
        plan.add(library.PRODUCT, (0, 1, 0, 0), (), (library.pack(stored(reals(1, N, K), "bf16"), "bf16"), None))
    return plan


def cpu_seconds(plan: Plan, team: Team, threads: int) -> float:
    """CPU of the whole process for so many steps of one row."""
    rows = np.ascontiguousarray(stored(reals(2, 1, K), "bf16")).view(np.uint8).reshape(-1)
    segments, start = [Segment(None, 0, 0, 0, 1)], time.process_time()
    for _ in range(STEPS):
        plan.run(team, threads, segments, rows, 1)
    return time.process_time() - start


def test_threads_that_share_cores_do_not_spin() -> None:
    """Twice as many threads as cores beside a busy process: the step costs about the CPU that one thread takes."""
    cores = len(os.sched_getaffinity(0))
    plan, alone, many = product(), Team(1), Team(2 * cores)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        one = min(cpu_seconds(plan, alone, 1) for _ in range(3))
        all_together = min(cpu_seconds(plan, many, 2 * cores) for _ in range(3))
    finally:
        busy.kill()
        busy.wait()
        many.close()
    assert all_together < 3 * one + 0.05


def test_an_idle_team_takes_no_cpu() -> None:
    plan, team = product(), Team(8)
    cpu_seconds(plan, team, 8)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.05
    team.close()


SPAN = """
import numpy as np
from manyhands.core import Span
from manyhands.engine import golden_models as g
from manyhands.engine.cpu import CpuSpan, Piece
from manyhands.engine.library import Team
from manyhands.engine.weights import Stored
from manyhands.program.families import build_program
sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64}
program = build_program({**g.configs()["qwen2"], **sizes, "num_hidden_layers": 4, "max_position_embeddings": 2048})
shapes = g.shapes(program)
read = lambda name: Stored("bf16", np.broadcast_to(np.uint16(0x3C01), shapes[name]))
span = CpuSpan(program, Span(0, 4), read, "bf16", Team(2))
"""
RESIDENT = """
cache = span.new_cache()
weights = sum(int(np.prod(s)) * 2 for n, s in shapes.items() if ".layers." in n)
span.step(np.zeros(512 * 896 * 2, np.uint8), [Piece(cache, 0, 512)], 2)
pages = int(open("/proc/self/statm").read().split()[1]) - int(open("/proc/self/statm").read().split()[2])
print((pages * 4096 - weights - cache.num_bytes) >> 20)
"""


def test_a_span_resides_in_its_weights_and_little_more() -> None:
    """The layers of a 0.5B model after a prompt of 512 rows: beside weights and cache at most 60 MB of memory of its own."""
    assert int(said(SPAN + RESIDENT)) < 60


PARTS = """
from itertools import combinations
def own():
    pages = open("/proc/self/statm").read().split()
    return (int(pages[1]) - int(pages[2])) * 4096
before, caches = 0, []
for start, end in [(0, 4), *combinations(range(5), 2)]:
    caches.append(span.new_cache(256, Span(start, end)))
    span.step(np.zeros(256 * 896 * 2, np.uint8), [Piece(caches[-1], 0, 256)], 1)
    before = before or own()
print((own() - before - sum(cache.num_bytes for cache in caches[1:])) >> 20)
"""


def test_parts_of_a_span_do_not_keep_memory_each() -> None:
    """Each part that a member's sessions chose kept its own for 256 rows, which no lease counts: 34 MB of a model of 7B, of
    which a node of 32 layers has 528 parts."""
    assert int(said(SPAN + PARTS)) < 80  # without a bound 160


FORKED = """
import os, signal
from tests.engine.test_team import product
from manyhands.engine.golden_cases import reals, stored
from manyhands.engine.layout import Segment
from manyhands.engine.library import Team
import numpy as np
plan, team, many = product(), Team(4), Team(3)
rows = np.ascontiguousarray(stored(reals(2, 1, 1024), "bf16")).view(np.uint8).reshape(-1)
run = lambda: plan.run(team, 4, [Segment(None, 0, 0, 0, 1)], rows, 1).tobytes()
before = run()
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    same = run() == before
    team.close()
    del many
    os._exit(0 if same else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), run() == before)
"""


def test_a_forked_process_computes_alone_and_ends_its_teams() -> None:
    """Their threads are not there: to end them waited for ever."""
    assert said(FORKED).split() == ["0", "True"]


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout
