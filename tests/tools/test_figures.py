"""The figures of README and docs/benchmarks.md are those of bench/results, every file of it among them."""

from pathlib import Path

import pytest

from tools import figures


@pytest.mark.parametrize("name", figures.PAGES)
def test_pages_show_what_was_measured(name: str) -> None:
    assert (figures.ROOT / name).read_text() == figures.page(name), "run: python -m tools.figures"


def test_what_readme_shows_is_short_and_stands_in_the_whole_table() -> None:
    shown = figures.brief_table().splitlines()
    assert len(shown) <= 14 and max(map(len, shown)) <= 170
    whole = {file for row in figures.ROWS for file in figures.files_of(row, [brief.file for brief in figures.BRIEFS])}
    assert {brief.file for brief in figures.BRIEFS} <= whole


@pytest.mark.parametrize(
    "value, text",
    [
        ({"median": 2.376, "min": 1.0, "max": 3.0}, "2.4"),
        (0.031, "0.031"),
        (47.77, "48"),
        (597.97, "600"),
        (140223.3, "140,000"),
        (99.97, "100"),
        (10263, "10,263"),
        ("H200", "H200"),
    ],
)
def test_figures_of_readme_are_rounded(value: object, text: str) -> None:
    assert figures.rounded(value) == text


def test_a_result_without_a_row_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unheard-of.json").write_text("{}")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="unheard-of"):
        figures.table()


def test_fields_are_looked_up_by_the_longest_key() -> None:
    found = {"a": {"0.5": {"median": 1.25, "min": 1.0, "max": 2.0}}, "b": [1, 2]}
    assert figures.filled("{a.0.5} x, {b}", found) == "1.25 (1 to 2) x, 1 to 2"
    with pytest.raises(KeyError):
        figures.filled("{a.missing}", found)


def test_what_an_older_file_lacks_is_left_out() -> None:
    text = "{a}[[, first {b}]]"
    assert figures.filled(text, {"a": 1}) == "1" and figures.filled(text, {"a": 1, "b": 2}) == "1, first 2"


def test_a_row_has_a_file_for_each_back_end_and_family_of_cpus() -> None:
    """Not those of a row whose name is longer."""
    row = figures.Row("step-0.5b", "", "", "")
    found = ["step-0.5b-2000-amx-intel6", "step-0.5b-avx512-amd26", "step-0.5b-avx512-amd25", "step-0.5b-amx-intel6"]
    assert figures.files_of(row, found) == [found[3], found[2], found[1]]
    assert figures.files_of(row, ["step-0.5b", "step-0.5b-avx2"]) == ["step-0.5b"]
