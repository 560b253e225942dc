"""Basic flows of libraries that speak our APIs for others: run by the Python that has them, not by pytest.

    python flows.py URL MODEL [NAME ...]       a line of JSON for each flow: its name, and what went wrong ("" if nothing)

test_frameworks.py makes that Python and reads the lines. The model is a random one: enums bound what it calls and tells.
"""

import asyncio
import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1].rstrip("/"), sys.argv[2]
LONG = "x" * 2000  # more than the model's context
FLOWS: dict[str, Callable[[], None]] = {}
LOOP = asyncio.Runner()  # one for all: some of these libraries keep their connections


class Tide(BaseModel):
    """The tide now."""

    model_config = ConfigDict(extra="forbid")
    level: Literal["high", "low"]


TIDE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"level": {"type": "string", "enum": ["high", "low"]}},
    "required": ["level"],
    "additionalProperties": False,
}


def lib(name: str) -> Any:
    return importlib.import_module(name)


def flow(function: Callable[[], None]) -> Callable[[], None]:
    FLOWS[function.__name__] = function
    return function


def refused(call: Callable[[], Any], *kinds: type[BaseException], match: str = "") -> None:
    """Check that `call` raises one of `kinds` that says `match`."""
    try:
        call()
    except kinds as error:
        assert match in str(error), f"{match!r} is not in {error}"
        return
    raise AssertionError(f"none of {[kind.__name__ for kind in kinds]} was raised")


# -- langchain --------------------------------------------------------------------------------------------------------


def langchain_basics(make: Callable[..., Any]) -> None:
    """Chat, stream, several at once, async and usage of any of its models."""
    model = make()
    whole = model.invoke([("system", "Be kind."), ("user", "hi")])
    assert whole.text and whole.usage_metadata["output_tokens"] == 8 and whole.usage_metadata["input_tokens"] > 2
    parts = list(model.stream([("system", "Be kind."), ("user", "hi")]))
    assert len(parts) > 1 and "".join(part.text for part in parts) == whole.text
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert total.usage_metadata == whole.usage_metadata
    assert model.invoke([("user", "hi"), whole, ("user", "hi")]).text  # as it sends answers back
    assert len(model.batch(["hi", "ho"])) == 2
    assert LOOP.run(_langchain_async(make())) == model.invoke("hi").text


async def _langchain_async(model: Any) -> str:
    whole = await model.ainvoke("hi")
    assert "".join([part.text async for part in model.astream("hi")]) == whole.text
    return str(whole.text)


def langchain_calls(make: Callable[..., Any], choice: Any) -> None:
    """A forced call, whole and streamed, its result sent back."""
    messages = lib("langchain_core.messages")
    model = make(200)
    forced = model.bind_tools([Tide], tool_choice=choice)
    said = forced.invoke("hi")
    (call,) = said.tool_calls
    assert call["name"] == "Tide" and call["args"]["level"] in ("high", "low") and call["id"]
    total = None
    for part in forced.stream("hi"):
        total = part if total is None else total + part
    assert total is not None and [c["args"] for c in total.tool_calls] == [call["args"]]
    result = messages.ToolMessage("high", tool_call_id=call["id"])
    assert make().bind_tools([Tide]).invoke([("user", "hi"), said, result]).usage_metadata["output_tokens"] == 8


def openai_chat(max_tokens: int = 8, **more: Any) -> Any:
    made = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    return lib("langchain_openai").ChatOpenAI(**{**made, "max_tokens": max_tokens, **more})


@flow
def langchain_openai_chat() -> None:
    langchain_basics(lambda size=8: openai_chat(size, stream_usage=True))
    told = openai_chat(logprobs=True, top_logprobs=2).invoke("hi").response_metadata
    assert len(told["logprobs"]["content"]) == 8 and told["finish_reason"] == "length" and told["model_name"] == MODEL


@flow
def langchain_openai_tools() -> None:
    langchain_calls(openai_chat, "Tide")
    langchain_calls(openai_chat, "required")


