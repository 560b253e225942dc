"""Every back end of this machine reproduces the golden digests, and one that does not is never used."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from manyhands.cli import checks
from manyhands.core import Precision
from manyhands.engine import golden, golden_models, library
from manyhands.errors import ModelError
from manyhands.program.families import FAMILIES
from tests.few_digests import few_digests, forget
from tests.nightly import daily


@pytest.fixture(autouse=True)
def no_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(library.FORCED, raising=False)
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))  # without notes of what was proven (proofs.py)
    yield
    forget()


def test_every_back_end_reproduces_the_digests() -> None:
    """A machine of another make runs the same test against the same file."""
    right, cases = golden.recorded(), golden.ALL
    for name in library.supported():
        before = library.calls(name)
        assert {case: right[case] for case in cases} == golden.digests(name), name
        assert library.calls(name) > before
    assert set(right) >= set(cases)


# Plain C takes ten seconds for what vectors compute in two, with its kernels proven above: nightly.
@pytest.mark.parametrize("name", daily(library.supported()[:-1], ["scalar"]))
def test_every_back_end_reproduces_whole_models(name: str) -> None:
    """Of every family, in every precision; with this back end alone."""
    before = {other: library.calls(other) for other in library.supported()}
    assert golden_models.failures(golden_models.OfCpu(name)) == ()
    grown = [other for other in library.supported() if library.calls(other) > before[other]]
    assert grown == [name] and library.calls(name) - before[name] >= 30 * len(golden_models.configs())
    models = {f"model {family} {kind}" for family in golden_models.configs() for kind in golden_models.PRECISIONS}
    assert models <= set(golden.recorded())


def test_a_digest_of_small_weights_changes_no_other_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, small = golden.arithmetic("bf16"), golden.arithmetic("w8")
    (tmp_path / "small.json").write_text("{}")
    monkeypatch.setattr(golden, "SMALL_FILE", tmp_path / "small.json")
    assert golden.arithmetic("fp32") == before != small != golden.arithmetic("w4")
    assert not any(map(golden.is_small, json.loads(golden.FILE.read_text())))


def test_every_family_has_a_golden_model() -> None:
    assert {config["model_type"] for config in golden_models.configs().values()} == set(FAMILIES)


def test_cases_differ_and_are_not_empty() -> None:
    digests = list(golden.recorded().values())
    assert len(set(digests)) == len(digests)


def test_a_back_end_with_other_bits_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**json.loads(golden.FILE.read_text()), "norms": "0" * 64}
    (tmp_path / "golden.json").write_text(json.dumps(other))
    monkeypatch.setattr(golden, "FILE", tmp_path / "golden.json")
    few_digests(monkeypatch)
    assert golden.failures("scalar") == ("norms",)
    with pytest.raises(ModelError, match="norms"):
        golden.choose()
    (check,) = checks.check_engine()
    assert check.level == "fail" and "norms" in check.said


def test_a_precision_proves_the_digests_of_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where those of small weights differ, bf16 is served all the same, and without a look at them."""
    (tmp_path / "small.json").write_text('{"small experts": "00"}')
    monkeypatch.setattr(golden, "SMALL_FILE", tmp_path / "small.json")
    few_digests(monkeypatch)
    assert golden.choose("bf16") == golden.choose("fp32") == library.supported()[0]
    assert golden._unlike.cache_info().currsize == 1
    small: tuple[Precision, ...] = ("w8", "w4+c8")
    for precision in small:
        with pytest.raises(ModelError, match=r"small experts.*--dtype bf16 without --cache-dtype needs fewer"):
            golden.choose(precision)


def test_a_forced_back_end_is_the_one_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    few_digests(monkeypatch)
    for name in library.supported():
        monkeypatch.setenv(library.FORCED, name)
        golden._chosen.cache_clear()
        assert golden.choose() == name
        others = [other for other in library.supported() if other != name]
        before = [library.calls(other) for other in others]
        library.apply(golden.choose(), "exp", np.zeros(3, np.float32))
        assert [library.calls(other) for other in others] == before
    for name in ("neon" if "avx2" in library.supported() else "avx2", "AVX2", "x"):
        monkeypatch.setenv(library.FORCED, name)
        golden._chosen.cache_clear()
        with pytest.raises(ModelError, match="this CPU runs"):
            golden.choose()


def test_doctor_names_back_ends_and_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    few_digests(monkeypatch)
    (check,) = checks.check_engine()
    assert check.level == "ok" and golden.arithmetic() in check.said
    assert all(name in check.said for name in library.supported())


def test_tables_to_131072_positions() -> None:
    """Any chunk of a table has the bits of the whole, and is near the true values."""
    rates = [1.0, 0.31, 1e-5]
    cos, sin = library.rope(rates, 1.0, 131072)
    for first in (0, 7, 131000):
        part = library.rope(rates, 1.0, 60, first)
        assert np.array_equal(part[0], cos[first : first + 60]) and np.array_equal(part[1], sin[first : first + 60])
    angles = np.arange(131072, dtype=np.float32)[:, None] * np.array(rates, np.float32)
    assert np.abs(np.cos(angles.astype(np.float64)) - cos).max() < 6.1e-8
    assert np.abs(np.sin(angles.astype(np.float64)) - sin).max() < 6.1e-8


@pytest.mark.parametrize(
    "name, true",
    [("exp", np.exp), ("tanh", np.tanh), ("sigmoid", lambda x: 1 / (1 + np.exp(-x)))],
)
def test_functions_are_near_the_true_ones(name: str, true: np.ufunc) -> None:
    x = np.linspace(-80, 80, 100001).astype(np.float32)
    right = true(x.astype(np.float64))
    assert (np.abs(library.apply("scalar", name, x) - right) <= 2.2e-7 * np.abs(right)).all()


@pytest.mark.parametrize("back_end", library.supported())
def test_powers_of_negative_numbers_have_the_bits_of_all(back_end: str) -> None:
    """sigmoid takes e^-|x| in fewer operations than exp does: one in 997 of the negative numbers, and all from -104 to -87."""
    around = np.array([-104, -87], np.float32).view(np.uint32)
    bits = np.concatenate(
        [np.arange(1 << 31, 0xFF800000, 997, dtype=np.uint32), np.arange(around[1], around[0], dtype=np.uint32)]
    )
    bits = bits[::16] if back_end == "scalar" else bits
    x = np.resize(bits, -(-len(bits) // 16) * 16).view(np.float32)
    small = library.apply(back_end, "exp", x)
    assert np.array_equal(library.apply(back_end, "sigmoid", x), small / (1 + small))


def test_double_functions_are_near_the_true_ones() -> None:
    x = np.linspace(1e-3, 100, 10001)
    assert np.abs(library.double("exp", x) / np.exp(x) - 1).max() < 5e-16
    assert np.abs(library.double("log", x) - np.log(x)).max() < 2e-15
    assert np.abs(library.double("pow", x, -0.7) / x**-0.7 - 1).max() < 3e-15
    edges = np.array([0.0, -1.0, np.inf, np.nan, 1e-310])
    assert np.array_equal(library.double("log", edges), [-np.inf, np.nan, np.inf, np.nan, -np.inf], equal_nan=True)
    assert np.array_equal(
        library.double("exp", np.array([np.inf, -np.inf, np.nan])), [np.inf, 0, np.nan], equal_nan=True
    )
