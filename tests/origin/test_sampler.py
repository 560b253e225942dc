"""manyhands.origin.sampler: the law of the draws, their independence, and every rule by hand-computed examples."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import SamplingParams
from manyhands.errors import BadRequest, Corruption
from manyhands.origin import sampler
from manyhands.origin.sampler import Drawn, Logits, Sampler, gumbel, keep_min_p, keep_top_k, keep_top_p
from tests.nightly import daily

NO_EOS: frozenset[int] = frozenset()
NUM_DRAWS = 10_000
LOGITS = np.random.default_rng(5).normal(0, 1.5, 40).astype(np.float32)
PROMPT, OUTPUT = [3, 4, 5, 5], [5, 6, 6, 6, 7]
HOT = SamplingParams(temperature=1.0, seed=11)
LAWS = {
    "plain": HOT,
    "cold": replace(HOT, temperature=0.6),
    "top_k": replace(HOT, temperature=1.3, top_k=7),
    "top_p": replace(HOT, top_p=0.8),
    "min_p": replace(HOT, temperature=1.5, min_p=0.1),
    "all": SamplingParams(
        temperature=0.9,
        seed=2**64 - 1,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((1, 1.5), (2, -3.0)),
    ),
}


def row(*logits: float) -> npt.NDArray[np.float32]:
    return np.array(logits, dtype=np.float32)


def draw(
    params: SamplingParams,
    logits: Logits,
    position: int = 0,
    history: Sequence[int] = (),
    prompt_length: int = 0,
    eos_ids: frozenset[int] = NO_EOS,
) -> Drawn:
    return Sampler(params, len(logits), eos_ids).draw(logits, position, history, prompt_length)


def exact_law(params: SamplingParams) -> list[float]:
    """The distribution of one draw from LOGITS after PROMPT + OUTPUT, in plain Python, from the rules' definitions."""
    scores = [float(x) for x in LOGITS]
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in {*PROMPT, *OUTPUT}:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token in set(OUTPUT):
        scores[token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    law = normalised([math.exp(score / params.temperature) for score in scores])
    ranked = sorted(range(len(law)), key=lambda token: (-law[token], token))
    if params.top_k:
        law = normalised([p if token in ranked[: params.top_k] else 0.0 for token, p in enumerate(law)])
    if params.top_p < 1:
        count = next(n for n in range(1, 41) if sum(law[token] for token in ranked[:n]) >= params.top_p)
        law = normalised([p if token in ranked[:count] else 0.0 for token, p in enumerate(law)])
    return normalised([p if p >= params.min_p * max(law) else 0.0 for p in law])


def normalised(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def chi_square_p(counts: npt.NDArray[np.intp], law: npt.NDArray[np.float64]) -> float:
    """The p-value of Pearson's test, cells that expect fewer than 5 pooled into one."""
    expected = law * counts.sum()
    big = expected >= 5
    seen = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    wanted, seen = wanted[wanted > 0], seen[wanted > 0]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    degrees = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def follows(counts: npt.NDArray[np.intp], law: Sequence[float]) -> bool:
    """Whether counts look like draws from `law`: nothing impossible seen, total variation and chi-square both small.

    For 10k draws from 40 cells a true sample's total variation is about 0.022.
    """
    exact = np.array(law)
    variation = 0.5 * float(np.abs(counts / counts.sum() - exact).sum())
    return not counts[exact == 0].any() and variation < 0.035 and chi_square_p(counts, exact) > 0.005


@cache
def count_draws(params: SamplingParams) -> npt.NDArray[np.intp]:
    sampler, history = Sampler(params, 40, NO_EOS), PROMPT + OUTPUT
    tokens = [sampler.draw(LOGITS, position, history, len(PROMPT)).token for position in range(NUM_DRAWS)]
    return np.bincount(tokens, minlength=40)


# "all" has every rule; each by itself waits for the night, but what the check of the check draws.
EVERY_DAY = ("plain", "all")


@pytest.mark.parametrize("name", daily(EVERY_DAY, [name for name in LAWS if name not in EVERY_DAY]))
def test_draws_follow_the_exact_law_and_no_other(name: str) -> None:
    """The same check refuses a slightly wrong temperature: it can fail."""
    params = LAWS[name]
    counts = count_draws(params)
    assert follows(counts, exact_law(params))
    assert not follows(counts, exact_law(replace(params, temperature=params.temperature * 1.15)))


def test_law_check_refuses_a_forgotten_truncation() -> None:
    assert not follows(count_draws(replace(LAWS["top_p"], top_p=1.0)), exact_law(LAWS["top_p"]))


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (0, 1 << 32), (1, 0), (1 << 63, 0)])
def test_draws_at_other_positions_and_seeds_are_independent(seed_step: int, position_step: int) -> None:
    """Pairs (draw, draw one step further) fill a 4 x 4 table evenly."""
    pairs = np.zeros(16, dtype=np.intp)
    for position in range(2500):
        first = draw(HOT, row(0, 0, 0, 0), position).token
        second = draw(replace(HOT, seed=HOT.seed + seed_step), row(0, 0, 0, 0), position + position_step).token
        pairs[4 * first + second] += 1
    assert chi_square_p(pairs, np.full(16, 1 / 16)) > 0.005


