"""A team of threads takes no more of the CPU than its work does, whatever shares the cores; a span little more than weights."""

import os
import subprocess
import sys
import time

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import reals, stored
from manyhands.engine.layout import Segment
from manyhands.engine.library import Plan, Team

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


RESIDENT = """
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
cache = span.new_cache()
weights = sum(int(np.prod(s)) * 2 for n, s in shapes.items() if ".layers." in n)
span.step(np.zeros(512 * 896 * 2, np.uint8), [Piece(cache, 0, 512)], 2)
pages = int(open("/proc/self/statm").read().split()[1]) - int(open("/proc/self/statm").read().split()[2])
print((pages * 4096 - weights - cache.num_bytes) >> 20)
"""


def test_a_span_resides_in_its_weights_and_little_more() -> None:
    """The layers of a 0.5B model after a prompt of 512 rows: beside weights and cache at most 60 MB of memory of its own."""
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60
