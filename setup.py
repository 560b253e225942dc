"""Builds the one kernel of our own, where there are AMX tiles to be had. All else stands in pyproject.toml.

It is optional: without it (no compiler, another CPU) products run on oneDNN, with other bits and more slowly.
"""

import platform
import shlex
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from os import environ

from setuptools import Extension, setup

TILES = Extension(
    "manyhands.model._tiles",
    ["src/manyhands/model/tiles.c"],
    extra_compile_args=[
        "-O2",
        "-pthread",
        *(f"-m{name}" for name in "avx512f avx512bw avx512vl avx512bf16 amx-tile amx-bf16".split()),
    ],
    libraries=["m"],
    optional=True,
)

compiler = shlex.split(environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
if not shutil.which(compiler) and find_spec("ziglang"):
    environ["CC"] = f"{sys.executable} -m ziglang cc"

has_tiles = sys.platform == "linux" and platform.machine() == "x86_64"
setup(ext_modules=[TILES] if has_tiles else [])
