"""How far a long prompt is: in the native stream's frames, in OpenAI's chunks if asked for, in jobs and on the terminal."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from manyhands.api import gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.server import serving
from manyhands.api.jobs import History
from manyhands.api.native.routes import native_router
from manyhands.cli.chat_text import waiting_for
from manyhands.config import RequestConfig
from manyhands.core import NodeAddr
from tests.api.observed import events
from tests.api.served import MODEL, Served, make_model, served

LONG = "x" * 700
CHUNKED = RequestConfig(prefill_chunk=32)


def test_a_long_prompt_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "LOOK_S", 0.002)
    folder = make_model(tmp_path / "m")

    async def native(addr: NodeAddr, query: str) -> list[tuple[str, dict[str, Any]]]:
        body = {"prompt": LONG, "max_tokens": 2, "deterministic": True}
        async with httpx2.AsyncClient(base_url=f"http://{addr}", timeout=30.0) as client:
            async with client.stream("POST", f"/api/infer/stream{query}", json=body) as response:
                return [told async for told in events(response)]

    async def chat(it: Served, **more: Any) -> tuple[list[Any], str]:
        messages: Any = [{"role": "user", "content": LONG}]
        ask = {"model": MODEL, "messages": messages, "max_tokens": 3, "temperature": 0, "stream": True}
        chunks = [chunk async for chunk in await (await it.client()).chat.completions.create(**ask, extra_body=more)]
        return chunks, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    async def main() -> None:
        history = History()
        async with served(folder, request=CHUNKED) as it:
            it.gateway.observers.append(history)
            app = create_app(it.gateway, routers=[native_router(it.gateway, history)])
            async with serving(app, "127.0.0.1", 0) as addr:
                told, plain_told = await native(addr, "?diagnostics=1"), await native(addr, "")
            frames = [data for event, data in told if event == "prefill"]
            done = [frame["processed"] for frame in frames]
            assert done == sorted(set(done)) and all(
                0 < each < 700 == frame["total"] for each, frame in zip(done, frames, strict=True)
            )
            assert len(done) >= 2 and [event for event, _ in told].index("start") == len(done)
            assert all(event != "prefill" for event, _ in plain_told)

            chunks, text = await chat(it, return_progress=True)
            progress = [chunk.prompt_progress for chunk in chunks if not chunk.choices]
            assert len(progress) >= 1 and chunks[0].prompt_progress == progress[0]
            assert all(0 < each["processed"] < each["total"] and each["time_ms"] >= 0 for each in progress)
            plain, same = await chat(it)
            assert same == text and all(chunk.choices for chunk in plain)
            jobs = list(history.recent())
            assert len(jobs) == 4 and all(job["prefilled_tokens"] == job["prompt_tokens"] >= 700 for job in jobs)

    asyncio.run(main())


def test_a_terminal_tells_how_much_is_read() -> None:
    job = {"status": "running", "completion_tokens": 0, "hops": [{"name": "a"}], "events": [], "prompt_tokens": 4000}
    assert waiting_for({**job, "prefilled_tokens": 1000}) == "reading the prompt, 25 % of 4000 tokens, on a"
    for done in (0, 4000):
        assert waiting_for({**job, "prefilled_tokens": done}) == "reading the prompt on a"
    assert waiting_for(job) == "reading the prompt on a"