@flow
def langchain_openai_structured() -> None:
    for method in ("json_schema", "function_calling"):
        made = openai_chat(200).with_structured_output(Tide, method=method).invoke("hi")
        assert isinstance(made, Tide), method
    raw = openai_chat(200).with_structured_output(Tide, include_raw=True).invoke("hi")
    assert raw["parsed"].level and raw["parsing_error"] is None


@flow
def langchain_openai_responses() -> None:
    langchain_basics(lambda size=8: openai_chat(size, use_responses_api=True, stream_usage=True))
    langchain_calls(lambda size=8: openai_chat(size, use_responses_api=True), "Tide")
    made = openai_chat(200, use_responses_api=True).with_structured_output(Tide).invoke("hi")
    assert isinstance(made, Tide)


@flow
def langchain_openai_errors() -> None:
    errors = lib("openai")
    refused(lambda: openai_chat().invoke(LONG), errors.BadRequestError, match="context")
    refused(lambda: openai_chat(model="gpt-9").invoke("hi"), errors.NotFoundError, match="not served")
    refused(lambda: list(openai_chat().stream(LONG)), errors.BadRequestError, match="context")


@flow
def langchain_openai_text() -> None:
    made = lib("langchain_openai").OpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=8, temperature=0
    )
    assert "".join(made.stream("hi")) == made.invoke("hi") != ""


def ollama_chat(num_predict: int = 8, **more: Any) -> Any:
    made = {"model": MODEL, "base_url": URL, "temperature": 0, "num_predict": num_predict}
    return lib("langchain_ollama").ChatOllama(**{**made, **more})


@flow
def langchain_ollama_chat() -> None:
    langchain_basics(ollama_chat)
    text = lib("langchain_ollama").OllamaLLM(model=MODEL, base_url=URL, temperature=0, num_predict=8)
    assert "".join(text.stream("hi")) == text.invoke("hi") != ""


@flow
def langchain_ollama_tools() -> None:
    """Ollama has no way to force a call: tools are shown, and the answer is one either way."""
    said = ollama_chat().bind_tools([Tide]).invoke("hi")
    assert said.text or said.tool_calls


@flow
def langchain_ollama_structured() -> None:
    assert isinstance(ollama_chat(200).with_structured_output(Tide).invoke("hi"), Tide)
    assert isinstance(ollama_chat(200).with_structured_output(Tide, method="json_schema").invoke("hi"), Tide)


@flow
def langchain_ollama_errors() -> None:
    errors = lib("ollama")
    refused(lambda: ollama_chat(model="llama9").invoke("hi"), errors.ResponseError, match="not served")
    refused(
        lambda: lib("langchain_ollama").ChatOllama(model="llama9", base_url=URL, validate_model_on_init=True), Exception
    )
    assert lib("langchain_ollama").ChatOllama(model=MODEL, base_url=URL, validate_model_on_init=True)


def anthropic_chat(max_tokens: int = 8, **more: Any) -> Any:
    made: dict[str, Any] = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0, "temperature": 0}
    return lib("langchain_anthropic").ChatAnthropic(**{**made, "max_tokens": max_tokens, **more})


@flow
def langchain_anthropic_chat() -> None:
    langchain_basics(anthropic_chat)
    told = anthropic_chat().invoke("hi").response_metadata
    assert told["stop_reason"] == "max_tokens" and told["model_name"] == MODEL
    assert anthropic_chat().get_num_tokens_from_messages([lib("langchain_core.messages").HumanMessage("hi")]) > 2


@flow
def langchain_anthropic_tools() -> None:
    langchain_calls(anthropic_chat, "Tide")
    langchain_calls(anthropic_chat, "any")


@flow
def langchain_anthropic_structured() -> None:
    for method in ("function_calling", "json_schema"):
        assert isinstance(anthropic_chat(200).with_structured_output(Tide, method=method).invoke("hi"), Tide), method


