"""kill -9 of the process that tells a stream: the same request with Last-Event-ID goes on at another member, over warm hops."""

import asyncio
import json
import signal
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.colony import Colony, colony
from manyhands.core import NodeAddr
from manyhands.testing.swarm import MemorySwarm
from tests.api.test_streams import CHAT, NATIVE, TEXT, Doors, Told

pytestmark = pytest.mark.slow

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "presence_penalty": 0.4, "max_tokens": 300}
WISHES: dict[str, tuple[str, dict[str, Any]]] = {
    "penalties, stop strings": (TEXT, {"prompt": "Once upon a time", "stop": ["the end of it"], **SAMPLED}),
    "two choices": (CHAT, {"messages": [{"role": "user", "content": "Tell me a tale"}], "n": 2, **SAMPLED}),
    "native": (NATIVE, {"prompt": "The old king", "temperature": 0.9, "seed": 5, "max_tokens": 300}),
}


def said(events: list[Told]) -> dict[int, str]:
    """The text of each choice."""
    out: dict[int, str] = {}
    for event in events:
        data = event.data if isinstance(event.data, dict) else {}
        if event.name == "token":
            out[0] = out.get(0, "") + str(data["token_text"])
        for choice in data.get("choices", []):
            new = choice.get("text") or choice.get("delta", {}).get("content") or ""
            out[choice["index"]] = out.get(choice["index"], "") + new
    return out


def ways(events: list[Told]) -> list[dict[str, Any]]:
    """How the choices went on, as their last events say."""
    choices = [choice for event in events if isinstance(event.data, dict) for choice in event.data.get("choices", [])]
    return [choice["manyhands"]["resumed"] for choice in choices if choice["finish_reason"]]


def test_a_killed_gateways_streams_go_on_at_another_member() -> None:
    """Three members, two of which hold the layers: the third, which no route uses, tells the streams until it is killed."""

    async def scene(town: Colony) -> None:
        first, second, third = (town.resident(name) for name in ("first", "second", "third"))
        api = await town.found(first, "--layers", "0-5")
        await town.join(second, "--layers", "6-11")
        for wish, (path, body) in WISHES.items():
            await town.join(third, "--spare")
            theirs = (await third.said("api"))["api"]
            it = Doors(swarm=_none(), addrs=[_addr(theirs), _addr(api)])
            wanted = {"model": "tales", **body, **({} if path == NATIVE else {"stream": True})}
            _, whole = await it.tell(path, wanted, door=1)
            got: list[Told] = []
            async with aclosing(it.events(path, wanted)) as events:
                assert (await anext(events)).data == 200, [event.data async for event in events]
                async for event in events:
                    got.append(event)
                    if len(got) == 30:
                        break
                third.signal(signal.SIGKILL)
                await third.ended()
            named = [number for number, event in enumerate(got) if event.id]
            status, rest = await it.tell(path, wanted, got[named[-1]].id, 1)
            assert status == 200, json.dumps([event.data for event in rest])
            assert said([*got[: named[-1] + 1], *rest]) == said(whole), wish
            if path == NATIVE:
                assert rest[-1].data["redrawn_tokens"] > 5
            else:
                assert ways(rest) and all(way["by"] == "adoption" and way["tokens"] > 2 for way in ways(rest)), wish

    async def with_colony() -> None:
        async with colony(forked=True) as town:
            await scene(town)

    asyncio.run(with_colony())


def _none() -> MemorySwarm:
    """These doors lead to processes."""
    none: Any = None
    return none  # type: ignore[no-any-return]


def _addr(url: str) -> NodeAddr:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return NodeAddr(parts.hostname, parts.port)
