"""Wheels: for all machines they are built here, for any Python 3.11 or newer, and what is in them runs."""

import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from manyhands.engine import library
from tools.wheel import KERNELS, MACHINES, build, check

PYTHONS = [path for name in ("python3.11", "python3.12", "python3.13", "python3.14") if (path := shutil.which(name))]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not find_spec("ziglang"):
        pytest.skip("NOT RUN: pip install ziglang")
    return {machine: build(machine, tmp_path_factory.mktemp(machine)) for machine in MACHINES}


@pytest.mark.nightly
@pytest.mark.parametrize("python", PYTHONS or [sys.executable])
def test_its_kernels_prove_the_digests_on_every_python(wheels: dict[str, Path], python: str, tmp_path: Path) -> None:
    if subprocess.run([python, "-c", "import venv, ensurepip"], check=False).returncode:
        pytest.skip(f"{python} makes no virtual environments")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    here = tmp_path / "venv" / "bin" / "python"
    alone = [str(here), "-I"]  # without PYTHONPATH: what is in the wheel, not in a tree
    subprocess.run([*alone, "-m", "pip", "install", "--quiet", wheels["x86_64"]], check=True, cwd=tmp_path)
    code = "from manyhands.engine import golden, library as lib; print(*map(golden.failures, lib.supported()))"
    found = subprocess.run([*alone, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    assert set(found.split()) == {"()"} and ("avx2" not in library.supported() or len(found.split()) > 1)


@pytest.mark.nightly
def test_a_wheel_without_kernels_or_for_another_machine_is_refused(wheels: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ELF machine"):
        check(wheels["x86_64"], "aarch64")
    with pytest.raises(ValueError, match="not for any Python 3 on arm64"):
        check(wheels["aarch64"], "arm64")
    renamed = shutil.copy(wheels["aarch64"], tmp_path / wheels["arm64"].name)
    with pytest.raises(ValueError, match="not for arm64 under macOS"):
        check(Path(renamed), "arm64")
    hollow = tmp_path / wheels["x86_64"].name
    with zipfile.ZipFile(wheels["x86_64"]) as full, zipfile.ZipFile(hollow, "w") as copy:
        for name in full.namelist():
            if name != KERNELS:
                copy.writestr(name, full.read(name))
    with pytest.raises(ValueError, match="has no"):
        check(hollow, "x86_64")
