"""F1, F7, F14 and the templates of F18: one client's request is a lot of work. The event loop does next to none of it.

What is asserted is counted or is CPU time of the loop's own thread, which other processes on the machine do not change: the
attacks cost it 14 to 31 s each before they were closed. A stream that runs goes on to its end meanwhile.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.api import formats
from manyhands.api.anthropic import messages as anthropic
from manyhands.api.auth import KeyRing
from manyhands.api.http import encode
from manyhands.api.http.app import MAX_BODIES
from manyhands.api.ollama import generate as ollama
from manyhands.api.preparation import prepare
from manyhands.api.preparation.desk import NeedsProcess, PreparationDesk, Prepared, Speaker
from manyhands.api.preparation.pool import INLINE_BYTES
from manyhands.api.preparation.process import IDS_A_TURN, read_answer
from manyhands.api.streams import request_digest
from manyhands.config import LimitsConfig
from manyhands.core import ModelId, SamplingParams
from manyhands.text import grammar, kept_grammars
from manyhands.text.received import MAX_RECEIVED, ReceivedText, read_received
from manyhands.text.tokenizer import load_tokenizer
from tests.api.preparation.answers import told
from tests.api.served import HERMES_TEMPLATE, MODEL, Served, make_model, post, raw, raw_slowly, served
from tests.nightly import daily
from tests.turns import Turns
from tests.waiting import GUARD_S

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LIMITS = LimitsConfig()
CLOSE = "connection: close\r\n\r\n"
HI = [{"role": "user", "content": "hi"}]
MAX_CPU_S = 2.0  # of the loop's thread for one attack, most of it the swarm that runs in the same process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("work") / "m", HERMES_TEMPLATE)


def play(folder: Path, scene: Callable[[Served], Awaitable[None]], limits: LimitsConfig = LIMITS) -> None:
    async def main() -> None:
        async with served(folder, limits=limits) as it:
            await scene(it)
            await it.freed()
            assert not it.gateway.jobs

    asyncio.run(main())


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bodies that were prepared on the event loop."""
    sizes: list[int] = []
    done = prepare.prepare

    def counted(path: str, body: bytes, desk: Any) -> Any:
        sizes.append(len(body))
        return done(path, body, desk)

    monkeypatch.setattr(formats, "prepare", counted)
    return sizes


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}, separators=(",", ":")).encode()


def tool_of(parameters: str) -> bytes:
    """A chat request with one tool whose parameters are this JSON."""
    tool = {"type": "function", "function": {"name": "f", "parameters": "HOLE"}}
    return body(messages=HI, tools=[tool]).replace(b'"HOLE"', parameters.encode())


FAMILY_F1: list[tuple[str, Callable[[], bytes]]] = [
    (TEXT, lambda: body(prompt=[1] * 1_900_000)),
    (TEXT, lambda: body(prompt=[1] * 60_000)),
    (TEXT, lambda: body(prompt=[[1] * 240_000] * 8)),
    (CHAT, lambda: body(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 125_000}])),
    (CHAT, lambda: body(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 25_000}])),
    (CHAT, lambda: tool_of('{"x":[' + "[]," * 1_300_000 + "[]]}")),
    (CHAT, lambda: tool_of('{"x":[' + "[]," * 60_000 + "[]]}")),
    (CHAT, lambda: body(messages=HI * 20_000)),
    (RESPONSES, lambda: body(input=HI * 20_000)),
    (CHAT, lambda: body(messages=HI, stop=["x"] * 60_000)),
    (CHAT, lambda: body(messages=HI, logit_bias={str(i): 1 for i in range(60_000)})),
    (CHAT, lambda: body(messages=HI, **{f"x{i}": 1 for i in range(60_000)})),
    (CHAT, lambda: b"[" * 4_000_000),
    (CHAT, lambda: b'{"seed":' + b"9" * 4_000_000 + b"}"),
]


