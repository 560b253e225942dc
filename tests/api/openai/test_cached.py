"""cached_tokens: what an earlier request of the same key had computed is counted, another key's never."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.auth import KeyRing
from manyhands.testing.faults import Faults
from tests.api.served import MODEL, make_model, served

HISTORY: list[Any] = [{"role": "user", "content": "A question that is long enough to be worth it."}]


def test_the_second_question_counts_what_is_cached_for_its_own_key(tmp_path: Path) -> None:
    """In chat, whole and streamed, with n, in responses, in jobs; the same text for a key that computes it anew."""
    folder, keys = make_model(tmp_path / "model"), KeyRing(tmp_path / "keys.json")
    secrets = {who: keys.add(who, 0.0) for who in ("ann", "bob")}

    async def main() -> None:
        async with served(folder, keys=keys) as it:
            ann, bob = [await it.client(secrets[who]) for who in ("ann", "bob")]
            asked: Any = {"model": MODEL, "max_tokens": 8, "seed": 3, "temperature": 0.8}
            first = await ann.chat.completions.create(messages=HISTORY, **asked)
            assert first.usage is not None and first.usage.prompt_tokens_details is not None
            assert first.usage.prompt_tokens_details.cached_tokens == 0
            said = first.choices[0].message.content
            more: list[Any] = [
                *HISTORY,
                {"role": "assistant", "content": said},
                {"role": "user", "content": "And then?"},
            ]

            again = await ann.chat.completions.create(messages=more, n=2, **asked)
            assert again.usage is not None and again.usage.prompt_tokens_details is not None
            cached = again.usage.prompt_tokens_details.cached_tokens
            assert cached is not None and first.usage.prompt_tokens - 1 <= cached < again.usage.prompt_tokens

            other = await bob.chat.completions.create(messages=more, n=2, **asked)
            assert other.usage is not None and other.usage.prompt_tokens_details is not None
            assert other.usage.prompt_tokens_details.cached_tokens == 0
            assert [c.message.content for c in other.choices] == [c.message.content for c in again.choices]

            stream = await ann.chat.completions.create(
                messages=more, stream=True, stream_options={"include_usage": True}, **asked
            )
            *_, last = [chunk async for chunk in stream]
            assert last.usage is not None and last.usage.prompt_tokens_details is not None
            assert last.usage.prompt_tokens_details.cached_tokens == last.usage.prompt_tokens - 1

            plain = await ann.responses.create(model=MODEL, input=HISTORY[0]["content"], max_output_tokens=16)
            assert plain.usage is not None
            assert plain.usage.input_tokens_details.cached_tokens == plain.usage.input_tokens - 1
            told = [(job.key, job.cached_tokens) for job in it.watcher.ended_jobs]
            assert sum(count for key, count in told if key == "bob") == 0
            assert [count for key, count in told if key == "ann"][1] == cached

    asyncio.run(main())


@pytest.mark.parametrize("victim", [0, 1])
def test_a_question_after_a_repair_counts_what_is_cached(tmp_path: Path, victim: int) -> None:
    """A hop dies in the middle of the first answer: what takes its place has what was computed before, and text is the same."""
    folder, faults, told = make_model(tmp_path / "model"), Faults(), list[list[tuple[str | None, int | None, int]]]()

    async def ask(*, dies: bool) -> None:
        async with served(folder, spares=["0-1"], wrap=faults.wrap) as it:
            hop, history, told_now = it.swarm.hops[victim], list(HISTORY), list[tuple[str | None, int | None, int]]()
            if dies:
                faults.at("decode", hop, lambda: faults.die(hop), skip=4)
            client = await it.client()
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model=MODEL, messages=history, max_tokens=12, seed=3, temperature=0.8
                )
                assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
                said, counted = answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens
                told_now.append((said, counted, answer.usage.prompt_tokens))
                history += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
            assert len(it.watcher.ended_jobs[0].repairs) == dies
            told.append(told_now)

    asyncio.run(ask(dies=False))
    asyncio.run(ask(dies=True))
    assert told[0] == told[1]
    (_, _, first), (_, cached, _) = told[1]
    assert cached is not None and cached >= first - 1
