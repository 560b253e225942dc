"""Builds the kernels of our own, where there are AMX tiles to be had. All else stands in pyproject.toml.

They are optional: without them (no compiler, another CPU) products run on oneDNN, with other bits and more slowly.
"""

import platform
import shlex
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from os import environ
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/manyhands/model/native")

TILES = Extension(
    "manyhands.model._tiles",
    sorted(map(str, NATIVE.glob("*.c"))),
    depends=sorted(map(str, NATIVE.glob("*.h"))),
    extra_compile_args=[
        "-O2",
        "-ffp-contract=off",  # gcc would make one rounding of two, other compilers would not
        "-pthread",
        *(f"-m{name}" for name in "avx512f avx512bw avx512dq avx512vl avx512bf16 amx-tile amx-bf16".split()),
    ],
    libraries=["m"],
    optional=True,
)

compiler = shlex.split(environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
if not shutil.which(compiler) and find_spec("ziglang"):
    environ["CC"] = f"{sys.executable} -m ziglang cc"

has_tiles = sys.platform == "linux" and platform.machine() == "x86_64"
setup(ext_modules=[TILES] if has_tiles else [])
