"""docs/design.md, Packages: the tree is the diagram; imports only point upward in its list."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import manyhands
from tools import measures

ROOT = Path(manyhands.__file__).parent
# Upper lines know nothing of lower ones. Parts of one line may import each other.
ORDER = [
    {
        "aside",
        "core",
        "errors",
        "files",
        "plain",
        "config",
        "config_file",
        "refusals",
        "resources",
        "stalls",
        "toml_file",
    },
    {"wire"},
    {"net"},
    {"checkpoint"},
    {"node"},  # links and message handlers: roles register with it
    {"weights"},
    {"program"},
    {"engine"},
    {"worker"},
    {"swarm"},
    {"route"},
    {"place"},
    {"host_node"},  # a node that hosts
    {"text"},
    {"origin"},
    {"api"},
    {"member"},  # a running member of a swarm
    {"local"},  # a swarm of processes on this machine
    {"tales"},  # the bundled model and its training
    {"cli", "__main__"},
    {"client"},  # what `import manyhands` shows: it opens what commands open
    {"testing"},
]
# "importer -> imported" that may point down, each with its reason. Keep it short.
EXCEPTIONS = {
    "manyhands.weights.here -> manyhands.tales": "the bundled model is one of the names that are a folder here",
    "manyhands.cli.model -> manyhands.testing.tiny": "`manyhands model tiny` is the test kit's maker as a command",
}
# What computes in torch, for `--device`. All else is usable without it.
IN_TORCH = {
    "manyhands.engine.torch",
    "manyhands.engine.torch_compressed",
    "manyhands.engine.torch_experts",
    "manyhands.engine.torch_functions",
    "manyhands.engine.torch_memory",
    "manyhands.engine.torch_rows",
    "manyhands.worker.torch_program",
}

# What needs NVIDIA's packages (`pip install 'manyhands[cuda]'`), which tests do without.
IN_CUDA = {"manyhands.engine.cuda.gpu"}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py" or path.parent != ROOT)


def test_every_package_lists_its_files() -> None:
    """In its own text, which is the map for a newcomer. A command's file is found by its name; docs/design.md has the top."""
    for package in sorted({path.parent for path in modules()} - {ROOT, ROOT / "cli"}):
        text = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf8"))) or ""
        missing = {path.stem for path in package.glob("*.py")} - {"__init__", *re.findall(r"\w+", text)}
        assert not missing, f"{package.relative_to(ROOT)}/__init__.py does not say what these hold: {sorted(missing)}"


def part(name: str) -> str:
    """The first word of a module's name below the package."""
    return name.split(".")[1] if "." in name else ""


def module_name(path: Path) -> str:
    return ".".join(("manyhands", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def is_module(package: str, name: str) -> bool:
    """Whether `from package import name` names a part of manyhands and not a value."""
    return package == "manyhands" and ((ROOT / name).is_dir() or (ROOT / f"{name}.py").exists())


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module named by an import statement, also inside functions and under TYPE_CHECKING."""
    return frozenset(named(path))


def named(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if is_module(node.module, alias.name))


def rank(name: str) -> int:
    return next(index for index, parts in enumerate(ORDER) if part(name) in parts)


def test_every_part_has_a_place_in_the_order() -> None:
    """A new package must be given its line here, and so in the design."""
    known = {word for parts in ORDER for word in parts}
    assert {part(module_name(path)) for path in modules()} <= known


@pytest.mark.parametrize("path", modules(), ids=lambda path: module_name(path))
def test_imports_point_upward(path: Path) -> None:
    """A module imports only parts of its own line or of lines above it."""
    name = module_name(path)
    inner = {i for i in imports(path) if i.startswith("manyhands.")}
    down = {i for i in inner if rank(i) > rank(name) and f"{name} -> {i}" not in EXCEPTIONS}
    assert not down, f"{name} imports {', '.join(sorted(down))}, which stand below it"


def test_no_exception_is_out_of_date() -> None:
    """An exception that nothing needs any more must go."""
    real = {f"{module_name(path)} -> {i}" for path in modules() for i in imports(path)}
    assert set(EXCEPTIONS) <= real


def test_words_that_say_nothing_name_no_module() -> None:
    """docs/design.md: no utils, common, manager."""
    words = {word for path in modules() for word in module_name(path).split(".")}
    assert not words & {"utils", "util", "common", "manager", "helpers", "misc", "base"}


def test_only_what_computes_in_torch_loads_it() -> None:
    """Importing every other module in a fresh interpreter leaves torch and transformers unloaded.

    One interpreter for all of them; it names the first module with which either comes.
    """
    names = {module_name(path) for path in modules()} - IN_TORCH - IN_CUDA
    found = sorted(name for name in names if part(name) != "testing" and not name.endswith("__main__"))
    code = (
        f"import sys\nfor name in {found!r}:\n    __import__(name)\n"
        "    if {'torch', 'transformers'} & sys.modules.keys():\n        sys.exit(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_tree_keeps_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of files and functions, class names that stand once: tools/measures.py, as `make check` runs it."""
    assert measures.main() == 0, capsys.readouterr().out
