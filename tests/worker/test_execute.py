"""manyhands.worker.execute: one device step over segments of several sessions, and the thread it runs on."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from manyhands.core import SamplingParams, Span
from manyhands.engine.span import Piece, Rows
from manyhands.errors import BadRequest, Corruption, ProtocolError, StateGone
from manyhands.origin.sampler import Sampler
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.wire.attest_message import Root
from manyhands.wire.rows import rows_payload
from manyhands.worker.bounds import MAX_NORM, MIN_SEEN, RowBounds
from manyhands.worker.execute import Device, Result, SpanModel, Work, device_of_process
from manyhands.worker.leaves import HopLeaves
from manyhands.worker.runner import load_ends
from manyhands.worker.thread import computing, current_scope
from tests.waiting import GUARD_S
from tests.worker.hop import hidden
from tests.worker.pipeline import random_ids
from tests.worker.tensors import decode_tensor, encode_tensor

LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("execute") / "llama", layers=LAYERS, seed=4)


@pytest.fixture(scope="module")
def inner(folder: Path) -> SpanModel:
    return SpanModel(folder, Span(1, 3), "bf16", False)


@pytest.fixture(scope="module")
def last(folder: Path) -> SpanModel:
    """The last span, with the head."""
    return SpanModel(folder, Span(2, LAYERS), "bf16", True)


def work(model: SpanModel, rows: Tensor, position: int = 0, *, is_last: bool = False, reply_from: int = 0) -> Work:
    cache = model.runner.new_cache(64)
    cache.length = position
    return Work(cache, model.span, position, rows.shape[0], reply_from, encode_tensor(rows), None, is_last)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v4"])
def test_a_session_that_cannot_go_back_fails_alone(family: str, tmp_path: Path) -> None:
    """In a batch with others, and with one that goes back as far as it can."""
    model = SpanModel(make_tiny(family, tmp_path / family, seed=3), Span(1, 3), "bf16", False)
    rows = torch.randn(300, model.hidden_size, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    caches = [model.runner.new_cache(512) for _ in range(3)]

    def at(number: int, position: int, count: int) -> Work:
        payload = encode_tensor(rows[position : position + count])
        return Work(caches[number], model.span, position, count, 0, payload, None, False)

    first = [tensor(outcome) for outcome in model.run([at(number, 0, 300) for number in range(3)])]
    assert caches[1].reachable(40) < 40 and caches[2].reachable(280) == 280
    beside, gone, back = model.run([at(0, 290, 10), at(1, 40, 8), at(2, 280, 5)])
    assert isinstance(gone, StateGone) and caches[1].length == 300
    assert torch.equal(tensor(beside), first[0][290:]) and torch.equal(tensor(back), first[2][280:285])
    with pytest.raises(StateGone):
        model.runner.step(bytes(8 * 2 * model.hidden_size), [Piece(caches[1], 40, 8)], 1)


def num_threads() -> int:
    """Of the device that the calling thread computes for."""
    scope = current_scope()
    assert scope is not None
    return scope.num_threads


def result(outcome: Result | Exception) -> Result:
    assert isinstance(outcome, Result), outcome
    return outcome


def tensor(outcome: Result | Exception) -> Tensor:
    got = result(outcome)
    assert got.payload is not None
    return decode_tensor(got.payload, got.count)


def test_segments_come_back_in_order_and_as_if_alone(inner: SpanModel) -> None:
    """Each result belongs to its work, whatever its length and its neighbours."""
    parts = [hidden(1, 1), hidden(7, 2), hidden(2, 3)]
    alone = [tensor(inner.run([work(inner, rows)])[0]) for rows in parts]
    works = [work(inner, rows) for rows in parts]
    for outcome, one, want in zip(inner.run(works), works, alone, strict=True):
        assert torch.equal(tensor(outcome), want)
        assert result(outcome).content == "hidden" and one.cache.length == one.count


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2 * MAX_NORM])
def test_numbers_that_no_model_makes_are_refused_before_computing(
    inner: SpanModel, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN, Inf and absurd magnitudes; the same step still computes the others, and the cache stays clean."""
    stepped: list[Piece] = []
    plain = inner.runner.step

    def noted(rows: bytes, pieces: Sequence[Piece], threads: int) -> Rows:
        stepped.extend(pieces)
        return plain(rows, pieces, threads)

    monkeypatch.setattr(inner.runner, "step", noted)
    bad, good = hidden(5, 1), hidden(3, 2)
    want = tensor(inner.run([work(inner, good)])[0])
    bad[3, 7] = value
    works = [work(inner, bad), work(inner, good)]
    outcomes = inner.run(works)
    assert isinstance(outcomes[0], Corruption) and torch.equal(tensor(outcomes[1]), want)
    assert works[0].cache.length == 0 and works[0].cache not in [piece.cache for piece in stepped]
    assert isinstance(inner.run([works[0]])[0], Corruption), "also alone"


