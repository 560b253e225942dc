"""/v1/responses with OpenAI's own client: typed events, function tools, thoughts, nothing kept."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from manyhands.api.delta import Delta
from manyhands.api.openai.namespaces import Called
from manyhands.api.openai.responses import _Answer
from manyhands.origin import Token
from manyhands.text.dialects import HERMES
from manyhands.text.reasoning import Thinking, ThoughtReader
from manyhands.text.tools import CallArguments, CallStart, Content, ToolReader
from tests.api.served import HERMES_TEMPLATE, MODEL, Served, make_model, served

TOOLS: Any = [
    {
        "type": "function",
        "name": name,
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["c", "f"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    for name in ("weather", "tide")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("responses") / "m", HERMES_TEMPLATE)


def play(folder: Path, scene: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with served(folder) as it:
            await scene(it)
            await it.freed()

    asyncio.run(main())


def test_whole_and_streamed_are_the_same(folder: Path) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        asked: Any = {"model": MODEL, "input": "hi", "instructions": "Be.", "max_output_tokens": 12, "temperature": 0}
        whole: Any = await client.responses.create(**asked)
        assert whole.id.startswith("resp_") and whole.status == "incomplete" and whole.output_text
        assert whole.incomplete_details and whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage and whole.usage.output_tokens == 12 and whole.model_extra
        assert whole.model_extra["manyhands"]["exactness"] == "E0"
        events: list[Any] = [event async for event in await client.responses.create(**asked, stream=True)]
        assert [e.sequence_number for e in events] == list(range(len(events)))
        kinds = [e.type for e in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
        assert set(kinds[4:-4]) == {"response.output_text.delta"}
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
        assert events[-1].response.output_text == whole.output_text

    play(folder, scene)


def test_a_function_call_and_its_output(folder: Path) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        asked: Any = {
            "model": MODEL,
            "input": "hi",
            "tools": TOOLS,
            "tool_choice": {"type": "function", "name": "tide"},
            "temperature": 0,
        }
        whole: Any = await client.responses.create(**asked)
        (call,) = whole.output
        assert whole.status == "completed" and call.type == "function_call" and call.name == "tide"
        assert json.loads(call.arguments)["unit"] in ("c", "f")
        events: list[Any] = [event async for event in await client.responses.create(**asked, stream=True)]
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert len(deltas) > 3 and "".join(deltas) == call.arguments == done.arguments
        talk: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "high"},
        ]
        after: Any = await client.responses.create(model=MODEL, input=talk, tools=TOOLS, max_output_tokens=3)
        assert after.status in ("incomplete", "completed")

    play(folder, scene)


def test_text_by_a_schema(folder: Path) -> None:
    async def scene(it: Served) -> None:
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}, "strict": True}}
        for logprobs in ([], ["message.output_text.logprobs"]):
            asked: Any = {"model": MODEL, "input": "hi", "text": form, "include": logprobs}
            made: Any = await (await it.client()).responses.create(**asked)
            assert json.loads(made.output_text) in ("yes", "no") and made.status == "completed"
            assert bool(made.output[0].content[0].logprobs) == bool(logprobs)

    play(folder, scene)


def test_thoughts_are_items(tmp_path: Path) -> None:
    opened = HERMES_TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}{# </think> #}")
    folder = make_model(tmp_path / "m", opened)

    async def scene(it: Served) -> None:
        asked: Any = {"model": MODEL, "input": "hi", "max_output_tokens": 8, "temperature": 0}
        made: Any = await (await it.client()).responses.create(**asked)
        thought = made.output[0]
        assert thought.type == "reasoning" and thought.content and thought.content[0].text
        assert made.usage and made.usage.output_tokens_details.reasoning_tokens == 8
        events: list[Any] = [e async for e in await (await it.client()).responses.create(**asked, stream=True)]
        streamed = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
        assert streamed == thought.content[0].text

    play(folder, scene)


def test_nothing_is_kept(folder: Path) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
        made = await client.responses.create(model=MODEL, input="hi", store=True, max_output_tokens=2)
        assert made.model_extra is not None and made.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")

    play(folder, scene)


class Saying:
    """What an _Answer reads of a choice and of its request."""

    num_tokens, finish_reason, cached_tokens, reasoning_tokens = 9, "tool_calls", 0, 0

    def __init__(self) -> None:
        self.calls: list[dict[str, str]] = []


def grown(said: list[tuple[str, str]]) -> tuple[_Answer, list[Any]]:
    """An answer that calls custom tools with these arguments, one after the other, and its events but the last."""
    choice: Any = Saying()
    made: Any = None
    answer, told = _Answer(made, choice, None, {"patch": Called("patch", "", is_custom=True)}), []
    for index, (name, arguments) in enumerate(said):
        choice.calls.append(
            {"id": f"call_{index}", "name": name, "arguments": ""}
        )  # as Choice does before it tells of it
        for piece in (CallStart(index, name), CallArguments(index, arguments)):
            if isinstance(piece, CallArguments):
                choice.calls[index]["arguments"] += piece.text
            told += [b"".join(event) for event in answer.events(Delta(pieces=(piece,)))]
    told += [b"".join(event) for event in answer._close("completed")]
    return answer, told


def test_each_custom_tool_has_its_own_input() -> None:
    answer, told = grown([("patch", '{"input": "one"}'), ("patch", '{"input": "two"}'), ("tide", "{}")])
    assert [item.get("input") for item in answer.output] == ["one", "two", None]
    assert [b'"input":"one"' in event for event in told if b"custom_tool_call_input.done" in event] == [True, False]


def test_half_of_a_pair_in_a_custom_tools_input_is_no_end_of_the_stream() -> None:
    answer, told = grown([("patch", '{"input": "a\\ud83d"}')])
    assert answer.output[0]["input"] == "a?" and b"a?" in told[-1]
    assert list(answer.events(Delta(pieces=(Content("on"),))))


class Letters:
    """Spells a token by its number."""

    def text_of(self, token: int) -> str:
        return str(token)

    def bytes_of(self, token: int) -> bytes:
        return b"%d" % token


def test_log_probabilities_are_those_of_the_text_alone() -> None:
    """Marks around thoughts and calls, and white space beside them, were told with the text that came next."""
    choice, made, spelling = Saying(), None, Letters()
    answer = _Answer(made, choice, spelling, {})  # type: ignore[arg-type]
    thinking = Thinking("<think>", "</think>", None, None, None)
    thoughts, tools = ThoughtReader(thinking, is_open=False), ToolReader(HERMES, {"tide": {}})
    texts = ["<think>", "hm", "</think>", "\n\n", "", "", "\U0001f642", " ok", "\n\n", "<", "b>", "\n"]
    texts += ["<tool_call>", '{"name": "tide", "arguments": ', "{}}", "\n", "</tool_call>", "\n", "Done", ""]
    told: list[Any] = []
    for number, text in enumerate(texts):
        thought, rest = thoughts.feed(text)
        pieces = tools.feed(rest)
        if any(isinstance(piece, CallStart) for piece in pieces):
            choice.calls.append({"id": "call_0", "name": "tide", "arguments": ""})
        token = Token(number, text, -1.0, ())
        told += [b"".join(event) for event in answer.events(Delta(thought, pieces, token))]
    deltas = [json.loads(event.partition(b"data: ")[2]) for event in told if b"output_text.delta" in event]
    assert "".join(each["delta"] for each in deltas) == "\U0001f642 ok\n\n<b>\nDone"
    numbers = [[int(odds["token"]) for odds in each["logprobs"]] for each in deltas]
    assert numbers == [[4, 5, 6], [7], [8, 9, 10], [17, 18]]
