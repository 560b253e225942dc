"""Draw a token from a row of logits: the last thing on a token's path. Knows no model, session or network.

A draw is a pure function of (params, logits, position, history): whether the origin or the last hop calls it, in
whatever order and however often, gets the same token. Its noise is *position-keyed*: entry v of a position's noise
depends only on (seed, position, v), so a drafted token is verified by drawing again and comparing (docs/exactness.md),
with no state to lose.

    token = argmax over the survivors of (score / temperature + Gumbel(seed, position, token))

which is an exact sample of softmax(score / temperature) over the survivors (Gumbel 1954; Maddison, Tarlow and Minka
2014, "A* Sampling"). No bit of a draw depends on the CPU: logarithms and exponentials are the engine's own, in a fixed order
of IEEE operations (docs/arithmetic.md); sums of weights are of whole numbers, so exact. numpy's logarithm only says which
candidates are worth an exact one. Shapes: V vocabulary, N the candidates still in play (always in ascending order of id).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from manyhands.core import SamplingParams
from manyhands.engine import library
from manyhands.errors import BadRequest, Corruption

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Logits = npt.NDArray[np.float32]
# How far numpy's noise may be from the exact one, with room to spare: its logarithms err in the last bits of numbers below 40.
_NEAR = 1e-9
_DEEPEST = 100.0  # beyond it a weight is nothing


class Constraint(Protocol):
    """Which tokens may come next, say by a grammar (text/grammar.py)."""

    def allowed(self, output: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """The ids that may follow the generated ids `output`, [V] with at least one set; None: all of them.

        A function of `output` alone, whatever was asked before: drafts are tried and dropped again.
        """

    def copy(self) -> "Constraint":
        """The same, for another thread."""


def gumbel(seed: int, position: int, vocab_size: int) -> Floats:
    """Return the Gumbel(0, 1) noise of one position, [V] float64, all finite, in [-3.61, 36.74].

    Entry v depends on (seed, position, v) only: a smaller `vocab_size` gives a prefix. Seed and position lie in
    [0, 2^64). The same on every machine.
    """
    return _to_gumbel(_random_bits(seed, position, vocab_size))


def _noisiest(scores_N: Floats, bits_N: npt.NDArray[np.uint64]) -> int:
    """Return the index of the highest score plus noise, the lowest of equals: noise is exact for those near the top alone."""
    likely_N = scores_N + _near_gumbel(bits_N)
    near = np.flatnonzero(likely_N >= likely_N.max() - _NEAR)
    if near.size == 1:
        return int(near[0])
    return int(near[np.argmax(scores_N[near] + _to_gumbel(bits_N[near]))])


def _random_bits(seed: int, position: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the first `count` words of the position's own stream.

    Philox4x64-10 (Salmon et al. 2011) keyed by the seed. The position is the second word of the 256-bit counter and the
    block number the first, so two positions share no block below 2^64 blocks. NEP 19 keeps raw streams stable.
    """
    return np.random.Philox(key=seed, counter=position << 64).random_raw(count)


def _to_gumbel(bits_N: npt.NDArray[np.uint64]) -> Floats:
    """Turn random words into noise: u = max(top 53 bits, 1) / 2^53 lies in (0, 1), and u - 1 is exact in float64."""
    return -library.double("log", -library.double("log", _uniform(bits_N)))


def _uniform(bits_N: npt.NDArray[np.uint64]) -> Floats:
    return np.asarray(np.maximum(bits_N >> np.uint64(11), np.uint64(1)) * 2.0**-53)


def _near_gumbel(bits_N: npt.NDArray[np.uint64]) -> Floats:
    """Return _to_gumbel within _NEAR, by numpy's logarithm, which is faster."""
    uniform_N = _uniform(bits_N)
    noise_N = np.log(uniform_N, out=uniform_N)
    noise_N = np.log(np.negative(noise_N, out=noise_N), out=noise_N)
    return np.negative(noise_N, out=noise_N)


