"""What is wrong with a body or a parameter is said in one form on every path: what it is, what it must be, what to send."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from manyhands.api.http.hosts import OWNER_HEADER
from tests.api.served import make_model, served

READ_BY_US = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/infer",
    "/api/chat",
    "/tokenize",
    "/bus/v1/call",
)
READ_BY_FASTAPI = ("/api/show", "/api/workers/heartbeat", "/api/workers/n0/reassign")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("refusals") / "tiny")


def said(answer: httpx2.Response) -> str:
    """The message, in whichever shape the clients of its path read."""
    told = answer.json()
    error = told["error"]
    return str(told["message"] if "message" in told else error if isinstance(error, str) else error["message"])


def test_every_path_says_what_is_wrong_alike(folder: Path) -> None:
    async def main() -> None:
        async with served(folder) as scene:
            headers = {OWNER_HEADER: scene.access.owner_secret, "content-type": "application/json"}
            async with httpx2.AsyncClient(base_url=f"http://{scene.addr}", headers=headers) as client:
                for path in (*READ_BY_US, *READ_BY_FASTAPI):
                    for body in ("[]", '"x"', "null", "[1, 2]"):
                        answer = await client.post(path, content=body)
                        wanted = f"the body is {body}; it must be a JSON object: send {{...}}"
                        assert (answer.status_code, said(answer)) == (400, wanted), path
                    answer = await client.post(path, content="")
                    assert said(answer) == "the body is empty; it must be a JSON object: send {...}", path
                    answer = await client.post(path, content="{")
                    assert said(answer).startswith("the body is not JSON in UTF-8: Expecting property name"), path
                heartbeat = READ_BY_FASTAPI[1]
                for body, wanted in (
                    ("{}", f"worker_id is missing: {heartbeat} needs it"),
                    ('{"worker_id": 3}', "worker_id is 3: input should be a valid string"),
                    ('{"worker_id": "n0", "x": 1}', f"'x' is not a parameter of {heartbeat}: leave it out (/docs)"),
                ):
                    assert said(await client.post(heartbeat, content=body)) == wanted
                chat, responses, messages = "/v1/chat/completions", "/v1/responses", "/v1/messages"
                whole: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
                needed: dict[str, dict[str, Any]] = {chat: whole, responses: {"input": "Hello"}, messages: whole}
                for path, name, instead in (
                    (chat, "temprature", "did you mean temperature? If not, leave it out"),
                    (chat, "repeat_penalty", "use repetition_penalty, or leave it out"),
                    (chat, "n_predict", "use max_tokens, or leave it out"),
                    (responses, "n_predict", "use max_output_tokens, or leave it out"),
                    (responses, "guided_json", "use text, or leave it out"),
                    (chat, "ignore_eos", "use manyhands.ignore_eos, or leave it out"),
                    (messages, "ignore_eos", "leave it out"),
                    (chat, "mirostat", "leave it out"),
                ):
                    answer = await client.post(path, json=needed[path] | {name: 1})
                    assert said(answer) == f"{name!r} is not a parameter of {path}: {instead} (/docs)"
                answer = await client.get("/api/jobs?limit=0")
                assert said(answer) == 'limit is "0": input should be greater than or equal to 1'

    asyncio.run(main())
