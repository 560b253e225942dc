"""bench/acceptance.py: its closed form is what drawing gives, and the bundled drafter is right as often as is said."""

import numpy as np
import pytest

from bench.acceptance import OPENINGS, Whole, measure, odds, openings, same_noise
from manyhands import tales


def drawn_alike(p: np.ndarray, q: np.ndarray, draws: int) -> float:
    """How often draws with the same Gumbel noise are the same token."""
    noise = np.random.default_rng(7).gumbel(size=(draws, p.size))
    with np.errstate(divide="ignore"):
        return float(((np.log(p) + noise).argmax(-1) == (np.log(q) + noise).argmax(-1)).mean())


@pytest.mark.parametrize("seed", range(4))
def test_the_closed_form_is_what_drawing_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(9, 0.5), size=2)
    assert same_noise(p[None], q[None])[0] == pytest.approx(drawn_alike(p, q, 40_000), abs=0.01)


def test_what_is_never_drawn_is_never_right() -> None:
    p, q = (
        np.array([[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]),
        np.array([[0.0, 0.0, 0.3, 0.7], [0.25, 0.25, 0.5, 0.0]]),
    )
    assert same_noise(p, q) == pytest.approx([0.0, 0.5])
    assert same_noise(p, p) == pytest.approx([1.0, 1.0])


def test_odds_stay_odds_where_logits_are_far_apart_or_banned() -> None:
    found = odds(np.array([[-np.inf, 3e4, 3e4, -3e4]], np.float32), 0.01)
    assert found.tolist() == [[0.0, 0.5, 0.5, 0.0]]


def test_what_is_written_together_has_the_rows_of_what_is_read_alone() -> None:
    whole = Whole(tales.drafter_path(), tales.model_path())
    prompts, banned = openings(tales.model_path(), 1)
    texts = whole.write(prompts, [0.0, 0.7, 1.0, 0.7, 0.0], 40, banned, np.random.default_rng(3))
    assert len(prompts) == len(OPENINGS)
    for prompt, ids, rows in zip(prompts, texts.ids.tolist(), texts.rows, strict=True):
        assert ids[: len(prompt)] == prompt
        assert not set(ids[len(prompt) :]) & set(banned)
        assert np.array_equal(rows, whole.read(ids))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_drafter_of_tales_is_right_as_often_as_is_said(temperature: float) -> None:
    """Far more often with the target's noise than without; bench.acceptance has the figures over longer texts."""
    target, drafter = Whole(tales.model_path()), Whole(tales.drafter_path(), tales.model_path())
    found = measure(target, drafter, temperature, 1, 64)
    assert found["same_noise"] > 0.6
    assert found["same_noise"] > found["likeliest"] > found["own_noise"]
