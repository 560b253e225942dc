"""Names that the pages give without a file, or behind one: `Class.member`, `file.py`: `NAME`, `tests/file.py::test`."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "manyhands"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The page without its blocks, in one line."""
    return " ".join(FENCE.sub("", page.read_text("utf8")).split())


def members_of(node: ast.ClassDef) -> Iterator[str]:
    """What a class defines or sets: methods, fields, attributes of self."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr if isinstance(inner, ast.Attribute) else inner.id


@functools.cache
def classes() -> dict[str, tuple[frozenset[str], tuple[str, ...]]]:
    """Every class of the package: its own members, and the names of its bases."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            if isinstance(node, ast.ClassDef):
                bases = tuple(ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
                found[node.name] = (frozenset(members_of(node)), bases)
    return found


def has(kind: str, member: str) -> bool:
    """Whether a class, or one that it is made of, has `member`."""
    own, bases = classes().get(kind, (frozenset(), ()))
    return member in own or any(has(base, member) for base in bases if base != kind)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_members_of_classes_exist(page: Path) -> None:
    for span in re.findall(r"`([^`]+)`", prose(page)):
        for kind, member in re.findall(r"\b([A-Z]\w+)\.(\w+)", span):
            assert kind not in classes() or has(kind, member), f"{page.name}: {span}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_behind_a_file_are_in_it(page: Path) -> None:
    for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`[A-Z_]+`(?:, )?)+)", prose(page)):
        path = SOURCE / file
        assert path.exists(), f"{page.name}: {file}"
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b{name}\b", path.read_text("utf8")), f"{page.name}: {file}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", prose(page)):
        assert f"def {name}(" in (ROOT / file).read_text("utf8"), f"{page.name}: {file}::{name}"