def test_noise_is_uncorrelated_between_positions_seeds_and_tokens() -> None:
    noise = gumbel(3, 100, 50_000)
    for other in (gumbel(3, 101, 50_000), gumbel(4, 100, 50_000), np.roll(noise, 1)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 4 / math.sqrt(50_000)


def test_noise_is_gumbel_distributed() -> None:
    """Mean: Euler's constant; variance: pi^2 / 6; and the distribution function at three points."""
    noise = gumbel(1, 2, 100_000)
    assert abs(noise.mean() - 0.5772157) < 0.012
    assert abs(noise.var() - math.pi**2 / 6) < 0.04
    for x in (-1.0, 0.5, 3.0):
        assert abs((noise <= x).mean() - math.exp(-math.exp(-x))) < 0.006


def test_noise_golden_vectors() -> None:
    """Pinned: another machine or version must draw the same noise, or old seeds would tell other stories."""
    golden = {
        (0, 0): [-1.495451611577, -0.351137118361, -0.785906784151, 0.558675462645],
        (7, 1234): [-1.590959560454, 0.197226166006, 0.518598167496, 0.457478507675],
        (2**64 - 1, 2**64 - 1): [-0.164681786988, 0.025409539856, -0.157927524125, 1.594963344401],
    }
    for (seed, position), noise in golden.items():
        assert gumbel(seed, position, 4) == pytest.approx(noise, abs=1e-11)


def test_bits_of_noise_weights_and_log_probabilities() -> None:
    """The same on every machine: a CPU that draws other bits would break streams that it takes over."""
    noise = np.concatenate([gumbel(seed, position, 2048) for seed, position in ((0, 0), (7, 1234), (2**64 - 1, 5))])
    scores = gumbel(1, 1, 4096) * 3
    kept = [keep_top_p(scores, p) for p in (0.3, 0.9, 0.99)] + [keep_min_p(scores, p) for p in (0.01, 0.2)]
    drawn = draw(SamplingParams(logprobs=20), scores.astype(np.float32), 3)
    told = np.array([drawn.logprob, *(p for _, p in drawn.top or ())])
    digest = hashlib.sha256(noise.tobytes() + np.concatenate(kept).astype("<i8").tobytes() + told.tobytes())
    assert digest.hexdigest()[:16] == "2f50bd36b07fd3a0"


def test_numpy_s_logarithm_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last bits differ between CPUs."""
    plain = [draw(law, LOGITS, position) for law in (HOT, LAWS["top_p"]) for position in range(100)]
    log = np.log

    def other(x: Any, out: Any = None) -> Any:
        return np.multiply(log(x), 1 + 1e-13, out=out)

    monkeypatch.setattr(np, "log", other)
    assert [draw(law, LOGITS, position) for law in (HOT, LAWS["top_p"]) for position in range(100)] == plain


def test_candidates_that_come_close_are_told_apart_exactly() -> None:
    """Two that tie but for 1e-12: the exact noise decides, whatever order they come in."""
    bits = np.array([5 << 40, (5 << 40) + (1 << 13), 3 << 20], np.uint64)
    noise = sampler._to_gumbel(bits)
    for gap in (1e-12, -1e-12, 0.0):
        scores = np.array([noise[1] - noise[0] + gap, 0.0, -50.0])
        assert sampler._noisiest(scores, bits) == int((scores + noise).argmax())


def test_philox_is_the_published_one() -> None:
    """Known-answer vector of Random123 (kat_vectors, philox4x64 10, all zero); numpy steps the counter before use."""
    words = [int(word) for word in np.random.Philox(key=0, counter=(1 << 256) - 1).random_raw(4)]
    assert words == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_noise_of_a_smaller_vocabulary_is_a_prefix(seed: int, position: int, small: int, large: int) -> None:
    small, large = sorted((small, large))
    noise = gumbel(seed, position, large)
    assert np.array_equal(noise[:small], gumbel(seed, position, small))
    assert np.isfinite(noise).all()


@pytest.mark.parametrize("name", LAWS)
def test_a_draw_does_not_depend_on_the_draws_before(name: str) -> None:
    sampler, history = Sampler(LAWS[name], 40, NO_EOS), PROMPT + OUTPUT
    forward = [sampler.draw(LOGITS, position, history, 4) for position in range(50)]
    backward = [sampler.draw(LOGITS, position, history, 4) for position in reversed(range(50))]
    elsewhere = [draw(LAWS[name], LOGITS.copy(), position, history, 4) for position in range(50)]
    assert forward == backward[::-1] == elsewhere
    assert len({drawn.token for drawn in forward}) > 1


def test_a_truncation_that_keeps_everything_changes_no_draw() -> None:
    """The short way (all of V) and the way over candidates give the same tokens."""
    for position in range(200):
        assert draw(HOT, LOGITS, position) == draw(replace(HOT, top_k=40), LOGITS, position)


def test_inputs_are_not_changed() -> None:
    logits, history = LOGITS.copy(), PROMPT + OUTPUT
    draw(LAWS["all"], logits, 0, history, 4)
    assert np.array_equal(logits, LOGITS)
    assert history == PROMPT + OUTPUT


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    assert draw(SamplingParams(), row(1, 3, 2, 3)).token == 1
    assert draw(SamplingParams(logit_bias=((2, 1.0),)), row(1, 3, 2, 3)).token == 1


def test_a_tiny_temperature_is_greedy() -> None:
    params = SamplingParams(temperature=5e-324)
    assert {draw(params, row(-3e38, 1, 3e38, 2), position).token for position in range(20)} == {2}


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores_once() -> None:
    """Token 0: 4 / 2 = 2 < 2.5, though it was seen twice; with negative scores -1 * 2 = -2 < -1.5."""
    params = SamplingParams(repetition_penalty=2.0)
    assert draw(params, row(4, 2.5, 0), history=[0, 0], prompt_length=1).token == 1
    assert draw(params, row(4, 1.9, 0), history=[0, 0], prompt_length=1).token == 0
    assert draw(params, row(-1, -1.5, -9), history=[0], prompt_length=1).token == 1
    assert draw(params, row(-1, -2.5, -9), history=[0], prompt_length=1).token == 0


def test_presence_penalty_counts_once_and_only_output() -> None:
    params = SamplingParams(presence_penalty=1.0)
    assert draw(params, row(3, 2.5), history=[0], prompt_length=1).token == 0
    assert draw(params, row(3, 2.5), history=[1, 0], prompt_length=1).token == 1
    assert draw(params, row(3, 1.9), history=[1, 0, 0, 0], prompt_length=1).token == 0


def test_frequency_penalty_counts_every_time_and_only_output() -> None:
    params = SamplingParams(frequency_penalty=0.5)
    assert draw(params, row(3, 1.9), history=[0, 0, 0], prompt_length=2).token == 0
    assert draw(params, row(3, 1.9), history=[0, 0, 0], prompt_length=0).token == 1


def test_bias_comes_before_the_repetition_penalty() -> None:
    """(1 + 4) / 2 = 2.5 wins over 2.2; after the penalty it would be 1 / 2 + 4 = 4.5 and win over 3 too."""
    params = SamplingParams(logit_bias=((0, 4.0),), repetition_penalty=2.0)
    assert draw(params, row(1, 2.2), history=[0], prompt_length=1).token == 0
    assert draw(params, row(1, 3), history=[0], prompt_length=1).token == 1


def test_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"token 4.*0 to 3"):
        Sampler(SamplingParams(logit_bias=((4, 1.0),)), 4, NO_EOS)


@pytest.mark.parametrize("field", [{"logit_bias": ((1, 0.0),) * 1025}, {"stop_ids": (1,) * 65}])
def test_more_than_a_peer_takes_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="at most 1024 and 64"):
        SamplingParams(**field)


def test_deterministic_switches_every_processor_off() -> None:
    params = replace(LAWS["all"], deterministic=True, ignore_eos=True)
    for position in range(20):
        drawn = draw(params, row(0, 5, 9, 9), position, [2, 2], 0, frozenset({2}))
        assert drawn == Drawn(2, None, None)


def test_ignored_end_tokens_are_never_drawn() -> None:
    params = replace(HOT, ignore_eos=True, logit_bias=((1, 100.0),))
    for temperature in (0.0, 1.0):
        tokens = {
            draw(replace(params, temperature=temperature), row(0, 9, 1), position, eos_ids=frozenset({1, 77})).token
            for position in range(40)
        }
        assert 1 not in tokens
    with pytest.raises(BadRequest, match="ignore_eos"):
        Sampler(params, 2, frozenset({0, 1}))


def test_stop_ids_and_end_tokens_end_the_text_unless_ignored() -> None:
    obeys = Sampler(SamplingParams(stop_ids=(5,)), 10, frozenset({7}))
    ignores = Sampler(SamplingParams(stop_ids=(5,), ignore_eos=True), 10, frozenset({7}))
    assert [token for token in range(10) if obeys.is_stop_id(token)] == [5, 7]
    assert [token for token in range(10) if ignores.is_stop_id(token)] == [5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), HOT, SamplingParams(deterministic=True)])
def test_nan_and_inf_are_corruption(bad: float, params: SamplingParams) -> None:
    with pytest.raises(Corruption, match=r"1 of the 3 logits of position 9"):
        draw(params, row(1, bad, 2), 9)


def test_a_row_of_another_length_is_corruption() -> None:
    with pytest.raises(Corruption, match=r"shape \(3,\), not \(4,\)"):
        Sampler(SamplingParams(), 4, NO_EOS).draw(row(1, 2, 3), 0, [], 0)


def test_top_k_keeps_exactly_k_lowest_ids_first() -> None:
    assert keep_top_k(np.array([1.0, 2.0, 2.0, 0.0, 2.0]), 2).tolist() == [1, 2]
    assert keep_top_k(np.array([1.0, 2.0, 2.0, 0.0, 2.0]), 4).tolist() == [0, 1, 2, 4]
    assert keep_top_k(np.array([1.0, 2.0]), 9).tolist() == [0, 1]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    scores = np.log([0.125, 0.5, 0.25, 0.125])
    kept = {p: keep_top_p(scores, p).tolist() for p in (1e-9, 0.49, 0.51, 0.74, 0.76, 0.87, 0.88)}
    assert kept[1e-9] == kept[0.49] == [1]
    assert kept[0.51] == kept[0.74] == [1, 2]
    assert kept[0.76] == kept[0.87] == [0, 1, 2]  # ids 0 and 3 are equally likely: the lower one enters
    assert kept[0.88] == [0, 1, 2, 3]


def test_top_p_of_equal_scores_takes_the_lowest_ids() -> None:
    scores = np.zeros(1000)
    assert keep_top_p(scores, 1e-9).tolist() == [0]
    assert keep_top_p(scores, 0.2495).tolist() == list(range(250))
    assert keep_top_p(scores, 1 - 2**-53).size == 1000


def test_top_p_survives_scores_beyond_every_probability() -> None:
    assert keep_top_p(np.array([-1e308, 0.0, -800.0]), 0.999).tolist() == [1]


@given(st.lists(st.floats(-30, 30, width=16), min_size=1, max_size=200), st.floats(1e-6, 1 - 1e-6))
@settings(max_examples=200, deadline=None)
def test_top_p_agrees_with_sorting_everything(scores: list[float], top_p: float) -> None:
    """The histogram is a short cut: it keeps what the definition keeps (either count where a sum rounds to top_p)."""
    ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    weights = [math.exp(scores[index] - max(scores)) for index in ranked]
    target = top_p * math.fsum(weights)
    kept = keep_top_p(np.array(scores), top_p).tolist()
    assert kept == sorted(ranked[: len(kept)])
    assert math.fsum(weights[: len(kept)]) >= target * (1 - 1e-12)
    assert len(kept) == 1 or math.fsum(weights[: len(kept) - 1]) < target * (1 + 1e-12)


@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.97])
def test_top_p_of_a_crowded_row_agrees_with_sorting_everything(top_p: float) -> None:
    """Many entries share each bin of the histogram."""
    scores = np.random.default_rng(1).normal(0, 0.1, 30_000)
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order])
    size = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
    assert np.array_equal(keep_top_p(scores, top_p), np.sort(order[:size]))


def test_min_p_is_relative_to_the_likeliest() -> None:
    scores = np.log([0.5, 0.06, 0.04, 0.4])
    assert keep_min_p(scores, 0.1).tolist() == [0, 1, 3]
    assert keep_min_p(scores, 1.0).tolist() == [0]


def test_logprobs_are_of_the_raw_logits() -> None:
    """Penalties, bias and temperature choose the token; the log probabilities stay what the model said."""
    params = SamplingParams(temperature=0.0, logit_bias=((3, 100.0),), logprobs=2)
    drawn = draw(params, row(*np.log([0.25, 0.25, 0.4, 0.1])))
    assert drawn.token == 3
    assert drawn.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert drawn.top is not None
    assert [token for token, _ in drawn.top] == [2, 0]
    assert [p for _, p in drawn.top] == pytest.approx([math.log(0.4), math.log(0.25)], abs=1e-6)


def test_logprobs_zero_reports_the_token_alone_and_more_than_the_vocabulary_reports_all() -> None:
    assert draw(SamplingParams(logprobs=0), row(1, 2)).top == ()
    top = draw(SamplingParams(logprobs=20), row(1, 2)).top
    assert top is not None
    assert [token for token, _ in top] == [1, 0]


PARAMS = st.builds(
    partial(SamplingParams, ignore_eos=True),
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 100.0]),
    top_p=st.floats(1e-9, 1.0),
    top_k=st.integers(0, 12),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.floats(1e-3, 1e3),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
)


@given(
    params=PARAMS,
    # No values near the smallest float: divided by a temperature they fall to zero, and are then ties.
    logits=st.lists(st.floats(-1e3, 1e3, width=32).map(lambda x: round(x, 3)), min_size=10, max_size=10),
    history=st.lists(st.integers(0, 9), max_size=12),
    position=st.integers(0, 2**40),
)
@settings(max_examples=300, deadline=None)
def test_a_masked_token_is_never_drawn(
    params: SamplingParams, logits: list[float], history: list[int], position: int
) -> None:
    """Masked: an ignored end token, and whatever top-k leaves out (checked where nothing else moves the scores)."""
    token = draw(params, row(*logits), position, history, len(history) // 2, frozenset({0, 4})).token
    assert token not in (0, 4)
    bare = replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, ignore_eos=False)
    token = draw(bare, row(*logits), position).token
    assert sorted(range(10), key=lambda v: (-logits[v], v)).index(token) < (bare.top_k or 10)


def test_whole_numbers_of_numpy_are_taken() -> None:
    given: dict[str, Any] = {
        "max_tokens": np.int64(3),
        "top_k": np.int32(2),
        "seed": np.uint64(7),
        "stop_ids": (np.int8(5),),
        "logit_bias": ((np.int64(4), 1.0),),
    }
    params = SamplingParams(**given)
    assert params == SamplingParams(max_tokens=3, top_k=2, seed=7, stop_ids=(5,), logit_bias=((4, 1.0),))
    numbers = (params.max_tokens, params.top_k, params.seed, *params.stop_ids, params.logit_bias[0][0])
    assert {type(number) for number in numbers} == {int}
    wrong: tuple[Any, ...] = (np.float64(3.0), 3.0, True, np.bool_(True), "3")
    for value in wrong:
        with pytest.raises(BadRequest, match="whole number"):
            SamplingParams(max_tokens=value)
