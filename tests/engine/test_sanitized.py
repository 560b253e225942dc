"""The engine under AddressSanitizer and UndefinedBehaviourSanitizer, over random plans, shapes and steps."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import NATIVE, ROOT

SECONDS = 10
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]


def targets() -> dict[str, list[str]]:
    """setup.py's own flags for this machine, without running setup()."""
    import setuptools  # type: ignore[import-untyped]

    kept: Any = setuptools.setup
    setuptools.setup = lambda **_: None
    try:
        found = runpy.run_path(str(ROOT / "setup.py"))
    finally:
        setuptools.setup = kept
    flags: list[str] = found["FLAGS"]
    return {name: [*flags, *own, "-O1", *SANITIZED] for name, own in {"": [], **found["targets"]}.items()}


def build(folder: Path) -> Path:
    objects = []
    for name, flags in targets().items():
        sources = [NATIVE / "kernels.c"] if name else sorted(set(NATIVE.glob("*.c")) - {NATIVE / "kernels.c"})
        for source in sources:
            objects.append(folder / f"{source.stem}{name}.o")
            subprocess.run(["gcc", *flags, "-fPIC", "-c", source, "-o", objects[-1]], check=True)
    library = folder / "_native.so"
    subprocess.run(["gcc", "-shared", *SANITIZED, "-o", library, *objects, "-pthread"], check=True)
    return library


@pytest.mark.slow
def test_nothing_is_read_or_written_out_of_bounds(tmp_path: Path) -> None:
    preloads = (
        [
            subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        if os.access("/usr/bin/gcc", os.X_OK)
        else []
    )
    if not all(map(os.path.isabs, preloads)) or not preloads:
        pytest.skip("NOT RUN: gcc with libasan is not installed, so the engine was not fuzzed under sanitizers")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preloads),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT / "src"),
    }
    command = [sys.executable, "-m", "tests.engine.fuzz", str(build(tmp_path)), "7", str(SECONDS)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split(" plans, ")[1].split()[0]) > 20
