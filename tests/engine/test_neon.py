"""The golden digests on ARM, also of what is built for macOS: cross-built with ziglang, run under qemu-user (apt install
qemu-user, pip install ziglang).

MANYHANDS_TEST_QEMU and MANYHANDS_TEST_ZIG name the two programs where they are not in PATH.
"""

import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from os import environ
from pathlib import Path

import pytest

from manyhands.engine import golden, golden_models, library
from manyhands.engine.cache import SessionCache
from manyhands.engine.library import Team
from tests.engine.conftest import NATIVE
from tests.engine.remote import SOURCE, Remote
from tests.nightly import daily
from tools import fuzz_kernels, wheel

WITHOUT_DOT = "cortex-a72"  # has no dot product of bytes, which sums of small weights take where there is one
MODELS = ("gpt_oss", "llama", "gemma2", "deepseek_v3", "qwen3_next")  # emulated: all families would take minutes
PLANS = 25
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


TARGET = ["cc", "-target", "aarch64-linux-musl", *FLAGS]


def build(compiler: list[str], folder: Path) -> Path:
    command = [*compiler, *TARGET]
    objects = []
    for name, flags in {"scalar": [], "neon": ["-DLANES_NEON"]}.items():
        objects.append(str(folder / f"{name}.o"))
        source = str(NATIVE / "kernels.c")
        subprocess.run([*command, *flags, f"-DTARGET={name}", "-c", source, "-o", objects[-1]], check=True)
    rest = [str(source) for source in sorted(NATIVE.glob("*.c")) if source.name != "kernels.c"]
    subprocess.run([*command, *rest, str(SOURCE), *objects, "-o", str(folder / "remote")], check=True)
    return folder / "remote"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What starts the engine on ARM, without the emulator's options."""
    compiler, qemu = programs()
    return [qemu, str(build(compiler, tmp_path_factory.mktemp("neon")))]


@pytest.fixture(scope="module")
def of_macos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same with the kernels of a wheel for macOS, which a loader of ours takes (macho.c)."""
    (compiler, qemu), folder = programs(), tmp_path_factory.mktemp("macos")
    with zipfile.ZipFile(wheel.build("arm64", folder)) as content:
        kernels = content.extract(wheel.KERNELS, folder)
    subprocess.run([*compiler, *TARGET, str(SOURCE.with_name("macho.c")), "-o", str(folder / "remote")], check=True)
    return [qemu, str(folder / "remote"), kernels]


@contextmanager
def on_arm(command: list[str], *options: str) -> Iterator[None]:
    """The engine computes there."""
    remote = Remote([command[0], *options, *command[1:]])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "load", lambda: remote)
            patch.setattr(library, "address", remote.address)
            patch.setattr(library, "_fresh", remote.address)
            patch.setattr(library, "tensor", remote.tensor)
            patch.setattr(SessionCache, "_address", remote.cache_address, raising=False)
            assert library.supported() == ["neon", "scalar"]
            yield
    finally:
        remote.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "models"), daily([("neon", MODELS[:1])], [("neon", MODELS[1:]), ("scalar", ())]))
def test_neon_reproduces_the_digests(name: str, models: tuple[str, ...], command: list[str]) -> None:
    """Of every operation, and of some whole models."""
    with on_arm(command):
        found = golden.digests(name)
        if models:
            found.update(golden_models.digests(golden_models.OfCpu(name), models))
        calls = library.calls(name)
    found["tininess aarch64"] = found.pop(f"tininess {platform.machine()}")
    assert calls > 0
    assert {case: golden.recorded().get(case) for case in found} == found


@pytest.mark.nightly
def test_what_is_built_for_macos_reproduces_the_digests(of_macos: list[str]) -> None:
    """The machine code of the wheel. No Mac has run it."""
    test_neon_reproduces_the_digests("neon", MODELS[:1], of_macos)


@pytest.mark.nightly
def test_random_plans_have_the_bits_of_plain_c_in_what_is_built_for_macos(of_macos: list[str]) -> None:
    test_random_plans_have_the_bits_of_plain_c("max", of_macos)


@pytest.mark.slow
def test_neon_without_a_dot_product_reproduces_the_digests_of_small_weights(command: list[str]) -> None:
    with on_arm(command, "-cpu", WITHOUT_DOT):
        found = golden.digests("neon", golden.GROUPS["small"])
    assert {case: golden.recorded().get(case) for case in found} == found


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", ["max", WITHOUT_DOT])
def test_random_plans_have_the_bits_of_plain_c(cpu: str, command: list[str]) -> None:
    """Ragged edges, refusals, forks: those of tools/fuzz_kernels.py, without sanitizers."""
    with on_arm(command, "-cpu", cpu):
        team = Team(3)
        fitting = sum(fuzz_kernels.case(seed, team) for seed in range(PLANS))
        team.close()
    assert fitting > PLANS // 2
