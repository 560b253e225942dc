"""Measure the source tree and compare it with stated limits: lines, longest functions and files, class names used twice.

    python -m tools.measures          print the measures; exit 1 if one exceeds its limit

A limit is what the tree has reached; lower it when the tree has become smaller. Raise one only with a reason in the commit.
"""

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "manyhands"

LIMITS = {
    "function lines, p90": 16,
    "function lines, longest": 59,
    "functions over 60 lines": 0,
    "file lines, longest": 350,
    "files over 350 lines": 0,
    "class names in several files": 0,
}


@dataclass(slots=True)
class Tree:
    """What was counted. Functions and files as (lines, name)."""

    functions: list[tuple[int, str]] = field(default_factory=list)
    files: list[tuple[int, str]] = field(default_factory=list)
    classes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, path: str, source: str) -> None:
        """Count one file. Raises SyntaxError for what is no Python."""
        self.files.append((source.count("\n"), path))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                self.functions.append((node.end_lineno - node.lineno + 1, f"{path}:{node.name}"))
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                self.classes[node.name].add(path)

    @property
    def twice(self) -> list[str]:
        """Public class names that stand in more than one file."""
        return sorted(name for name, paths in self.classes.items() if len(paths) > 1)

    def measures(self) -> dict[str, int]:
        """Every measure of LIMITS."""
        lengths = sorted(length for length, _ in self.functions)
        return {
            "function lines, p90": lengths[int(0.9 * len(lengths))],
            "function lines, longest": lengths[-1],
            "functions over 60 lines": sum(length > 60 for length in lengths),
            "file lines, longest": max(length for length, _ in self.files),
            "files over 350 lines": sum(length > 350 for length, _ in self.files),
            "class names in several files": len(self.twice),
        }


def read(root: Path) -> Tree:
    tree = Tree()
    for path in sorted(root.rglob("*.py")):
        tree.add(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
    return tree


def main() -> int:
    tree = read(SOURCE)
    print(f"src: {sum(n for n, _ in tree.files)} Python lines in {len(tree.files)} files")
    measured = tree.measures()
    for name, value in measured.items():
        verdict = "" if value <= LIMITS[name] else "   over the limit"
        print(f"{name:32} {value:5} of {LIMITS[name]}{verdict}")
    if all(measured[name] <= limit for name, limit in LIMITS.items()):
        return 0
    for label, found in (("longest functions", tree.functions), ("longest files", tree.files)):
        print(f"{label}: " + ", ".join(f"{name} {length}" for length, name in sorted(found, reverse=True)[:9]))
    print("in several files: " + ", ".join(f"{name} ({', '.join(sorted(tree.classes[name]))})" for name in tree.twice))
    return 1


if __name__ == "__main__":
    sys.exit(main())