def test_rows_of_another_order_than_before_are_refused(inner: SpanModel) -> None:
    """Zeros at once, others once there is something to compare with; what the origin sends is judged by no session."""
    bounds = RowBounds()
    for rows in (hidden(MIN_SEEN, 1), hidden(1, 2) * 5):
        one = work(inner, rows)
        one.bounds = bounds
        result(inner.run([one])[0])
    for bad in (hidden(2, 3) * 1000, hidden(2, 3) / 1000, torch.cat([hidden(1, 3), hidden(1, 4) * 0])):
        one = work(inner, bad)
        one.bounds = bounds
        assert isinstance(inner.run([one])[0], Corruption) and one.cache.length == 0
        result(inner.run([work(inner, bad)])[0])


def test_a_first_token_of_zeros_is_the_request_s_fault(inner: SpanModel) -> None:
    """Without biases it stays zero from layer to layer: an honest hop would be blamed for it by the next."""
    rows = hidden(3, 1)
    rows[0] = 0
    assert isinstance(inner.run([work(inner, rows)])[0], BadRequest)
    rows[0], rows[1] = 1, 0
    result(inner.run([work(inner, rows)])[0])


def test_a_step_may_repeat_but_not_skip(inner: SpanModel) -> None:
    """Positions up to the end of the cache are fine (rollback, retry); beyond would attend to nothing."""
    fine = work(inner, hidden(2), position=6)
    fine.cache.length = 9
    skips = work(inner, hidden(2), position=6)
    skips.cache.length = 5
    outcomes = inner.run([skips, fine])
    assert isinstance(outcomes[0], ProtocolError) and "skips ahead" in str(outcomes[0])
    assert result(outcomes[1]).position == 6 and fine.cache.length == 8


@pytest.mark.parametrize(
    ("position", "reply_from", "first", "count"),
    [(0, 0, 0, 6), (0, 4, 4, 2), (10, 3, 10, 6), (0, 6, 6, 0), (0, 90, 6, 0)],
)
def test_the_last_hop_sends_only_rows_that_are_wanted(
    inner: SpanModel, position: int, reply_from: int, first: int, count: int
) -> None:
    """Of a prefill the origin needs the last row alone; with none wanted a result only says how far it got."""
    one = work(inner, hidden(6), position, is_last=True, reply_from=reply_from)
    got = result(inner.run([one])[0])
    assert (got.position, got.count, got.payload is None) == (first, count, count == 0)
    inner_hop = result(inner.run([work(inner, hidden(6), position, reply_from=reply_from)])[0])
    assert inner_hop.count == 6, "an inner hop sends all rows on"


def test_ends_at_the_edges_embed_and_draw(folder: Path, last: SpanModel) -> None:
    """The first hop embeds ids; the last one gives logits, or draws with the position's noise: all as the origin would."""
    first, ends = SpanModel(folder, Span(0, 2), "bf16", True), load_ends(folder, "bf16", 1)
    ids = [int(i) for i in random_ids(5, seed=1)]
    embeds = Work(first.runner.new_cache(8), Span(0, 2), 0, 5, 0, None, tuple(ids), False)
    here = replace(work(first, hidden(5)), payload=rows_payload(ends.embed(ids), "bf16"))
    middle = tensor(first.run([embeds])[0])
    assert torch.equal(middle, tensor(first.run([here])[0]))

    plain = tensor(last.run([work(last, middle, is_last=True)])[0])
    wants_logits = work(last, middle, is_last=True)
    wants_logits.logits = True
    (got,) = last.run([wants_logits])
    logits = ends.logits(bytes(encode_tensor(plain).data), 5, 1)
    assert result(got).content == "logits" and np.array_equal(tensor(got).numpy(), logits)

    params = SamplingParams(temperature=1.2, seed=5, repetition_penalty=1.7)
    sampler = Sampler(params, last.vocab_size, frozenset())
    draws = work(last, middle, is_last=True, reply_from=2)
    draws.sampler, draws.ids, draws.history, draws.prompt_length = sampler, tuple(ids), (), 2
    (drawn,) = last.run([draws])
    want = [sampler.draw(logits[i], i + 1, ids[: i + 1], 2).token for i in (2, 3, 4)]
    assert result(drawn).content == "ids" and tensor(drawn)[:, 0].tolist() == want


