"""The golden digests on ARM: cross-built with ziglang, run under qemu-user (apt install qemu-user, pip install ziglang).

MANYHANDS_TEST_QEMU and MANYHANDS_TEST_ZIG name the two programs where they are not in PATH.
"""

import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from os import environ
from pathlib import Path

import pytest

from manyhands.engine import golden, golden_models, library
from manyhands.engine.cache import SessionCache
from tests.engine.conftest import NATIVE
from tests.engine.remote import SOURCE, Remote
from tests.nightly import daily

MODELS = ("gpt_oss", "llama", "gemma2", "deepseek_v3", "qwen3_next")  # emulated: all families would take minutes
FLAGS = [
    "-O2",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
    "-static",
    "-Wno-deprecated-non-prototype",
]


def programs() -> tuple[list[str], str]:
    """The cross compiler and the emulator; skips, loudly, where there are none."""
    zig = environ.get("MANYHANDS_TEST_ZIG") or shutil.which("zig")
    compiler = [zig] if zig else [sys.executable, "-m", "ziglang"] if find_spec("ziglang") else []
    qemu = environ.get("MANYHANDS_TEST_QEMU") or shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not compiler or not qemu:
        pytest.skip("NOT RUN: NEON is unproven here: pip install ziglang and apt install qemu-user")
    return compiler, qemu


def build(compiler: list[str], folder: Path) -> Path:
    command = [*compiler, "cc", "-target", "aarch64-linux-musl", *FLAGS]
    objects = []
    for name, flags in {"scalar": [], "neon": ["-DLANES_NEON"]}.items():
        objects.append(str(folder / f"{name}.o"))
        source = str(NATIVE / "kernels.c")
        subprocess.run([*command, *flags, f"-DTARGET={name}", "-c", source, "-o", objects[-1]], check=True)
    rest = [str(source) for source in sorted(NATIVE.glob("*.c")) if source.name != "kernels.c"]
    subprocess.run([*command, *rest, str(SOURCE), *objects, "-o", str(folder / "remote")], check=True)
    return folder / "remote"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "models"), daily([("neon", MODELS[:1])], [("neon", MODELS[1:]), ("scalar", ())]))
def test_neon_reproduces_the_digests(
    name: str, models: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every operation, and of some whole models."""
    compiler, qemu = programs()
    remote = Remote([qemu, str(build(compiler, tmp_path))])
    try:
        monkeypatch.setattr(library, "load", lambda: remote)
        monkeypatch.setattr(library, "address", remote.address)
        monkeypatch.setattr(library, "_fresh", remote.address)
        monkeypatch.setattr(library, "tensor", remote.tensor)
        monkeypatch.setattr(SessionCache, "_address", remote.cache_address, raising=False)
        assert library.supported() == ["neon", "scalar"]
        found = golden.digests(name)
        if models:
            found.update(golden_models.digests(golden_models.OfCpu(name), models))
        calls = library.calls(name)
    finally:
        remote.close()
        monkeypatch.undo()
    found["tininess aarch64"] = found.pop(f"tininess {platform.machine()}")
    assert calls > 0
    assert {case: golden.recorded().get(case) for case in found} == found