def test_large_bodies_are_refused_elsewhere(folder: Path, inline: list[int]) -> None:
    """F1: each of these held the loop for seconds, and every stream with it. One gateway takes all of them."""

    async def attack(it: Served) -> None:
        for path, make in FAMILY_F1:
            status, said = await raw_slowly(it, post(path, make()))
            assert status == 400, said[-300:]

    async def scene(it: Served) -> None:
        stream = asyncio.create_task(raw_slowly(it, post(TEXT, body(prompt="hi", max_tokens=200, stream=True))))
        began = time.thread_time()
        attacking = asyncio.create_task(attack(it))
        turns = Turns()
        with turns.watching():
            while not attacking.done():
                status, _ = await raw(it.addr, f"GET /v1/models HTTP/1.1\r\nhost: {it.addr}\r\n{CLOSE}".encode())
                assert status == 200
                await asyncio.sleep(0.02)
        await attacking
        assert time.thread_time() - began < 3 * MAX_CPU_S and 0 < turns.longest_s < MAX_CPU_S, turns.longest
        status, said = await stream
        assert status == 200 and b"[DONE]" in said
        assert preparing(it).num_killed == 0, "none took until its deadline"

    play(folder, scene)
    assert max(inline) <= INLINE_BYTES


def test_a_text_that_cannot_fit_is_not_tokenised(folder: Path) -> None:
    """F7: 16 MB were tokenised for 70 s and then refused; now their length is looked at first."""

    async def scene(it: Served) -> None:
        for path, field in ((TEXT, "prompt"), (RESPONSES, "input"), (RESPONSES, "instructions")):
            fields: dict[str, Any] = {"input": "x"} if path == RESPONSES else {}
            status, said = await raw_slowly(it, post(path, body(**{**fields, field: "hello world " * 340_000})))
            assert status == 400 and b"characters, at least" in said, field
        assert preparing(it).num_killed == 0

    play(folder, scene)


def preparing(it: Served) -> Any:
    return it.gateway.parts[0].preparing  # type: ignore[attr-defined]


def costly(index: int) -> bytes:
    """A grammar that no process has seen."""
    patterns = [{"pattern": f"^.*{chr(97 + i)}.{{{i + index + 3}}}.*$"} for i in range(20)]
    schema = {"type": "string", "allOf": patterns}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return post(CHAT, body(messages=HI, response_format=form))


def test_requests_whose_clients_have_left_are_not_worked_on(folder: Path) -> None:
    """F14: 40 grammars of 1.2 kB, each client gone at once, kept all threads busy for hours."""

    async def scene(it: Served) -> None:
        for index in range(40):
            _, writer = await asyncio.open_connection(it.addr.host, it.addr.port)
            writer.write(costly(index))
            await writer.drain()
            await asyncio.sleep(0.001)
            writer.transport.abort()
        async with asyncio.timeout(GUARD_S):
            while preparing(it).turns.num_waiting or preparing(it).turns.running:  # noqa: ASYNC110 - another's state
                await asyncio.sleep(0.01)
        status, said = await raw_slowly(it, costly(99))
        assert status == 400 and b"cannot be enforced" in said
        plain = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
        status, said = await raw_slowly(it, post(CHAT, body(messages=HI, response_format=plain)))
        assert status == 200 and b'\\"yes\\"' in said

    play(folder, scene)


def test_compiled_grammars_do_not_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema of 57 kB left 12 MB in the gateway until 32 other grammars had come."""
    monkeypatch.setattr(kept_grammars, "KEPT_S", 0.05)

    async def scene(it: Served) -> None:
        for properties in (["a"], [f"p{number}" for number in range(500)]):
            schema = {"type": "object", "properties": {name: {"enum": ["x"]} for name in properties}}
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            assert (await raw_slowly(it, post(CHAT, body(messages=HI, response_format=form))))[0] in (200, 400)
        async with asyncio.timeout(GUARD_S):
            while len(it.gateway.parts[0]._kept):  # type: ignore[attr-defined]  # noqa: ASYNC110 - another's state
                await asyncio.sleep(0.01)

    play(folder, scene)


def test_a_grammar_is_compiled_once_for_all_choices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is too long to be kept: 2.5 s of the one thread that compiles, and there were 16 of them."""
    monkeypatch.setattr(kept_grammars, "MAX_KEPT_LETTERS", 10)
    compiled: list[str] = []
    compile_matcher = grammar.compile_matcher

    def counted(table: Any, text: str) -> Any:
        compiled.append(text)
        return compile_matcher(table, text)

    monkeypatch.setattr(grammar, "compile_matcher", counted)
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    async def scene(it: Served) -> None:
        status, said = await raw_slowly(it, post(CHAT, body(messages=HI, n=4, max_tokens=40, response_format=wanted)))
        assert status == 200 and said.count(b'"content"') == 4
        assert len(compiled) == 1

    play(folder, scene)


