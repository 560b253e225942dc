"""Every field of the paths that are not OpenAI's: what works gives 200, what is refused 400, in the path's own shape of error.
OpenAI's: tests/api/openai/test_chat.py."""

from pathlib import Path
from typing import Any

import pytest

from manyhands.api.fields import ENDPOINTS, FIELDS, table
from tests.api.served import MODEL, Served, post, raw
from tests.compat.conftest import Stage, sent

HI: Any = [{"role": "user", "content": "hi"}]
LITTLE = {"options": {"num_predict": 2}, "stream": False}
BASES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HI},
    "/api/chat": {"messages": HI, **LITTLE},
    "/api/generate": {"prompt": "hi", **LITTLE},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [65]},
}
PAGES = {"/v1/messages": "anthropic.md", "/api/chat": "ollama.md", "/api/generate": "ollama.md"}
PAGES |= {"/tokenize": "openai.md", "/detokenize": "openai.md"}


def said_in(path: str, told: dict[str, Any]) -> str:
    """The message of an error, of the path's shape."""
    if path.startswith("/v1/messages"):
        assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    error = told["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert isinstance(message, str)
    return message


@pytest.mark.parametrize("path", list(BASES))
def test_every_field_is_honoured_or_refused_by_name(path: str, stage: Stage) -> None:
    async def scene(it: Served) -> None:
        for field in FIELDS[path]:
            for value in field.shown.works:
                body = {**BASES[path], **field.shown.needs, field.name: value}
                body = {n: v for n, v in body.items() if n != "content"} if field.name == "prompt" else body
                status, told = await sent(it, path, body)
                assert status == 200, (field.name, value, told)
            for value in field.shown.refused:
                status, told = await sent(it, path, {**BASES[path], **field.shown.needs, field.name: value})
                assert status == 400, (field.name, value, told)
                assert field.name.split("_")[0] in said_in(path, told), (field.name, told)
        status, told = await sent(it, path, {**BASES[path], "frobnicate": 1})
        assert status == 400 and "frobnicate" in said_in(path, told)
        status, told = await sent(it, path, {**BASES[path], "model": "gpt-9"})
        assert status == 404
        size = it.gateway.limits.max_body_bytes + 1
        status, answer = await raw(it.addr, post(path, b"").replace(b"content-length: 0", b"content-length: %d" % size))
        assert status == 413 and b"bytes" in answer

    stage.play(scene)


def test_the_tables_are_current() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for path, page in PAGES.items():
        assert table(path) in (docs / page).read_text("utf8"), f"docs/{page}: put in table({path!r}) of api/fields.py"
    assert set(FIELDS) == {*ENDPOINTS, *BASES, "/api/infer", "/bus/v1/call", "/v1/responses/input_tokens"} and MODEL
