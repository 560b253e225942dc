"""Requests of a Town, and the states of it that a test waits for; in virtual time."""

import asyncio
from dataclasses import replace
from typing import Any

from manyhands.core import SamplingParams, Span
from manyhands.origin import Answer
from manyhands.route.offer import Rules
from tests.member.members import Town

PROMPT = tuple(range(3, 12))
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
WHOLE = Span(0, 4)


async def until(is_so: Any, seconds: float = 30.0) -> None:
    """Wait in virtual time."""
    async with asyncio.timeout(seconds):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def settled(place: Town, *spans: str) -> Any:
    """Members n0, n1, ... that host `spans` ("": none), and the origin on n0 once it knows them all."""
    members = [
        (await place.host(i, span=Span.parse(span))).member if span else await place.open(i)
        for i, span in enumerate(spans)
    ]
    first, num_hosts = members[0], sum(map(bool, spans))
    await until(lambda: len([r for r in first.records() if r.info and r.info.max_sessions]) == num_hosts)
    await until(lambda: all(is_measured(first, member) for member in members[1:]))
    return place.origin(first), members


def is_measured(first: Any, other: Any) -> bool:
    link = first.node.pool.find(other.id, "control")
    return link is not None and link.health.rtt_s is not None


def level(origin: Any) -> None:
    """All nodes compute equally fast from now on, as far as `origin` knows: this machine's own pace decides no route."""
    origin.routes.informed = lambda offers: [replace(o, load=replace(o.load, layer_s=0.001)) for o in offers]


async def ask(origin: Any, rules: Rules, tenant: str | None = None) -> Answer:
    found: Answer = await origin.complete(origin.request_ids(PROMPT, PARAMS), rules=rules, tenant=tenant)
    return found


def shown(answer: Answer) -> str:
    return " ".join(f"{o.name}:{o.info.span}" for o in answer.route)


def place_records(origin: Any) -> list[Any]:
    return [r for r in origin.routes._directory.records() if r.info]