def test_a_request_is_charged_before_it_is_worked_on(folder: Path) -> None:
    """F14: what was refused after the work was never counted, so no quota bounded it."""

    async def scene(it: Served) -> None:
        said = [(await raw_slowly(it, costly(index)))[0] for index in range(4)]
        assert said == [400, 400, 429, 429] and preparing(it).num_started == 1

    play(folder, scene, LimitsConfig(requests_per_minute=2))


def test_bodies_of_one_key_leave_room_for_those_of_others(folder: Path, tmp_path: Path) -> None:
    """One that sends large bodies and not their ends, uncharged, had those of all others refused."""

    async def main() -> None:
        keys = KeyRing(tmp_path / "keys.json")
        mine, others = (f"Bearer {keys.add(name, 0.0)}" for name in ("mine", "others"))
        async with (
            served(folder, keys=keys, limits=LimitsConfig(max_body_bytes=20_000)) as it,
            AsyncExitStack() as stack,
        ):
            whole = post(TEXT, body(prompt="x" * (20_000 - len(body(prompt="")))), authorization=mine)
            for _ in range(MAX_BODIES):
                _, writer = await asyncio.open_connection(it.addr.host, it.addr.port)
                stack.callback(writer.close)
                writer.write(whole[:-1])
                await writer.drain()
            small = body(prompt="hi", max_tokens=2)
            status, said = 200, b""
            async with asyncio.timeout(GUARD_S):
                while status == 200:  # until all that was sent has come
                    status, said = await raw(it.addr, post(TEXT, small, authorization=mine))
            assert status == 429 and b"are held" in said
            status, said = await raw(it.addr, post(TEXT, small, authorization=others))
            assert status == 200, said

    asyncio.run(main())


LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    daily(
        [LOOPS, "{{ 'a' * 3000000000 }}"],
        ["{% for i in range(99999) %}{% set x = range(99999) | list | length %}{% endfor %}"],
    ),
)
def test_a_template_without_end_is_a_400(template: str, tmp_path: Path, inline: list[int]) -> None:
    """F18: minutes on the event loop for a short chat, and a 500 for a MemoryError."""
    folder = make_model(tmp_path / "m", template)

    async def scene(it: Served) -> None:
        began = time.thread_time()
        status, said = await raw_slowly(it, post(CHAT, body(messages=HI)))
        assert status == 400 and b"chat template" in said and time.thread_time() - began < MAX_CPU_S
        status, _ = await raw(it.addr, post(TEXT, body(prompt="hi", max_tokens=2)))
        assert status == 200

    play(folder, scene)


def test_routes_that_do_not_generate_read_little(folder: Path) -> None:
    """A sibling: FastAPI parses their bodies on the loop."""

    async def scene(it: Served) -> None:
        for path in ("/v1/models", "/v1/embeddings", "/nowhere"):
            status, _ = await raw(it.addr, post(path, b" " * 9000))
            assert status == 413

    play(folder, scene)


# -- answers that are long --------------------------------------------------------------------------------------------


def test_long_answers_are_made_in_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/tokenize made an object and a text of each token on the event loop: 1.4 s of 300,000 tokens."""
    made: list[Any] = []
    monkeypatch.setattr(encode.JsonRows, "append", lambda self, item: made.append(item))
    monkeypatch.setattr(encode.JsonText, "add", lambda self, text: made.append(text))
    text = "ab c" * 3000
    cases: list[tuple[str, dict[str, Any], bytes]] = [
        ("/tokenize", {"content": text, "with_pieces": True}, b'"count":12000'),
        ("/tokenize", {"content": "abc " * 300, "with_pieces": True}, b'"piece":"c"'),
        ("/tokenize", {"prompt": text}, b'"count":12000'),
        ("/detokenize", {"tokens": [97] * 900}, b'"content":"aaa'),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}, b'"input_tokens":12'),
    ]

    async def scene(it: Served) -> None:
        for path, fields, wanted in cases:
            _, said = await raw_slowly(it, post(path, body(**fields)))
            assert wanted in said, said[-300:]

    play(folder, scene)
    assert not made


async def turns_of(work: Awaitable[Any]) -> int:
    """How often the event loop did other work meanwhile."""
    done = asyncio.ensure_future(work)
    turns = 0
    while not done.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


def test_long_arguments_of_a_call_are_told_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are objects, in the answers of Ollama and Anthropic, a megabyte of them was parsed and written at once."""
    monkeypatch.setattr("json.loads", lambda text: pytest.fail("they are parsed"))
    text = '{"x":["\\ud800",' + "[]," * 100_000 + "[]]}"
    call = {"id": "call_1", "name": "f", "arguments": text}
    choice, block = SimpleNamespace(calls=[call, {**call, "arguments": text[:-1]}]), {"type": "tool_use", "input": call}
    (made,) = asyncio.run(ollama._calls(choice))  # type: ignore[arg-type]
    shown = asyncio.run(anthropic._shown(block))
    assert shown is not None and asyncio.run(anthropic._shown({**block, "input": {"arguments": "[]"}})) is None
    for arguments in (made["function"]["arguments"], shown["input"]):
        assert b"".join(encode.pieces({"a": arguments})) == b'{"a":' + text.encode() + b"}"
    assert asyncio.run(turns_of(ollama._calls(choice))) > 200  # type: ignore[arg-type]
    assert asyncio.run(turns_of(anthropic._shown(block))) > 200