@flow
def langchain_anthropic_errors() -> None:
    errors = lib("anthropic")
    refused(lambda: anthropic_chat().invoke(LONG), errors.BadRequestError, match="context")
    refused(lambda: anthropic_chat(model="claude-9").invoke("hi"), errors.NotFoundError, match="not served")


# -- litellm ----------------------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]
CALLABLE = {"type": "function", "function": {"name": "Tide", "description": "x", "parameters": TIDE_SCHEMA}}


def litellm_basics(*reasons: str, **ask: Any) -> None:
    """Chat, stream, async, usage and an answer sent back. `reasons`: what litellm may make of the answer's end."""
    litellm = lib("litellm")
    whole = litellm.completion(messages=HI, max_tokens=8, **ask)
    message = whole.choices[0].message
    assert message.content and whole.usage.completion_tokens == 8 and whole.choices[0].finish_reason in reasons
    parts = list(
        litellm.completion(messages=HI, max_tokens=8, stream=True, stream_options={"include_usage": True}, **ask)
    )
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == message.content
    assert parts[-1].usage.completion_tokens == 8
    again = litellm.completion(messages=[*HI, message.model_dump(), *HI], max_tokens=8, **ask)
    assert again.choices[0].message.content
    told = LOOP.run(litellm.acompletion(messages=HI, max_tokens=8, **ask))
    assert told.choices[0].message.content == message.content


def litellm_calls(forced: Any, **ask: Any) -> None:
    litellm = lib("litellm")
    said = litellm.completion(messages=HI, max_tokens=200, tools=[CALLABLE], tool_choice=forced, **ask).choices[0]
    (call,) = said.message.tool_calls
    assert said.finish_reason == "tool_calls" and call.function.name == "Tide"
    assert json.loads(call.function.arguments)["level"] in ("high", "low")
    result = {"role": "tool", "tool_call_id": call.id, "name": "Tide", "content": "high"}
    turns = [*HI, said.message.model_dump(), result]
    assert litellm.completion(messages=turns, max_tokens=8, tools=[CALLABLE], **ask).usage.completion_tokens == 8


def as_openai() -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0}


def as_anthropic() -> dict[str, Any]:
    return {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "temperature": 0}


def as_ollama() -> dict[str, Any]:
    return {"model": f"ollama_chat/{MODEL}", "api_base": URL, "temperature": 0}


@flow
def litellm_openai() -> None:
    litellm_basics("length", **as_openai())
    litellm_calls("required", **as_openai())
    litellm_calls({"type": "function", "function": {"name": "Tide"}}, **as_openai())


@flow
def litellm_anthropic() -> None:
    litellm_basics("length", **as_anthropic())
    litellm_calls("required", **as_anthropic())


@flow
def litellm_ollama() -> None:
    litellm_basics("stop", "length", **as_ollama())  # litellm 1.83: stop, whatever Ollama says


@flow
def litellm_structured() -> None:
    litellm = lib("litellm")
    for ask in (as_openai(), as_anthropic(), as_ollama()):
        form = {"type": "json_schema", "json_schema": {"name": "tide", "schema": TIDE_SCHEMA, "strict": True}}
        made = litellm.completion(messages=HI, max_tokens=200, response_format=form, **ask)
        assert Tide.model_validate_json(made.choices[0].message.content).level, ask
    made = litellm.completion(messages=HI, max_tokens=200, response_format=Tide, **as_openai())
    assert Tide.model_validate_json(made.choices[0].message.content).level


@flow
def litellm_responses() -> None:
    litellm = lib("litellm")
    made = litellm.responses(input="hi", max_output_tokens=16, **as_openai())
    assert made.usage.output_tokens == 16 and made.output[0].content[0].text
    events = list(litellm.responses(input="hi", max_output_tokens=16, stream=True, **as_openai()))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == made.output[0].content[0].text


@flow
def litellm_text() -> None:
    ask = {**as_openai(), "model": f"text-completion-openai/{MODEL}"}
    assert lib("litellm").text_completion(prompt="hi", max_tokens=8, **ask).choices[0].text


