"""What a client has of an answer is guessed, many tokens at a time: right, wrong, split otherwise, the text is the same."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.config import RequestConfig
from manyhands.core import EndsAt
from manyhands.errors import Corruption
from manyhands.origin import Answer
from manyhands.origin.adoption import Adoption
from manyhands.origin.received import AFTER_MISS, MAX_MISSES, MAX_STRAY, ReceivedGuesses
from manyhands.origin.redraw import REDRAWN_ROWS
from manyhands.origin.route import Route
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import MemorySwarm
from manyhands.testing.tiny import make_tiny
from manyhands.text.received import ReceivedText
from tests.origin.scenes import HOT, PROMPT, ids_of, play, swarm_of

TOKENS = 40
PARAMS = replace(HOT, max_tokens=TOKENS)
WORDS = [
    "the",
    "th",
    "e",
    " old",
    " king",
    " o",
    "ld",
    "<end>",
    " ",
    "é",
    "\ufffd",
    "\ufffd",
    "x",
]  # 10, 11: bytes of é
SPECIAL = 7


def decode(ids: Sequence[int]) -> str:
    return "".join([WORDS[i] for i in ids if i != SPECIAL]).replace("\ufffd\ufffd", "é")


def received(*ids: int) -> ReceivedText:
    starts = [len(decode(ids[:number])) for number in range(len(ids))]
    return ReceivedText(decode(ids), ids, tuple(starts))


def guesses_of(text: ReceivedText, most: int = 99) -> ReceivedGuesses:
    return ReceivedGuesses(text, most, len(WORDS), decode)


def test_it_is_guessed_to_its_end() -> None:
    """No more than was asked for, behind what is on its way; None only once all has come back."""
    guesses = guesses_of(received(0, 3, 4))
    assert guesses.propose([], 0, 2) == [0, 3] and guesses.propose([], 2, 9) == [4]
    assert guesses.propose([], 3, 9) == [] and guesses.propose([0, 3], 1, 9) == []
    assert guesses.propose([0, 3, 4], 0, 9) is None and guesses.propose([0, 3, 4, 0], 0, 9) is None


def test_no_more_than_was_told_and_no_id_that_is_none() -> None:
    assert guesses_of(received(0, 3, 4), 2).propose([], 0, 9) == [0, 3]
    assert guesses_of(ReceivedText("the old!", (0, 99, 3), (0, 3, 7))).propose([], 0, 9) == [0]
    assert guesses_of(received()).propose([], 0, 9) is None


@pytest.mark.parametrize(
    ("drawn", "next_guesses"),
    [
        ([1], []),  # th: within a guess
        ([1, 2], [3, 4]),
        ([0, 5, 6], [4]),
        ([7], [0, 3, 4]),  # a mark that is not shown
        ([0, 7, 3], [4]),
        ([8], [0, 3, 4]),  # white space that is not shown
        ([8, 0], [3, 4]),
    ],
)
def test_tokens_that_split_the_text_otherwise(drawn: list[int], next_guesses: list[int]) -> None:
    """Guesses go on where a drawn token ends with a guess."""
    guesses = guesses_of(received(0, 3, 4))
    assert guesses.propose([], 0, 9) == [0, 3, 4]
    assert list(guesses.propose(drawn, 0, 9) or ()) == next_guesses


def test_parts_of_a_character_are_waited_for() -> None:
    guesses = guesses_of(received(0, 9, 3, 4))
    assert guesses.propose([0, 10], 0, 9) == () and guesses.propose([0, 10, 11], 0, 9) == [3, 4]


def test_another_text_is_given_up() -> None:
    for drawn in ([12], [0, 4], [1, 12], [0, 3, 4, 0]):
        assert guesses_of(received(0, 3, 4)).propose(drawn, 0, 9) is None
    assert guesses_of(ReceivedText("x" * 9, (12,) * 9, tuple(range(9)))).propose([12] * 10, 0, 9) is None


def test_what_is_tried_is_bounded() -> None:
    """Tokens without a guess at their end, and guesses that were wrong."""
    long = ReceivedText("x" * 60 + "the", (12, 0), (0, 60))
    guesses = guesses_of(long)
    assert all(guesses.propose([8] * 0 + [12] * n, 0, 9) is not None for n in range(2))
    strays = ReceivedText("the" * 30, (12, 12), (0, 80))
    guesses = guesses_of(strays)
    proposed = [guesses.propose([0] * n, 0, 9) for n in range(MAX_STRAY + 2)]
    assert proposed[MAX_STRAY] == () and proposed[-1] is None
    many = received(*[0] * 99)
    guesses = guesses_of(many)
    drawn = [1, 2] * (MAX_MISSES + 1)
    assert guesses.propose(drawn[: 2 * MAX_MISSES], 0, 9) and guesses.propose(drawn, 0, 9) is None


# -- over hops --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("received") / "qwen3", seed=3)


async def go_on(swarm: MemorySwarm, ids: Sequence[int], params: Any = PARAMS, told: int = TOKENS) -> Answer:
    """An answer of which no hop has anything, to a client that says it has `ids`."""
    text = ReceivedText("?" * len(ids), tuple(ids), tuple(range(len(ids))))
    request, adoption = swarm.origin.request_ids(PROMPT, params), Adoption(b"h" * 16, (), told, received=text)
    return await swarm.origin.complete(request, adoption=adoption, draft="off")


def rows_run(swarm: MemorySwarm) -> int:
    return max(sum(host.engine.rows_run for host in node.hosts) for node in swarm.hops)


SMALL_STEPS = RequestConfig(prefill_chunk=3, credits=1)  # results come back while most of the guesses wait to be sent
REQUESTS = pytest.mark.parametrize("request_config", [RequestConfig(), SMALL_STEPS], ids=["large steps", "small steps"])


@REQUESTS
@pytest.mark.parametrize(("ends", "logprobs"), [("origin", 2), ("edges", None), ("edges", 2)])
def test_it_is_computed_like_a_prompt(
    qwen3: Path, ends: EndsAt, logprobs: int | None, request_config: RequestConfig
) -> None:
    """No round for each token, no row twice; the odds come too. What was told last may not have been all."""
    params = replace(PARAMS, logprobs=logprobs)

    async def main() -> None:
        async with swarm_of(qwen3, "0-1,2-3,4-5", ends=ends, request=request_config) as swarm:
            wanted = await ids_of(swarm, PROMPT, params)
            for num in (1, 25, TOKENS):
                before = rows_run(swarm)
                answer = await go_on(swarm, wanted[:num], params)
                assert answer.token_ids == wanted and answer.redrawn == 0
                assert answer.drafting.windows <= max(1, TOKENS - num) + 3, (num, answer.drafting)
                assert (answer.drafting.drafted, answer.drafting.accepted) == (0, 0)
                assert rows_run(swarm) - before <= len(PROMPT) + TOKENS + 1

    play(main)


@REQUESTS
@pytest.mark.parametrize("ends", ["origin", "edges"])
def test_a_wrong_text_costs_time_only(qwen3: Path, ends: EndsAt, request_config: RequestConfig) -> None:
    """Wrong from some token on, too long, of no tokens of this model: the rows that it costs are its own, once, and a few."""

    async def main() -> None:
        async with swarm_of(qwen3, "0-1,2-3,4-5", ends=ends, request=request_config) as swarm:
            params = replace(PARAMS, logprobs=None)
            wanted = await ids_of(swarm, PROMPT, params)
            for said in (
                [(i + 1) % 256 for i in wanted],
                [*wanted[:9], *reversed(wanted)],
                [*wanted, *wanted],
                [1 << 40],
            ):
                before = rows_run(swarm)
                assert (await go_on(swarm, said, params)).token_ids == wanted
                assert rows_run(swarm) - before <= len(PROMPT) + 2 * TOKENS + 2 * AFTER_MISS

    play(main)


@pytest.mark.parametrize("moment", ["prefill", "decode"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_hop_dies_meanwhile(qwen3: Path, moment: Any, victim: int) -> None:
    async def main() -> None:
        faults = Faults()
        options: dict[str, Any] = {"spares": ["0-5"], "wrap": faults.wrap, "request": RequestConfig(prefill_chunk=32)}
        async with swarm_of(qwen3, "0-1,2-3,4-5", **options) as swarm:
            wanted = await ids_of(swarm, PROMPT, PARAMS)
            faults.at(moment, swarm.hops[victim], lambda: faults.die(swarm.hops[victim]), skip=1)
            answer = await go_on(swarm, wanted[:30])
            assert answer.token_ids == wanted and answer.repairs

    play(main)


def test_rows_that_cannot_be_behind_rows_that_are_taken(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are drawn from the first 32 rows of a result, the others are refused: the hop is replaced, no token is lost."""
    monkeypatch.setattr(Route, "chunk_rows", lambda *_: 128)
    monkeypatch.setattr("manyhands.worker.batch.FEWEST_ROWS", 128)  # what is sent as one comes back as one

    async def main() -> None:
        async with swarm_of(qwen3, "0-1,2-3,4-5", spares=["0-5"]) as swarm:
            wanted = await ids_of(swarm, PROMPT, PARAMS)
            ends = swarm.origin.ends
            assert ends is not None
            turn, num_rows = ends.turn, list[int]()

            async def refusing(rows: Any, *rest: Any) -> Any:
                num_rows.extend([] if rows is None else [len(rows)])
                if rows is not None and len(num_rows) == 2:
                    raise Corruption("made up by the test")
                return await turn(rows, *rest)

            ends.turn = refusing  # type: ignore[method-assign,assignment]
            answer = await go_on(swarm, wanted)
            assert answer.token_ids == wanted and answer.repairs and num_rows[0] == REDRAWN_ROWS

    play(main)
