"""setuptools, and a C compiler from the package registry for machines that have none (see setup.py)."""

import platform
import shlex
import shutil
import sys
import sysconfig
from os import environ
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - a build backend is a module with setuptools' functions


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Without files that an earlier build has left and the sources no longer have."""
    for left in Path("build").glob("lib*"):
        shutil.rmtree(left)
    return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _compiler()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _compiler()


def _compiler() -> list[str]:
    command = environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return []
    return [] if shutil.which(shlex.split(command)[0]) else ["ziglang>=0.11"]
