"""Figures of a comparison: against the definitions, and of precisions of a tiny model."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from manyhands.cli.model import app
from manyhands.errors import BadRequest
from manyhands.testing.tiny import make_tiny
from manyhands.text.tokenizer import load_tokenizer
from manyhands.worker.quality import WINDOW, Logits, Predictor, compare, window_within, windows_of

VOCAB = 7


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama", layers=2)


def same(ids: Sequence[int]) -> Logits:
    """Predicts 1/7 for each token, in logits that are not normalised."""
    return np.full((len(ids), VOCAB), 5, np.float32)


def sure(ids: Sequence[int]) -> Logits:
    """Token 2 with one half."""
    found = same(ids)
    found[:, 2] += np.log(np.float32(VOCAB - 1))
    return found


def test_a_model_is_no_way_from_itself() -> None:
    found = compare(sure, sure, [[1, 2, 3], [2] * 200])
    assert (found.positions, found.mean_kl, found.max_kl, found.same_top, found.perplexity_ratio) == (203, 0, 0, 1, 1)


def test_figures_are_those_of_their_definitions() -> None:
    """Over more than one stretch of rows; perplexities over tokens that follow another."""
    found = compare(same, sure, [[2] * 130, [1, 2]])
    kl = (6 * math.log(12 / 7) + math.log(2 / 7)) / 7
    for value in (found.mean_kl, found.median_kl, found.kl_99_9, found.max_kl):
        assert value == pytest.approx(kl, rel=1e-5)
    assert found.same_top == 0  # of equals the first
    assert found.perplexity_a == pytest.approx(7) and found.perplexity_b == pytest.approx(2)


def test_a_single_wrong_position_shows_in_the_tail_alone() -> None:
    def once(ids: Sequence[int]) -> Logits:
        found = same(ids)
        found[17, 4] = 30
        return found

    found = compare(same, once, [[1] * 100] * 20)
    assert found.median_kl == 0 and 0 < found.mean_kl < found.max_kl / 50 and found.same_top == 0.99


def test_more_bits_are_nearer(llama: Path) -> None:
    right = Predictor(llama, "fp32", 1)
    windows = [ids[:48] for ids in right.draw(2, np.random.default_rng(1))]
    far = {precision: compare(right, Predictor(llama, precision, 1), windows) for precision in ("bf16", "w8", "w4")}
    assert 0 < far["bf16"].mean_kl < far["w8"].mean_kl < far["w4"].mean_kl < 0.3
    assert far["w8"].same_top > 0.9


def test_windows_are_stretches_of_the_text(llama: Path, tmp_path: Path) -> None:
    text = "ab" * WINDOW + "c"
    encode = load_tokenizer(llama).encode
    whole = windows_of([encode, encode], text, 99)
    assert [len(ids) for ids in whole] == [WINDOW, WINDOW]  # a single id predicts nothing
    assert windows_of([encode], text, 1) == whole[:1]
    with pytest.raises(BadRequest, match="at least 2"):
        windows_of([encode], "a", 9)
    other = Path(shutil.copytree(llama, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BadRequest, match="different tokenizers"):
        windows_of([encode, load_tokenizer(other).encode], text, 9)


@pytest.mark.parametrize("context", [2, 16])
def test_windows_of_models_of_few_positions_are_shorter(tmp_path: Path, context: int) -> None:
    folder, text = make_tiny("llama", tmp_path / "llama", layers=2, context=context), tmp_path / "text"
    text.write_text("To be, or not to be" * 4)
    for given in ((), ("--text", str(text))):
        command = ["quality", str(folder), str(folder), *given, "--windows", "3", "--threads", "1", "--json"]
        shown = CliRunner().invoke(app, command, catch_exceptions=False)
        assert json.loads(shown.stdout)["positions"] == 3 * context
    with pytest.raises(BadRequest, match="context of 1"):
        window_within([8, 1])


def test_the_command_prints_them(llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question.")
    command = ["quality", str(llama), str(llama), "--dtype-b", "w8", "--text", str(text), "--threads", "1"]
    shown = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    found = json.loads(shown.stdout)
    assert (found["dtype_a"], found["dtype_b"]) == ("bf16", "w8") and 0 < found["mean_kl"] < 0.1
    assert "99.9 %" in CliRunner().invoke(app, command, catch_exceptions=False).stdout
    text.write_bytes(b"\xff")
    with pytest.raises(BadRequest, match="UTF-8"):
        CliRunner().invoke(app, command, catch_exceptions=False)
