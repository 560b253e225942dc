"""The pages are wrapped at 120 columns, and the tool that wraps them changes no word and no block."""

from pathlib import Path

import pytest

from tools import wrap_docs

LONG = "word " * 30 + "`manyhands up MODEL`"


@pytest.mark.parametrize("page", wrap_docs.PAGES, ids=lambda page: page.name)
def test_pages_are_wrapped(page: Path) -> None:
    assert not wrap_docs.wide_lines(page), "run: python -m tools.wrap_docs"


@pytest.mark.parametrize("prefix", ["", "- ", "12. ", "  - ", "   "])
def test_a_long_line_is_wrapped_with_the_indent_of_its_text(prefix: str) -> None:
    lines = wrap_docs.wrapped(prefix + LONG + " end").splitlines()
    assert " ".join(lines).split() == (prefix + LONG + " end").split()
    assert all(len(line) <= wrap_docs.COLUMNS for line in lines) and len(lines) > 1
    assert all(len(line) - len(line.lstrip()) == len(prefix) for line in lines[1:])
    assert any("`manyhands up MODEL`" in line for line in lines)  # a code span is not broken


def test_tables_code_and_short_paragraphs_stay() -> None:
    text = f"| {LONG} |\n\n```sh\n{LONG}\n```\n\n# {LONG}\n\nshort\nlines\n"
    assert wrap_docs.wrapped(text) == text


@pytest.mark.parametrize("word", ["-", "1.", "#", "|", "+"])
def test_no_line_begins_another_block(word: str) -> None:
    for length in range(100, 125):
        lines = wrap_docs.wrapped("x" * length + f" {word} y " + "z " * 70).splitlines()
        assert not any(line.startswith(f"{word} ") for line in lines)
