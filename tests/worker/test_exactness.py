"""The promise of the project on the model's side: a position's bits do not depend on how its row was computed.

Every family, in bf16 and fp32, on random checkpoints whose weights make neighbouring
logits differ. The reference is the whole model on one thread in one step. Everything else (cuts, chunks, windows, company,
threads, back ends) must give its very bits.
"""

from itertools import permutations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from manyhands.core import Precision
from manyhands.engine import library
from manyhands.testing.tiny import EOS, EVERY_FAMILY, FAMILIES, WINDOW, make_tiny
from tests.engine.oracle import stock_model
from tests.nightly import daily
from tests.worker.pipeline import Feed, Loader, Logits, Pipeline, pieces, random_ids, threads

LAYERS = 6
LENGTH = 68  # positions: crosses the sliding window (24) and a chunk of 64
IDS = random_ids(LENGTH, seed=1)
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
NATIVE = library.supported()[0]

# name -> family and what its checkpoint is made with. Odd widths: no vector, block or tile fits them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "gemma3 of one key head": ("gemma3_text", {"num_key_value_heads": 1}),
    "qwen3 at 96": ("qwen3", {"hidden": 96}),
    "llama of odd widths": ("llama", {"hidden_size": 72, "intermediate_size": 88, "head_dim": 24}),
    "llama of prime widths": ("llama", {"vocab": 307, "hidden_size": 76, "intermediate_size": 101, "head_dim": 14}),
}


class Subject(NamedTuple):
    """One checkpoint in one precision, and its reference logits [LENGTH, vocab]."""

    loader: Loader
    whole: Pipeline
    reference: Logits


OTHERS = [family for family in EVERY_FAMILY if family not in FAMILIES]