def test_short_ids_of_long_tokens_are_the_work_of_a_process() -> None:
    """4,000 ids of 4,096 bytes each, in a body of 8 KB, became 16 MB of text and of JSON on the event loop."""
    facts = Speaker("m", object(), 1 << 20, 9, 4096, "bf16", None, None, {}, level=None)
    desk = PreparationDesk({"m": facts}, 16, 1024, lambda grammar: 0, is_inline=True)
    with pytest.raises(NeedsProcess):
        prepare.prepare("/detokenize", json.dumps({"model": "m", "tokens": [1] * 40}).encode(), desk)


def test_what_a_client_says_it_has_comes_back_as_numbers_and_bytes() -> None:
    """The text of 16 choices in 16,384 tokens each was 3 MB of JSON, which the event loop parsed at once: 70 ms. So was a
    prompt that is echoed, of which each line end is two characters: 25 ms for 4 MiB."""
    text = "\n" * MAX_RECEIVED
    had = ReceivedText(text, tuple(range(MAX_RECEIVED)), tuple(range(MAX_RECEIVED)))
    made = Prepared("m", {}, [(1,)], SamplingParams(), received=[had] * 16, shown=b'"' + b"\\n" * (1 << 20) + b'"')
    parts = told(made)
    assert len(parts.said) < 2048
    assert asyncio.run(read_answer(parts)) == made
    assert asyncio.run(turns_of(read_answer(parts))) >= 2 * 16 * MAX_RECEIVED / IDS_A_TURN


def test_of_a_long_text_no_more_is_kept_than_was_read(folder: Path) -> None:
    """4 MiB were kept for as long as the stream runs, of which 16,384 tokens are of use."""
    tokenizer = load_tokenizer(folder)
    read = read_received(tokenizer, "ab " * MAX_RECEIVED)
    assert len(read.ids) == len(read.starts) == MAX_RECEIVED
    assert len(read.text) <= 3 * MAX_RECEIVED and read.text == ("ab " * MAX_RECEIVED)[: len(read.text)]
    assert read.starts[-1] < len(read.text) and not tokenizer.encode("ab " * MAX_RECEIVED)[:MAX_RECEIVED] != list(
        read.ids
    )


def test_a_prompt_is_echoed_as_the_process_wrote_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and as a stream, prepared on the loop and in a process."""
    monkeypatch.setattr(encode.JsonText, "__init__", lambda self, text="": setattr(self, "_texts", [text[:0]]))

    async def scene(it: Served) -> None:
        prompt = 'a "\n" é'
        for most in (INLINE_BYTES, 0):
            monkeypatch.setattr(formats, "INLINE_BYTES", most)
            for path in ("/api/infer", "/api/infer/stream"):
                _, said = await raw_slowly(it, post(path, body(prompt=prompt, max_tokens=1)))
                assert b'"prompt":' + json.dumps(prompt, ensure_ascii=False).encode() in said

    play(folder, scene)


def test_a_context_of_ids_is_looked_at_in_parts() -> None:
    """A megabyte of ids became Python's numbers, and was hashed, all at once: 0.3 s."""
    ids = tuple(range(1 << 17))
    made = Prepared("m", {}, [ids, ids], SamplingParams())
    parts = told(made)
    assert asyncio.run(read_answer(parts)).prompts == [ids, ids]
    assert asyncio.run(turns_of(read_answer(parts))) >= 2 * len(ids) / IDS_A_TURN
    assert asyncio.run(turns_of(request_digest("/", ModelId("ab" * 32), made))) >= 2 * len(ids) / IDS_A_TURN
