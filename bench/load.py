"""How long until a model in a GGUF file can compute, from page cache? With SHA instructions, and without them.

A process of its own maps, proves and packs all layers and the ends of the 1.1B shape at Q4_0 (0.68 GB; llama-cpp-python writes
it once), as a node does whose manifest is remembered. Seconds are of the clock and of the CPU, a GB of the file. Holds if the
median by the clock with SHA instructions is at most 3 s a GB: on a machine that has nothing else to do. `memory` is what the
system takes to give as much fresh memory, on one thread: on a virtual machine whose host gives pages as they are first
written that is the larger part of loading. A pause before each process lets the host take back what the last one had.
Run: python -m bench.load [--reps N]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench.gguf import quantised, served
from bench.report import finish, measuring, spread
from bench.shapes import checkpoint
from manyhands.checkpoint.manifest import build_manifest
from manyhands.core import Span
from manyhands.engine.memory import Memory
from manyhands.worker.runner import describe, load_ends, load_span

TARGET = {"s_per_gb": 3.0}
NO_SHA = {"OPENSSL_ia32cap": ":~0x20000000"}
PAGE, PAUSE_S = 4096, 5.0


def load(folder: Path) -> dict[str, float]:
    """Seconds of the clock and of the CPU until layers and ends can compute."""
    manifest = build_manifest(folder)
    facts = describe(folder, "w4")  # proves the engine, which a node does once
    cores = os.cpu_count() or 1
    began, spent = time.perf_counter(), time.process_time()
    span = load_span(folder, Span(0, facts.num_layers), "w4", cores, manifest)
    ends = load_ends(folder, "w4", cores, manifest)
    figures = {"clock_s": time.perf_counter() - began, "cpu_s": time.process_time() - spent}
    assert span.num_layers and ends.vocab_size
    return figures


def touch(size: int) -> dict[str, float]:
    """Seconds of the clock and of the CPU until `size` bytes of fresh memory for weights have been written to, once a page."""
    began, spent = time.perf_counter(), time.process_time()
    Memory().array(size, np.uint8)[::PAGE] = 1
    return {"clock_s": time.perf_counter() - began, "cpu_s": time.process_time() - spent}


def apart(arguments: list[str], environment: dict[str, str]) -> dict[str, float]:
    """What a process of its own measures, after a pause."""
    time.sleep(PAUSE_S)
    command = [sys.executable, "-m", "bench.load", *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    given = argparse.ArgumentParser()
    given.add_argument("--reps", type=int, default=5)
    given.add_argument("--folder", type=Path)
    given.add_argument("--touch", type=int)
    options = given.parse_args()
    if options.folder or options.touch:
        print(json.dumps(load(options.folder) if options.folder else touch(options.touch)))
        return 0
    file = quantised(checkpoint("1.1b"), "q4_0")
    folder, size_gb = served(file), file.stat().st_size / 1e9
    build_manifest(folder)
    loads, touches = ["--folder", str(folder)], ["--touch", str(file.stat().st_size)]
    arms: dict[str, tuple[list[str], dict[str, str]]] = {
        "sha": (loads, {}),
        "no_sha": (loads, NO_SHA),
        "memory": (touches, {}),
    }
    samples: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(options.reps):
        for arm, (arguments, environment) in arms.items():
            with measuring(arm):
                samples[arm].append(apart(arguments, environment))
    out = {
        arm: {key: spread([each[key] / size_gb for each in runs]) for key in ("clock_s", "cpu_s")}
        for arm, runs in samples.items()
    }
    holds = {"clock": out["sha"]["clock_s"]["median"] <= TARGET["s_per_gb"]}
    return finish("load", {"file_gb": round(size_gb, 3), **out}, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