def keep_top_k(scores_N: Floats, top_k: int) -> Indices:
    """Return the indices, ascending, of the `top_k` highest scores; among equals the lowest index is kept."""
    if top_k >= scores_N.size:
        return np.arange(scores_N.size)
    cut = scores_N.size - top_k
    kth = np.partition(scores_N, cut)[cut]
    above = np.flatnonzero(scores_N > kth)
    equal = np.flatnonzero(scores_N == kth)[: top_k - above.size]
    return np.sort(np.concatenate([above, equal]))


def keep_top_p(scores_N: Floats, top_p: float) -> Indices:
    """Return the indices, ascending, of the smallest set of likeliest entries whose probability reaches `top_p` < 1.

    Never empty; among equal scores the lowest index enters first. Entries below half of (1 - top_p) / N of the total
    hold less than 1 - top_p together, so the set ends before them: in a peaked row that leaves hundreds to look at.
    """
    depth_N = scores_N.max() - scores_N
    weights_N = _weights(depth_N)
    total = float(weights_N.sum())
    likely = np.flatnonzero(weights_N >= 0.5 * (1 - top_p) / scores_N.size * total)
    return likely[_reach(depth_N[likely], weights_N[likely], top_p * total)]


def _weights(depth_N: Floats) -> Floats:
    """Return exp(-depth) as whole numbers, 2^52 or less in all, so that any sum of them is exact in any order."""
    low_N = np.minimum(depth_N, _DEEPEST).astype(np.float32)
    return np.asarray(np.rint(library.apply(_back_end(), "exp", -low_N) * _one(depth_N.size)), np.float64)


def _one(count: int) -> float:
    """What stands for a weight of 1 beside so many others."""
    return 2.0 ** (52 - count.bit_length())


@cache
def _back_end() -> str:
    """Which back end computes exponentials: all give the same bits."""
    return library.supported()[0]


def _reach(depth_N: Floats, weights_N: Floats, target: float) -> Indices:
    """Return the indices, ascending, of the smallest set of shallow entries that weighs `target`; ties by index.

    A histogram over depth (bins are monotone in it) finds where the set ends, so that only that bin is sorted: for a
    flat row of 152k, 12 ms instead of 27 ms for sorting all of it (bench/sample.py, 20 Nov).
    """
    bins_N = (depth_N * (1023 / max(float(depth_N.max()), 1e-9))).astype(np.intp)
    masses = np.cumsum(np.bincount(bins_N, weights_N))
    last = min(int(np.searchsorted(masses, target)), masses.size - 1)
    edge = np.flatnonzero(bins_N == last)
    edge = edge[np.argsort(depth_N[edge], kind="stable")]
    reached = (masses[last - 1] if last else 0.0) + np.cumsum(weights_N[edge])
    size = int(np.searchsorted(reached, target)) + 1
    return np.sort(np.concatenate([np.flatnonzero(bins_N < last), edge[:size]]))


def keep_min_p(scores_N: Floats, min_p: float) -> Indices:
    """Return the indices, ascending, of entries at least `min_p` (above 0) times as likely as the likeliest."""
    return np.flatnonzero(scores_N >= scores_N.max() + library.double("log", np.array([min_p]))[0])


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and its log probability with the likeliest alternatives (best first) where the request asked for them.

    Log probabilities are the log-softmax, in float64, of the *raw* logits: what the model said, before bias, penalties,
    temperature and truncation, so a drawn token may be missing from `top`. Both are None without `params.logprobs`.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