@pytest.fixture(scope="module", params=daily(MODELS, OTHERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, options = MODELS.get(request.param, (request.param, {}))
    return make_tiny(family, tmp_path_factory.mktemp("exact") / "model", layers=LAYERS, seed=3, **options)


@pytest.fixture(scope="module", params=PRECISIONS)
def subject(request: pytest.FixtureRequest, folder: Path) -> Subject:
    loader = Loader(folder, request.param, NATIVE)
    whole = loader.cut(0, LAYERS)
    return Subject(loader, whole, whole.run(IDS, [LENGTH]))


def assert_same_bits(got: Logits, want: Logits) -> None:
    if not np.array_equal(got, want):
        rows = np.flatnonzero((got != want).any(1)).tolist()
        largest = float(np.abs(got - want).max())
        raise AssertionError(f"rows {rows[:8]} of {len(want)} differ by up to {largest:.2g}")


def test_the_logits_are_not_degenerate(subject: Subject) -> None:
    """Equal bits prove something only where logits vary: by row, by token, and without saturating a soft cap."""
    rows = torch.from_numpy(subject.reference)
    top = rows.topk(2).values
    assert bool((rows.std(1) > 0.05).all()), "cohere2 scales its logits down to 0.09"
    assert float((top[:, 0] - top[:, 1]).median()) > 0.01
    assert len(set(rows.argmax(1).tolist())) > LENGTH // 6
    assert float(rows.abs().max()) < 29, "gemma2 caps logits at 30"


@pytest.mark.parametrize("edges", daily([[0, 4, 6], [0, 1, 2, 4, 6]], [[0, 1, 6], [0, 1, 4, 6]]), ids=str)
def test_any_cut_gives_the_same_bits(subject: Subject, edges: list[int]) -> None:
    """Layers compute the same wherever they live; with the uncut reference, 1 to 4 spans."""
    assert_same_bits(subject.loader.cut(*edges).run(IDS, [LENGTH]), subject.reference)


@pytest.mark.parametrize("size", daily([1, 7, 64], [16]))
def test_prefill_in_any_chunks_gives_the_same_bits(subject: Subject, size: int) -> None:
    """A row's bits do not depend on the rows that share its step."""
    length = LENGTH if size > 1 else WINDOW + 6
    assert_same_bits(subject.whole.run(IDS[:length], pieces(length, size)), subject.reference[:length])


@pytest.mark.parametrize("size", daily([3, 9], [2, 5]))
def test_verify_windows_and_rollback_give_the_same_bits(subject: Subject, size: int) -> None:
    """A window of wrong drafts leaves no trace: the next step starts earlier and overwrites them. Four windows, over 64."""
    pipeline = subject.loader.cut(0, 1, 4, 6)
    caches = pipeline.session(LENGTH + size)
    at = LENGTH - 4 * size
    got = [pipeline.step([Feed(caches, 0, IDS[:at])])[0]]
    while at < LENGTH:
        right = IDS[at : at + size]
        wrong = [*right[:1], *((i + 1) % 256 for i in IDS[at + 1 : at + size]), *random_ids(1, seed=at)]
        first = pipeline.step([Feed(caches, at, wrong)])[0][:1]
        again = pipeline.step([Feed(caches, at, right)])[0]
        assert_same_bits(first, again[:1])
        got.append(again)
        at += len(right)
    assert_same_bits(np.concatenate(got), subject.reference)


def test_other_sessions_in_a_ragged_batch_change_no_bit(subject: Subject) -> None:
    """Decoding beside a longer session's decode, window or prefill, before, between and behind them, is decoding alone."""
    pipeline = subject.whole
    caches, long, short = pipeline.session(), pipeline.session(200), pipeline.session()
    pipeline.step([Feed(long, 0, random_ids(90, seed=2))])
    begin = LENGTH - 9
    got = [pipeline.step([Feed(short, 0, random_ids(5, seed=4)), Feed(caches, 0, IDS[:begin])])[1]]
    for turn, (size, place) in enumerate(product((1, 3, 17), range(3))):
        mine = Feed(caches, begin + turn, IDS[begin + turn : begin + turn + 1])
        others = [Feed(long, 90 + turn, random_ids(size, seed=turn)), Feed(short, 5, IDS[:2])]
        feeds = [*others[:place], mine, *others[place:]]
        got.append(pipeline.step(feeds)[place])
    assert_same_bits(np.concatenate(got), subject.reference)


@pytest.mark.parametrize("count", [2, 4])
def test_more_threads_give_the_bits_of_one(subject: Subject, count: int) -> None:
    """Work is split among threads by blocks that the number of rows does not move."""
    for sizes in ([LENGTH], pieces(LENGTH, 9), [62] + [1] * 6):
        assert_same_bits(subject.loader.cut(0, 1, 4, 6).on(count).run(IDS, sizes), subject.reference)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_back_ends_give_the_same_bits(folder: Path, precision: Precision) -> None:
    """A route may be served by any mix of them: each before each other one, which has the ends too."""
    loaders = {back_end: Loader(folder, precision, back_end) for back_end in library.supported()}
    want = loaders[NATIVE].cut(0, LAYERS).run(IDS, [LENGTH])
    for turn, (first, second) in enumerate(permutations(loaders, 2)):
        before = {name: library.calls(name) for name in loaders}
        other = loaders[second]
        mixed = Pipeline([*loaders[first].cut(0, 2).spans, *other.cut(2, LAYERS).spans], other.ends)
        assert_same_bits(mixed.on((1, 2, 4)[turn % 3]).run(IDS, [60, 1, 7]), want)
        assert {name for name in loaders if library.calls(name) > before[name]} == {first, second}, "no other computed"


def test_greedy_ids_are_those_of_transformers(folder: Path) -> None:
    """In fp32, 24 tokens equal transformers' own generate: eager attention, stock linears, no code of ours."""
    prompt = torch.tensor(IDS[: WINDOW + 8])
    logging.disable_progress_bar()
    wanted = stock_model(folder).generate(
        prompt[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=None,
        pad_token_id=EOS,
    )[0, len(prompt) :]
    assert Loader(folder, "fp32", NATIVE).cut(0, 2, LAYERS).greedy(prompt.tolist(), 24) == wanted.tolist()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_sessions_that_cross_key_blocks(family: str, precision: Precision, tmp_path: Path) -> None:
    """Keys are seen in blocks of 64: prefill and decode across the border give the bits of one step."""
    ids = random_ids(530, seed=8)
    folder = make_tiny(family, tmp_path, layers=2, seed=5)
    loader = Loader(folder, precision, NATIVE)
    want = loader.cut(0, 2).run(ids, [530])
    for sizes in ([100, 200, 200, 30], [505] + [1] * 10 + [5, 10]):
        assert_same_bits(loader.cut(0, 1, 2).run(ids, sizes), want)
    assert_same_bits(loader.cut(0, 2).on(2).run(ids, [511, 1, 1, 17]), want)


LONG = 4096
VECTORS = library.supported()[:-1] or [
    "scalar"
]  # plain C takes ten seconds of the processor for what they compute in a tenth of one


@pytest.mark.parametrize(
    ("family", "precision", "back_ends"),
    daily(
        [("llama", "bf16", VECTORS)],
        [(*pair, library.supported()) for pair in product(EVERY_FAMILY, PRECISIONS)],
    ),
)
def test_long_contexts_on_every_back_end(
    family: str, precision: Precision, back_ends: list[str], tmp_path: Path
) -> None:
    """4,096 positions: each back end has a cut, chunks and threads of its own, and takes back wrong windows at the end."""
    ids = random_ids(LONG, seed=9)
    folder = make_tiny(family, tmp_path, layers=2, seed=5, context=LONG)
    want = Loader(folder, precision, NATIVE).cut(0, 2).run(ids, [LONG])
    tail = 40  # positions in windows and one by one
    ways = [([0, 1, 2], 4, 256), ([0, 2], 2, 1000), ([0, 1, 2], 1, 512), ([0, 2], 4, 61)]
    for back_end, (edges, count, chunk) in zip(back_ends, ways, strict=False):
        pipeline = Loader(folder, precision, back_end).cut(*edges).on(count)
        caches, at = pipeline.session(LONG), LONG - tail
        got = [pipeline.run(ids[:at], pieces(at, chunk), caches)]
        for size in (1, 5, 1, 17, 1, 15):
            pipeline.step([Feed(caches, at, random_ids(size, seed=at))])
            got += pipeline.step([Feed(caches, at, ids[at : at + size])])
            at += size
        assert_same_bits(np.concatenate(got), want)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_layers_as_wide_as_real_ones(precision: Precision, tmp_path: Path) -> None:
    """Reductions over 1024 to 2816 columns (norms, products) take other kernels than tiny ones, and must not notice rows."""
    options: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    folder = make_tiny("llama", tmp_path, layers=1, seed=5, **options)
    want = Loader(folder, precision, NATIVE).cut(0, 1).run(IDS, [LENGTH])
    for back_end in library.supported():
        pipeline = Loader(folder, precision, back_end).cut(0, 1)
        assert_same_bits(pipeline.run(IDS, [40] + [1] * 5 + [3, 2, 18]), want)
        assert_same_bits(pipeline.on(2).run(IDS, [LENGTH]), want)
        assert_same_bits(pipeline.on(4).run(IDS, [17, 9, 5] + [1] * 37), want)


def test_these_tests_can_fail(tmp_path: Path) -> None:
    """Stock transformers fails them: its products (MKL) and its attention sum in an order that the row count decides.

    From which size on is a matter of the CPU: narrow models show it with AVX-512, wide ones with AVX2 too.
    """
    logging.disable_progress_bar()

    def differs(hidden: int) -> bool:
        folder = make_tiny("llama", tmp_path / str(hidden), layers=2, hidden=hidden, seed=3)
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with threads(1), torch.inference_mode():
            ids = torch.tensor(IDS)[None]
            want = stock(ids).logits[0]
            first = stock(ids[:, :40], use_cache=True)
            rest = stock(ids[:, 40:], past_key_values=first.past_key_values)
            single = stock(ids[:, :1]).logits[0]
        assert_close(single, want[:1])
        return not torch.equal(torch.cat([first.logits[0], rest.logits[0]]), want) or not torch.equal(single, want[:1])

    assert any(differs(hidden) for hidden in (64, 256, 1024))
