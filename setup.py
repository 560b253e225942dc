"""Builds the C code: the engine's kernels for every target. All else stands in pyproject.toml.

The engine (engine/native) is one library with several targets, chosen at run time: kernels.c is compiled once for each.

Python loads it with ctypes, so a wheel fits every Python 3. `MANYHANDS_WHEEL`, set by tools/wheel.py, names a platform
tag to build for, as manylinux_2_17_aarch64 or macosx_11_0_arm64; its compiler is in CC.
"""

import platform
import shlex
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from os import cpu_count, environ
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ENGINE = Path("src/manyhands/engine/native")
# No contraction: a multiplication and an addition keep two roundings, whatever the compiler. No libm is linked.
FLAGS = ["-O3", "-g0", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread"]
FLAGS.append("-fno-asynchronous-unwind-tables")  # 40 kB that only a debugger reads
FLAGS += ["-Werror=int-conversion", "-Werror=incompatible-pointer-types", "-Werror=implicit-function-declaration"]
LINKED = ["-pthread", "-s"]
MAC = "macosx_11_0_arm64"  # the first that runs on such machines
is_mac = sys.platform == "darwin" and platform.machine() == "arm64"
if is_mac:  # whose Python may be built for two machines, and then asks for both; its linker knows no -s
    FLAGS, LINKED = [*FLAGS, "-arch", "arm64"], ["-pthread", "-arch", "arm64"]
SCALAR = {"scalar": ["-DTARGET=scalar", "-O2"]}
TARGETS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        **SCALAR,
        "avx2": ["-DTARGET=avx2", "-DLANES_AVX2", "-mavx2", "-mfma", "-mf16c"],
        "avx512": [
            "-DTARGET=avx512",
            "-DLANES_AVX512",
            *(f"-mavx512{name}" for name in ("f", "bw", "dq", "vl")),
            "-mfma",
        ],
        "amx": [
            "-DTARGET=amx",
            "-DLANES_AVX512",
            "-DTILES",
            *(f"-mavx512{name}" for name in ("f", "bw", "dq", "vl")),
            *("-mfma", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        ],
    },
    "aarch64": {**SCALAR, "neon": ["-DTARGET=neon", "-DLANES_NEON"]},
}
TARGETS["arm64"] = TARGETS["aarch64"]  # as macOS calls it
PLATFORM = environ.get("MANYHANDS_WHEEL", "")
machine = next((name for name in TARGETS if PLATFORM.endswith(name)), platform.machine())
targets = TARGETS.get(machine, {}) if sys.platform == "linux" or is_mac else {}


class Wheel(bdist_wheel):
    """bdist_wheel, tagged for any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM or (MAC if is_mac else super().get_tag()[2])


class Build(build_ext):
    """build_ext, with flags of their own for each target of the engine, and a file name for any Python 3.

    Targets are compiled side by side. What an editable install built in place is copied while no source is newer than it.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        there, made = Path("src", self.get_ext_filename(ext.name)), Path(self.get_ext_fullpath(ext.name))
        newest = max(Path(source).stat().st_mtime for source in ("setup.py", *ext.sources, *ext.depends))
        if not PLATFORM and not self.force and there.exists() and there.stat().st_mtime > newest:
            if there.resolve() != made.resolve():
                self.mkpath(str(made.parent))
                self.copy_file(str(there), str(made))
        else:
            self.build_engine(ext)

    def build_engine(self, ext: Extension) -> None:
        """The library, of what is common and of the kernels of every target."""
        if not targets:
            found = f"{platform.system()} on {machine}"
            raise CompileError(
                f"no kernels for {found}: manyhands runs under Linux (x86_64, aarch64) and macOS (arm64)"
            )
        plain = [source for source in ext.sources if not source.endswith("kernels.c")]
        with ThreadPoolExecutor(cpu_count()) as pool:  # of threads that wait for the compiler
            common = pool.submit(self.compiler.compile, plain, output_dir=self.build_temp, extra_postargs=FLAGS)
            each = [pool.submit(self.kernels, name) for name in reversed(targets)]  # what takes longest first
            objects = [*common.result(), *(made for one in each for made in one.result())]
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), extra_postargs=LINKED)

    def kernels(self, name: str) -> list[str]:
        """The object file of a target; none where the compiler is too old for it."""
        folder, flags = str(Path(self.build_temp) / name), [*FLAGS, *targets[name]]
        try:
            return self.compiler.compile([str(ENGINE / "kernels.c")], output_dir=folder, extra_postargs=flags)
        except CompileError:
            if name == "amx":  # gcc before 11: without tiles
                return []
            if name == "avx2" and "-DNO_AVX_DOT" not in flags:  # assemblers before 2.36 do not know AVX-VNNI
                targets[name].append("-DNO_AVX_DOT")
                return self.kernels(name)
            raise


engine = Extension(
    "manyhands.engine._native", sorted(map(str, ENGINE.glob("*.c"))), depends=sorted(map(str, ENGINE.glob("*.h")))
)

compiler = shlex.split(environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
if not shutil.which(compiler) and find_spec("ziglang"):
    environ["CC"] = f"{sys.executable} -m ziglang cc"
if "ziglang" in environ.get("CC", ""):  # zig's linker refuses what Debian's Python links with, -Bsymbolic-functions
    environ.setdefault("LDSHARED", f"{environ['CC']} -shared")

setup(ext_modules=[engine], cmdclass={"build_ext": Build, "bdist_wheel": Wheel})