def test_broken_weights_are_noticed_where_tokens_are_drawn(last: SpanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN logits fault the session that drew, not the step."""
    one, other = work(last, hidden(1), is_last=True), work(last, hidden(1), is_last=True)
    one.sampler, one.ids = Sampler(SamplingParams(), last.vocab_size, frozenset()), (3,)
    assert last.ends is not None
    nothing = np.full((1, last.vocab_size), np.nan, np.float32)
    monkeypatch.setattr(last.ends, "logits", lambda rows, count, threads: nothing)
    outcomes = last.run([one, other])
    assert isinstance(outcomes[0], Corruption) and isinstance(outcomes[1], Result)


@pytest.mark.parametrize(
    ("span", "embeds", "heads"), [((0, 1), True, False), ((1, 3), False, False), ((3, 4), False, True)]
)
def test_only_the_edges_load_ends(folder: Path, span: tuple[int, int], embeds: bool, heads: bool) -> None:
    """A first hop holds no head, a last one no embedding, an inner one neither."""
    model = SpanModel(folder, Span(*span), "bf16", True)
    assert (model.ends is not None) == (embeds or heads)
    if model.ends is not None and not embeds:
        with pytest.raises((AssertionError, TypeError)):
            model.ends.embed([1])
    if model.ends is not None and not heads:
        row = bytes(2 * model.hidden_size)
        with pytest.raises((AssertionError, TypeError)):
            assert model.ends.logits(row, 1, 1).shape == (1, model.vocab_size)


def test_a_device_is_one_thread_with_its_own_thread_count() -> None:
    """Everything runs on that thread, in order, and the loop goes on meanwhile; errors come back to the caller."""

    async def main() -> None:
        device = Device.start(1)
        release = threading.Event()
        order: list[int] = []

        def job(number: int) -> int:
            release.wait(GUARD_S)
            order.append(number)
            return threading.get_ident()

        jobs = [asyncio.ensure_future(device.run(lambda n=n: job(n))) for n in range(3)]  # type: ignore[misc]
        await asyncio.sleep(0)
        assert not order, "the loop is not blocked"
        release.set()
        threads = set(await asyncio.gather(*jobs))
        assert order == [0, 1, 2] and len(threads) == 1 and threads != {threading.get_ident()}
        assert await device.run(num_threads) == 1
        with pytest.raises(ZeroDivisionError):
            await device.run(lambda: 1 // 0)
        device.close()

    run_virtual(main())


def test_the_loop_s_thread_may_compute_where_it_is_there_for_that_and_the_device_is_idle() -> None:
    """Never beside another job of the device, not even one whose caller has gone."""

    async def main() -> None:
        loop_thread = threading.get_ident()
        with device_of_process(2) as device:
            await device.run(lambda: None)
            assert device.computes_here and num_threads() == 1
            assert await device.run(num_threads) == 2 and await device.run(threading.get_ident) != loop_thread

            begun, release = threading.Event(), threading.Event()

            def hold() -> None:
                begun.set()
                release.wait(GUARD_S)

            busy = device.run(hold)
            begun.wait(5)
            busy.cancel()
            await asyncio.sleep(0)
            assert not device.computes_here
            queued = device.run(threading.get_ident)
            release.set()
            assert await queued != loop_thread
        with computing(1):
            assert not device.computes_here, "it is closed"
            with pytest.raises(RuntimeError, match="closed"):
                await device.run(lambda: None)
        lone = Device.start(1)
        assert not lone.computes_here, "a library's loop is its user's"
        lone.close()

    asyncio.run(main())
    assert current_scope() is None


def test_rows_that_come_as_bytes_are_judged_one_by_one(inner: SpanModel) -> None:
    """A decode step of four sessions: one sends NaN, one too few bytes, one floats; the fourth gets what it gets alone."""
    good, nan = hidden(1, 2), hidden(1, 1)
    nan[0, 7] = torch.nan
    want = tensor(inner.run([work(inner, good, position=5)])[0])
    works = [work(inner, rows, position=5) for rows in (nan, hidden(1, 3), hidden(1, 4).float(), good)]
    assert works[1].payload is not None
    works[1].payload = works[1].payload._replace(data=bytes(126))
    outcomes = inner.run(works)
    assert [type(o) for o in outcomes] == [Corruption, ProtocolError, ProtocolError, Result]
    assert torch.equal(tensor(outcomes[3]), want)
    assert [w.cache.length for w in works] == [5, 5, 5, 6]


def test_steps_are_of_a_kind_if_they_take_as_long(
    folder: Path, inner: SpanModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None where something unknown may come on top: a prompt, a table to be worked out, a head."""
    one, same, later = (work(inner, hidden(1), position) for position in (32, 62, 63))
    assert inner.kind([one]) == inner.kind([same]) != inner.kind([later])
    assert inner.kind([one]) != inner.kind([one, same]) != inner.kind([work(inner, hidden(3), 32)])
    part = work(inner, hidden(1), 32)
    part.span = Span(1, 2)
    assert inner.kind([one]) != inner.kind([part]) and inner.kind([part, one]) != inner.kind([one, one])
    draws, says = work(inner, hidden(1), 32), work(inner, hidden(1), 32)
    draws.sampler, says.logits = Sampler(SamplingParams(), 264, frozenset()), True
    prompts = work(inner, hidden(5)), work(inner, hidden(17), 32)
    assert [inner.kind([w]) for w in (draws, says, *prompts)] == [None] * 4
    with monkeypatch.context() as patch:
        patch.setattr(inner.runner, "is_ready", lambda num_rows: False)
        assert inner.kind([one]) is None


@pytest.mark.parametrize("position", [-1, -(1 << 40)])
def test_a_negative_position_is_refused(inner: SpanModel, position: int) -> None:
    """The kernel would read its tables there."""
    one = replace(work(inner, hidden(1), 5), position=position)
    assert isinstance(inner.run([one])[0], ProtocolError)


def test_a_cancelled_job_is_not_begun_and_closing_cancels_what_waits() -> None:
    """A job that has begun ends all the same; afterwards nothing is taken, and closing again does no harm."""
    ran: list[str] = []

    async def main() -> None:
        device = Device.start(1)
        release = threading.Event()

        def job(name: str) -> None:
            release.wait(GUARD_S)
            ran.append(name)

        jobs = [device.thread.submit(job, name) for name in ("begun", "left", "next")]
        jobs[1].cancel()
        release.set()
        await jobs[2]
        assert ran == ["begun", "next"]

        release.clear()
        jobs = [device.thread.submit(job, name) for name in ("last", "late")]
        await asyncio.sleep(0.01)
        device.thread.shutdown(wait=False)
        release.set()
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        device.close()
        assert ran == ["begun", "next", *(["last"] if outcomes[0] is None else [])]
        assert isinstance(outcomes[1], asyncio.CancelledError)
        with pytest.raises(RuntimeError, match="closed"):
            await device.run(lambda: None)

    asyncio.run(main())


def test_a_result_for_a_loop_that_is_gone_is_dropped() -> None:
    """The thread goes on, for the job that comes next."""
    device = Device.start(1)
    release = threading.Event()

    async def leave() -> None:
        device.thread.submit(release.wait, 5)

    async def come() -> int:
        return await device.run(lambda: 3)

    asyncio.run(leave())
    release.set()
    assert asyncio.run(come()) == 3
    device.close()


def test_an_error_that_no_future_takes_comes_back_as_another() -> None:
    async def main() -> None:
        device = Device.start(1)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(device.run(lambda: next(iter(()))), GUARD_S)
        device.close()

    asyncio.run(main())


def test_what_a_job_held_is_free_once_it_is_done() -> None:
    """A session's cache must not live on while the device waits for work, whether its step failed or not: without the cyclic
    collector, which comes late."""

    class Held:
        pass

    async def main() -> None:
        device = Device.start(1)
        for fails in (False, True):
            held = Held()
            gone = weakref.ref(held)

            def job(held: Held = held, fails: bool = fails) -> None:
                if fails:
                    raise ValueError(held)

            with contextlib.suppress(ValueError):
                await device.run(job)
            del held, job
            await device.run(lambda: None)
            assert gone() is None
        device.close()

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_of_a_step_that_is_not_computed_no_hashes_are_kept(folder: Path) -> None:
    """It goes back to the beginning, with rows that are refused once their results are there. (The hashes of the rows that came
    stayed, beside those of older results: what the node signs of them would have been false.)"""
    model = SpanModel(folder, Span(0, 2), "bf16", False, 1)
    cache, leaves = model.runner.new_cache(64), HopLeaves.new()

    def run(rows: Tensor) -> Result | Exception:
        work = Work(cache, Span(0, 2), 0, len(rows), 0, encode_tensor(rows), None, False, leaves=leaves)
        return model.run([work])[0]

    def roots() -> tuple[Root | None, Root | None]:
        return leaves.given.root(0, 8), leaves.made.root(0, 8)

    assert isinstance(run(hidden(8, 1)), Result) and None not in (before := roots())
    other = hidden(8, 2)
    other[0] = 0
    assert isinstance(run(other), BadRequest) and roots() == before
    assert isinstance(run(hidden(8, 2)), Result) and not set(roots()) & set(before)