@flow
def litellm_errors() -> None:
    litellm = lib("litellm")
    long = [{"role": "user", "content": LONG}]
    for ask in (as_openai(), as_anthropic()):
        refused(partial(litellm.completion, messages=long, max_tokens=8, **ask), litellm.ContextWindowExceededError)
        lost = {**ask, "model": ask["model"].replace(MODEL, "gpt-9")}
        refused(partial(litellm.completion, messages=HI, max_tokens=8, **lost), litellm.NotFoundError)
    odd = {**as_openai(), "temperature": 7}
    refused(lambda: litellm.completion(messages=HI, **odd), litellm.BadRequestError, match="temperature")


# -- pydantic-ai ------------------------------------------------------------------------------------------------------


def pydantic_models() -> dict[str, Any]:
    openai, anthropic = lib("pydantic_ai.models.openai"), lib("pydantic_ai.models.anthropic")
    to_openai = lib("pydantic_ai.providers.openai").OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    client = lib("anthropic").AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)
    to_anthropic = lib("pydantic_ai.providers.anthropic").AnthropicProvider(anthropic_client=client)
    to_ollama = lib("pydantic_ai.providers.ollama").OllamaProvider(base_url=f"{URL}/v1")
    return {
        "chat": openai.OpenAIChatModel(MODEL, provider=to_openai),
        "responses": openai.OpenAIResponsesModel(MODEL, provider=to_openai),
        "anthropic": anthropic.AnthropicModel(MODEL, provider=to_anthropic),
        "ollama": openai.OpenAIChatModel(MODEL, provider=to_ollama),
    }


def pydantic_flow(kind: str) -> None:
    LOOP.run(_pydantic(pydantic_models()[kind]))


async def _pydantic(model: Any) -> None:
    ai = lib("pydantic_ai")
    agent = ai.Agent(model, model_settings={"max_tokens": 8, "temperature": 0.0}, instructions="Be kind.")
    first = await agent.run("hi")
    assert first.output and first.usage.output_tokens == 8
    assert (await agent.run("hi", message_history=first.all_messages())).output
    async with agent.run_stream("hi") as stream:
        text = "".join([part async for part in stream.stream_text(delta=True, debounce_by=None)])
    assert text == first.output
    settings = {"max_tokens": 200, "temperature": 0.0}
    natively = [ai.NativeOutput(Tide)] if "Anthropic" not in type(model).__name__ else []  # by names of models it knows
    for wanted in (ai.ToolOutput(Tide), *natively):
        made = await ai.Agent(model, model_settings=settings, output_type=wanted).run("hi")
        assert isinstance(made.output, Tide), wanted

    def tide(level: Literal["high", "low"]) -> str:
        """The tide."""
        return level

    shown = ai.Agent(model, model_settings={"max_tokens": 8, "temperature": 0.0}, tools=[tide])
    assert (await shown.run("hi")).output
    try:
        await agent.run(LONG)
    except ai.exceptions.ModelHTTPError as error:
        assert error.status_code == 400 and "context" in str(error.body)
    else:
        raise AssertionError("a prompt beyond the context was answered")


@flow
def pydantic_ai_openai() -> None:
    pydantic_flow("chat")


@flow
def pydantic_ai_responses() -> None:
    pydantic_flow("responses")


@flow
def pydantic_ai_anthropic() -> None:
    pydantic_flow("anthropic")


@flow
def pydantic_ai_ollama() -> None:
    pydantic_flow("ollama")


def main() -> None:
    warnings.simplefilter("ignore")
    for name in sys.argv[3:] or FLOWS:
        try:
            FLOWS[name]()
            wrong = ""
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)
            where = next((f"{f.filename}:{f.lineno}" for f in reversed(last) if f.filename == __file__), "")
            wrong = f"{type(error).__name__} at {where}: {error}"[:600]
        print(json.dumps({"flow": name, "wrong": wrong}), flush=True)  # noqa: T201 - read by test_frameworks.py


if __name__ == "__main__":
    main()
