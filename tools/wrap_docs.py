"""Wrap paragraphs and list items of the pages at 120 columns; tables, code and headings stay as they are.

    python -m tools.wrap_docs            rewrite README.md, CHANGELOG.md, CONTRIBUTING.md and docs/*.md
    python -m tools.wrap_docs --check    exit 1 and name each line that is too wide

Only a paragraph with a line wider than 120 columns is touched, so that a change of one sentence stays a small difference.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COLUMNS = 120
ITEM = re.compile(r"(\s*)(?:[-*+]|\d+\.)\s+")
ATOM = re.compile(r"(?:`[^`\n]*`|\S)+")  # a code span stays on one line
STARTS_A_BLOCK = re.compile(r"(?:[-*+>#|]|\d+[.)]|=+|-+)$")  # a word that begins something else at the start of a line


def is_fixed(line: str) -> bool:
    """Whether a line is blank or of a table, a heading, a quotation or a comment: never part of a paragraph."""
    return not line.strip() or line.lstrip().startswith(("|", "#", ">", "<!--"))


def blocks(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """(whether it may be wrapped, its lines) for each paragraph, list item and fixed line."""
    paragraph: list[str] = []
    in_fence = False
    for line in lines:
        is_mark = line.lstrip().startswith("```")
        fixed = in_fence or is_mark or is_fixed(line)
        if paragraph and (fixed or ITEM.match(line)):
            yield True, paragraph
            paragraph = []
        if fixed:
            yield False, [line]
        else:
            paragraph.append(line)
        in_fence ^= is_mark
    if paragraph:
        yield True, paragraph


def atoms(text: str) -> list[str]:
    """The words of a text; one that would begin another block at the start of a line is joined to that before it."""
    found: list[str] = []
    for word in ATOM.findall(text):
        if found and STARTS_A_BLOCK.fullmatch(word):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def wrap(lines: list[str]) -> list[str]:
    """One paragraph in lines of at most COLUMNS, each but the first indented like the text of the first."""
    item = ITEM.match(lines[0])
    first = item[0] if item else lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    indent = " " * len(first)
    text = " ".join([lines[0][len(first) :], *(line.strip() for line in lines[1:])])
    out, line = [], first
    for atom in atoms(text):
        if len(line) + 1 + len(atom) > COLUMNS and line.strip():
            out.append(line.rstrip())
            line = indent + atom
        else:
            line = line + atom if line in (first, indent) else f"{line} {atom}"
    return [*out, line]


def too_wide(lines: list[str]) -> bool:
    return any(len(line) > COLUMNS for line in lines)


def wrapped(text: str) -> str:
    """The page with every paragraph that is too wide wrapped."""
    out: list[str] = []
    for may_wrap, lines in blocks(text.splitlines()):
        out += wrap(lines) if may_wrap and too_wide(lines) and not lines[0].endswith("  ") else lines
    return "\n".join(out) + "\n"


def wide_lines(page: Path) -> list[str]:
    """`page:line` of every line wider than COLUMNS that is text."""
    found, number = [], 0
    for may_wrap, lines in blocks(page.read_text("utf8").splitlines()):
        found += [f"{page.name}:{number + i + 1}" for i, line in enumerate(lines) if may_wrap and len(line) > COLUMNS]
        number += len(lines)
    return found


def main() -> None:
    if "--check" in sys.argv:
        wide = [line for page in PAGES for line in wide_lines(page)]
        sys.exit(f"wider than {COLUMNS} columns (python -m tools.wrap_docs): {', '.join(wide)}" if wide else 0)
    for page in PAGES:
        page.write_text(wrapped(page.read_text("utf8")), "utf8")


if __name__ == "__main__":
    main()