class Sampler:
    """Draws the tokens of one request. Holds no state between draws.

    Order: logit_bias, repetition penalty, presence and frequency penalty, ignore_eos, constraint, temperature, top_k,
    top_p, min_p, noise. Each truncation sees the renormalised survivors of the one before. Temperature 0 is the argmax
    after the penalties, the lowest id winning ties. `deterministic` is the argmax of the raw logits, every processor off.
    `ignore_eos` sets the end tokens to -inf, so they are never drawn (nor, by is_stop_id, obeyed).
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        eos_ids: frozenset[int],
        constraint: Constraint | None = None,
    ) -> None:
        """Raise BadRequest for a bias outside the vocabulary, or if ignore_eos leaves nothing to draw."""
        if constraint is not None and (params.ignore_eos or params.deterministic):
            raise BadRequest(
                "a grammar goes with neither ignore_eos nor deterministic: it must end, and it is a processor"
            )
        self._constraint = constraint
        self._vocab_size = vocab_size
        self._logprobs = params.logprobs
        self._stop_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else eos_ids)
        self._params = SamplingParams() if params.deterministic else params
        self._bias_ids, self._biases = _read_bias(self._params, vocab_size)
        self._banned_ids = _read_banned(self._params, vocab_size, eos_ids)
        self._filters = _read_filters(self._params)
        is_adjusted = self._bias_ids.size or self._banned_ids.size or _has_penalty(self._params)
        self._is_raw = not is_adjusted and constraint is None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def __repr__(self) -> str:
        return f"Sampler({self._params}, vocab_size={self._vocab_size})"

    def draw(self, logits_V: Logits, position: int, history: Sequence[int], prompt_length: int) -> Drawn:
        """Draw the token at `position`.

        `history` holds the ids before `position`, prompt first (`prompt_length` of them), committed and drafted alike;
        it is read only where a penalty or a constraint is on. Raises Corruption if the row is not V finite numbers.
        Inputs are not changed.
        """
        row_V = _read_row(logits_V, self._vocab_size, position)
        scores_V = row_V if self._is_raw else self._adjust(row_V, history, prompt_length)
        token = int(scores_V.argmax()) if self._params.temperature == 0 else self._draw_noisy(scores_V, position)
        if self._logprobs is None:
            return Drawn(token, None, None)
        return _with_logprobs(token, row_V, self._logprobs)

    def is_stop_id(self, token: int) -> bool:
        """Say whether this token ends the text: a stop id of the request, or an end token that is not ignored."""
        return token in self._stop_ids

    def _adjust(self, row_V: npt.NDArray[np.float32], history: Sequence[int], prompt_length: int) -> Floats:
        """Return a new row [V] with bias and penalties applied and the banned ids at -inf."""
        scores_V = row_V.astype(np.float64)
        scores_V[self._bias_ids] += self._biases
        if _has_penalty(self._params):
            ids = np.asarray(history, dtype=np.intp)
            _penalise_repetition(scores_V, ids, self._params.repetition_penalty)
            _penalise_output(scores_V, ids[prompt_length:], self._params)
        scores_V[self._banned_ids] = -np.inf
        allowed_V = None if self._constraint is None else self._constraint.allowed(history[prompt_length:])
        if allowed_V is not None:
            scores_V[~allowed_V] = -np.inf
        return scores_V

    def _draw_noisy(self, scores_V: npt.NDArray[np.floating], position: int) -> int:
        """Return the survivor with the highest tempered score plus noise; noise is transformed for survivors only."""
        seed = self._params.seed
        with np.errstate(over="ignore"):  # a tiny temperature: -inf is the right limit
            tempered_V = np.subtract(scores_V, scores_V.max(), dtype=np.float64)
            tempered_V /= self._params.temperature
        if not self._filters:
            return _noisiest(tempered_V, _random_bits(seed, position, self._vocab_size))
        ids_N = self._survivors(tempered_V)
        bits_N = _random_bits(seed, position, int(ids_N[-1]) + 1)[ids_N]
        return int(ids_N[_noisiest(tempered_V[ids_N], bits_N)])

    def _survivors(self, scores_V: Floats) -> Indices:
        """Return the ids, ascending and at least one, that may be drawn."""
        ids_N = np.flatnonzero(scores_V > -np.inf)
        for keep in self._filters:
            scores_N = scores_V if ids_N.size == self._vocab_size else scores_V[ids_N]
            ids_N = ids_N[keep(scores_N)]
        return ids_N


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _read_bias(params: SamplingParams, vocab_size: int) -> tuple[Indices, Floats]:
    """Split the bias into ids and values, the last one winning where an id repeats. Raises BadRequest."""
    biases = dict(params.logit_bias)
    for token in biases:
        if token >= vocab_size:
            raise BadRequest(f"logit_bias names token {token}; this model has tokens 0 to {vocab_size - 1}")
    return np.array(list(biases), dtype=np.intp), np.array(list(biases.values()), dtype=np.float64)


def _read_banned(params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]) -> Indices:
    """Return the ids that must never be drawn. Raises BadRequest if no other id is left."""
    banned = sorted(token for token in eos_ids if token < vocab_size) if params.ignore_eos else []
    if len(banned) == vocab_size:
        raise BadRequest("ignore_eos leaves nothing to draw: every token of this model is an end token; switch it off")
    return np.array(banned, dtype=np.intp)


def _read_filters(params: SamplingParams) -> tuple[Callable[[Floats], Indices], ...]:
    """Return the truncations that are on, in the order they run."""
    filters: list[Callable[[Floats], Indices]] = []
    if params.top_k > 0:
        filters.append(partial(keep_top_k, top_k=params.top_k))
    if params.top_p < 1:
        filters.append(partial(keep_top_p, top_p=params.top_p))
    if params.min_p > 0:
        filters.append(partial(keep_min_p, min_p=params.min_p))
    return tuple(filters)


def _read_row(logits_V: Logits, vocab_size: int, position: int) -> npt.NDArray[np.float32]:
    """Return the row as float32. Raises Corruption unless it is V finite numbers."""
    row_V = np.asarray(logits_V, dtype=np.float32)
    if row_V.shape != (vocab_size,):
        raise Corruption(f"the logits of position {position} have shape {row_V.shape}, not ({vocab_size},)")
    finite_V = np.isfinite(row_V)
    if not finite_V.all():
        bad = vocab_size - int(np.count_nonzero(finite_V))
        raise Corruption(f"{bad} of the {vocab_size} logits of position {position} are NaN or Inf: a hop is at fault")
    return row_V


def _penalise_repetition(scores_V: Floats, ids: Indices, penalty: float) -> None:
    """Divide the positive and multiply the negative scores of seen ids by `penalty`, in place, once per id.

    Rule: CTRL (Keskar et al. 2019), as in transformers' RepetitionPenaltyLogitsProcessor. A repeated id writes the
    same value twice.
    """
    seen = scores_V[ids]
    scores_V[ids] = np.where(seen < 0, seen * penalty, seen / penalty)


def _penalise_output(scores_V: Floats, output_ids: Indices, params: SamplingParams) -> None:
    """Subtract presence + frequency * count from the scores of generated ids, in place (OpenAI's rule: output only)."""
    ids, counts = np.unique(output_ids, return_counts=True)
    scores_V[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _with_logprobs(token: int, row_V: npt.NDArray[np.float32], num_top: int) -> Drawn:
    """Attach the raw log probability of `token` and of the `num_top` likeliest ids (best first, ties by id)."""
    logprobs_V = row_V.astype(np.float64)
    logprobs_V -= logprobs_V.max()
    total = _weights(-logprobs_V).sum() / _one(logprobs_V.size)
    logprobs_V -= library.double("log", np.array([total]))[0]
    best = keep_top_k(logprobs_V, num_top) if num_top else np.empty(0, dtype=np.intp)
    order = best[np.argsort(-logprobs_V[best], kind="stable")]
    return Drawn(token, float(logprobs_V[token]), tuple((int(v), float(logprobs_V[v])) for v in order))
