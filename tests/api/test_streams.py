"""Streams that go on: cut at any event, the rest is what the uncut stream would have told; what is no id changes nothing."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from manyhands.api.auth import KeyRing
from manyhands.api.event_id import BadEventId
from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.server import serving
from manyhands.api.jobs import History
from manyhands.api.limits import Quota
from manyhands.api.native.routes import native_router
from manyhands.api.openai.chat import openai_router
from manyhands.api.run import Caller
from manyhands.api.streams import FREE_RESUMPTIONS, MAX_AGE_S, MAX_REMEMBERED, Streams, TakenOver
from manyhands.config import LimitsConfig
from manyhands.core import NodeAddr
from manyhands.origin import Origin
from manyhands.testing.swarm import MemorySwarm, memory_node, memory_swarm
from manyhands.worker.execute import Device
from tests.api.served import HERMES_TEMPLATE, MODEL, Watcher, make_model, post
from tests.waiting import GUARD_S, until

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/api/infer/stream"
HI: Any = [{"role": "user", "content": "hi"}]
USAGE = {"include_usage": True}
SECRET = b"of the swarm" * 3
TIDE: Any = {
    "type": "function",
    "function": {
        "name": "tide",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["c", "f"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


class Told(NamedTuple):
    """One event as a client reads it. `id` is "" for one without."""

    id: str
    name: str
    data: Any


@dataclass(slots=True)
class Doors:
    """Gateways of one swarm, each an origin of its own."""

    swarm: MemorySwarm
    addrs: list[NodeAddr] = field(default_factory=list)
    gateways: list[Gateway] = field(default_factory=list)
    watchers: list[Watcher] = field(default_factory=list)

    async def tell(self, path: str, body: Any, last: str = "", door: int = 0, key: str = "") -> tuple[int, list[Told]]:
        """The status and the events of a stream, to its end."""
        told = [event async for event in self.events(path, body, last, door, key)]
        return told[0].data, told[1:]

    async def events(
        self, path: str, body: Any, last: str = "", door: int = 0, key: str = ""
    ) -> AsyncGenerator[Told, None]:
        """The status as an event, then those of the stream; leaving it cuts the connection."""
        headers = {"last-event-id": last} if last else {}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        addr = self.addrs[door]
        reader, writer = await asyncio.open_connection(addr.host, addr.port)
        try:
            writer.write(post(path, json.dumps(body).encode(), **headers))
            async with asyncio.timeout(GUARD_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split()[1])
                yield Told("", "status", status)
                if status != 200:
                    yield Told("", "refusal", json.loads(await reader.read())["error"])
                    return
                async for event in _parsed(reader):
                    yield event
        finally:
            writer.close()

    async def quiet(self) -> None:
        """Wait until no request runs on any gateway."""
        await until(lambda: not any(gateway.num_running for gateway in self.gateways))


async def _parsed(reader: asyncio.StreamReader) -> AsyncIterator[Told]:
    """Events of a chunked body."""
    pending = b""
    while size := int(await reader.readline(), 16):
        pending += await reader.readexactly(size)
        await reader.readexactly(2)
        while b"\n\n" in pending:
            raw, _, pending = pending.partition(b"\n\n")
            found = dict(line.split(b": ", 1) for line in raw.split(b"\n") if not line.startswith(b":"))
            if data := found.get(b"data"):
                value = "[DONE]" if data == b"[DONE]" else json.loads(data)
                yield Told(found.get(b"id", b"").decode(), found.get(b"event", b"").decode(), value)


@asynccontextmanager
async def doors(
    folder: Path, num: int = 1, *, keys: KeyRing | None = None, limits: LimitsConfig | None = None, **options: Any
) -> AsyncIterator[Doors]:
    async with memory_swarm(folder, options.pop("cut", "0,1"), **options) as swarm, AsyncExitStack() as stack:
        made = Doors(swarm)
        for index in range(num):
            origin = swarm.origin
            if index:
                node = await stack.enter_async_context(
                    memory_node(swarm.network, f"origin{index}", request=options.get("request"))
                )
                device = Device.start(1)
                stack.callback(device.close)
                origin = Origin(node, swarm.origin.model, device, swarm.addrs)
            watcher = Watcher()
            gateway = Gateway({MODEL: origin}, limits, [watcher], secret=SECRET)
            routers = [openai_router(gateway), native_router(gateway, History())]
            app = create_app(gateway, keys=keys, routers=routers)
            made.addrs.append(await stack.enter_async_context(serving(app, "127.0.0.1", 0)))
            made.gateways.append(gateway)
            made.watchers.append(watcher)
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("streams") / "m", HERMES_TEMPLATE)


def play(folder: Path, scene: Callable[[Doors], Awaitable[None]], num: int = 1, **options: Any) -> None:
    async def main() -> None:
        async with doors(folder, num, **options) as it:
            await scene(it)
            await it.quiet()

    asyncio.run(main())


def chat(**more: Any) -> Any:
    return {"model": MODEL, "messages": HI, "max_tokens": 14, "temperature": 0.9, "stream": True, **more}


VARYING = (
    "ms",
    "redrawn_tokens",
    "cached_tokens",
    "total_latency_ms",
    "timings",
    "worker_trace",
    "session",
    "assignments",
    "decode_worker",
)


def shown(events: list[Told]) -> list[Any]:
    """What must be the same in any attempt: all but times, routes and whether something was cached."""
    out = []
    for event in events:
        data = json.loads(json.dumps(event.data))
        if event.name in ("shard_status", "token_delta", "reshard", "resumed"):
            continue
        if isinstance(data, dict):
            for name in VARYING:
                data.pop(name, None)
            for choice in data.get("choices", ()):
                choice.pop("manyhands", None)
            (data.get("usage") or {}).pop("prompt_tokens_details", None)
        out.append((event.name, data))
    return out


CUTS = 3  # of each stream, beside the first and the last event: random ones
WISHES: dict[str, tuple[str, Any]] = {
    "plain": (CHAT, chat(seed=4)),
    "no seed": (CHAT, chat(manyhands={"ignore_eos": True})),
    "logprobs, stop, usage": (CHAT, chat(logprobs=True, top_logprobs=2, stop=["qe", "xyz"], seed=9, stream_options=USAGE)),
    "penalties": (CHAT, chat(presence_penalty=0.5, manyhands={"repetition_penalty": 1.2, "top_k": 40})),
    "a call": (CHAT, chat(max_tokens=60, tools=[TIDE], tool_choice="required", seed=2)),
    "three choices": (CHAT, chat(n=3, max_tokens=6, stream_options=USAGE)),
    "prompts": (TEXT, {"model": MODEL, "prompt": ["ab", "cd"], "n": 2, "max_tokens": 5, "logprobs": 1, "stream": True}),
    "native": (NATIVE, {"prompt": "Once upon", "max_tokens": 9}),
    "native, diagnostics": (NATIVE + "?diagnostics=1", {"prompt": "Once upon", "max_tokens": 5, "seed": 3}),
}  # fmt: skip


@pytest.mark.parametrize("wish", WISHES)
def test_cut_at_every_event(folder: Path, wish: str) -> None:
    """Ids, creation time, ids of calls, text split within characters, odds and counts go on; at the gateway that began it."""
    path, body = WISHES[wish]

    async def scene(it: Doors) -> None:
        status, whole = await it.tell(path, body)
        assert (status == 200 and len(whole) > 3 and whole[-1].data == "[DONE]") or whole[-1].name == "done"
        named = [event for event in whole if event.id]
        assert len({event.id for event in named}) == len(named) > 2
        numbers = [number for number, event in enumerate(whole) if event.id]
        for number in sorted({0, numbers[-1], *random.Random(wish).sample(numbers, min(len(numbers), CUTS))}):
            event = whole[number]
            status, rest = await it.tell(path, body, event.id)
            assert status == 200 and by_choice(shown(rest)) == by_choice(shown(whole[number + 1 :])), number

    play(folder, scene, limits=LimitsConfig(max_choices=4))


def by_choice(events: list[Any]) -> dict[Any, list[Any]]:
    """Several choices run side by side: their events may mix in any way, each choice's keep their order."""
    out: dict[Any, list[Any]] = {}
    for name, data in events:
        choices = data.get("choices") if isinstance(data, dict) else None
        out.setdefault(choices[0]["index"] if choices else None, []).append((name, data))
    return out


def test_a_stream_that_is_really_cut(folder: Path) -> None:
    """Cut and resumed again and again, at random moments, at one of two gateways: the parts together are the whole."""

    async def scene(it: Doors) -> None:
        draw = random.Random(5)
        for path, body in (WISHES["three choices"], WISHES["native"], WISHES["plain"]):
            whole = (await it.tell(path, {**body, "seed": 12}))[1]
            got: list[Told] = []
            for door in [0, 0, *(draw.randrange(2) for _ in range(6))]:
                events = it.events(path, {**body, "seed": 12}, got[-1].id if got else "", door)
                assert (await anext(events)).data == 200
                for _ in range(draw.randrange(1, 5)):
                    got += [event] if (event := await anext(events, None)) is not None and event.id else []
                await events.aclose()
            got += (await it.tell(path, {**body, "seed": 12}, got[-1].id, 1))[1] if got[-1].name != "done" else []
            assert by_choice(same(got)) == by_choice(same(whole))

    play(folder, scene, num=2)


def same(events: list[Told]) -> list[Any]:
    """As `shown`, without what tells one stream from another."""
    out = shown(events)
    for _, data in out:
        for name in ("id", "created", "request_id"):
            data.pop(name, None) if isinstance(data, dict) else None
    return out


def test_what_is_no_id_of_this_request_and_key_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """400 that says why; no job, no charge. Another key's id, another request's, a cut one, another swarm's, an old one."""
    keys = KeyRing(tmp_path / "keys.json")
    ann, bob = keys.add("ann", 0.0, quota=Quota(requests_per_minute=2)), keys.add("bob", 0.0)

    async def scene(it: Doors) -> None:
        body = chat(seed=4)
        _, whole = await it.tell(CHAT, body, key=ann)
        good = whole[3].id
        changed = ("B" if good[50] == "A" else "A").join([good[:50], good[51:]])
        others = [
            (body, good, bob, "another key"),
            (chat(seed=5), good, ann, "another request"),
            (chat(seed=4, stop=["q"]), good, ann, "another request"),
            ({**body, "messages": [{"role": "user", "content": "ho"}]}, good, ann, "another request"),
            ({**body, "stream": False}, good, ann, "stream: true"),
            (body, good[:-1], ann, "not whole"),
            (body, changed, ann, "not the id"),
            (body, "7", ann, "not the id"),
            (body, "x" * 40000, ann, "characters"),
        ]
        before = len(it.watchers[0].ended_jobs)
        for asked, last, key, why in others:
            status, (refusal,) = await it.tell(CHAT, asked, last, key=key)
            assert status == 400 and refusal.data["code"] == "bad_event_id" and why in refusal.data["message"], why
        assert len(it.watchers[0].ended_jobs) == before
        assert (await it.tell(NATIVE, {"prompt": "x"}, good, key=ann))[0] == 400
        status, rest = await it.tell(CHAT, body, whole[5].id, key=ann)  # a part of the request that was charged
        assert status == 200 and shown(rest) == shown(whole[6:])
        status, (refusal,) = await it.tell(CHAT, body, good, key=ann)
        assert status == 400 and "newest" in refusal.data["message"]

    play(folder, scene, keys=keys)


def test_tokens_are_charged_once(folder: Path, tmp_path: Path) -> None:
    """A quota of tokens that holds one answer and a half: resumed eight times it is not used up, then it is."""
    keys = KeyRing(tmp_path / "keys.json")
    key = keys.add("ann", 0.0, quota=Quota(tokens_per_day=30, requests_per_minute=1))

    async def scene(it: Doors) -> None:
        body = chat(seed=4)
        status, whole = await it.tell(CHAT, body, key=key)
        assert status == 200
        for _ in range(FREE_RESUMPTIONS):
            status, rest = await it.tell(CHAT, body, whole[-2].id, key=key)
            assert status == 200 and shown(rest) == shown(whole[-1:])
        status, (refusal,) = await it.tell(CHAT, body, whole[-2].id, key=key)
        assert status == 429 and refusal.data["code"] == "rate_limit_exceeded"

    play(folder, scene, keys=keys)


def test_no_choice_of_a_stream_that_goes_on_is_another_request(folder: Path, tmp_path: Path) -> None:
    keys = KeyRing(tmp_path / "keys.json")
    key = keys.add("ann", 0.0, quota=Quota(requests_per_minute=3))

    async def scene(it: Doors) -> None:
        body = chat(seed=4, n=3)
        status, whole = await it.tell(CHAT, body, key=key)
        assert status == 200
        status, rest = await it.tell(CHAT, body, whole[3].id, key=key)
        assert status == 200
        ended = [
            c["index"] for event in rest if event.data != "[DONE]" for c in event.data["choices"] if c["finish_reason"]
        ]
        assert sorted(ended) == [0, 1, 2]

    play(folder, scene, keys=keys)


def test_a_client_that_comes_back_ends_its_first_attempt(folder: Path) -> None:
    """The connection still stands, for all that the gateway knows: one attempt runs, the other is told."""

    async def scene(it: Doors) -> None:
        body = chat(seed=4, max_tokens=900, manyhands={"ignore_eos": True})
        first = it.events(CHAT, body)
        seen = [await anext(first) for _ in range(6)]
        again = it.events(CHAT, body, seen[-1].id)
        assert (await anext(again)).data == 200 and (await anext(again)).id
        left = [event async for event in first]
        assert left[-1].data["error"]["code"] == "stream_resumed" and it.gateways[0].num_running == 1
        await again.aclose()

    play(folder, scene)


FORM: Any = {"type": "json_schema", "json_schema": {"name": "tide", "schema": TIDE["function"]["parameters"]}}


@pytest.mark.parametrize("wish", ["logprobs, stop, usage", "three choices", "native", "grammar", "penalties"])
def test_another_gateway_adopts_what_a_dead_one_had_computed(folder: Path, wish: str) -> None:
    """One gateway's links are gone: the hops have kept the session, the other gateway says that it adopted it."""
    path, body = WISHES[wish] if wish in WISHES else (CHAT, chat(max_tokens=40, response_format=FORM))

    async def scene(it: Doors) -> None:
        whole = (await it.tell(path, {**body, "seed": 12}))[1]
        events = it.events(path, {**body, "seed": 12})
        got = [event for event in [await anext(events) for _ in range(5)] if event.id]
        node = it.gateways[0].origins[MODEL].node
        await node.pool.aclose()
        status, rest = await it.tell(path, {**body, "seed": 12}, got[-1].id, 1)
        await events.aclose()
        assert status == 200 and by_choice(same([*got, *rest])) == by_choice(same(whole))
        if wish == "native":
            assert rest[-1].data["redrawn_tokens"] > 0
        else:
            ends = [choice for event in rest if event.data != "[DONE]" for choice in event.data["choices"]]
            said = [end["manyhands"]["resumed"] for end in ends if end["finish_reason"]]
            assert said and all(each["by"] == "adoption" for each in said if each["tokens"])

    play(folder, scene, num=2, limits=LimitsConfig(max_choices=4))


@pytest.mark.parametrize("wish", ["plain", "three choices", "native", "logprobs, stop, usage"])
def test_what_the_client_says_it_has_saves_rounds_and_changes_nothing(
    folder: Path, wish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hop has anything of the stream. Its text, another text and none give the same events."""
    monkeypatch.setattr("manyhands.worker.batch.FEWEST_ROWS", 200)  # prompts are one device step, and choices in step
    path, body = WISHES[wish]
    body = {**body, "seed": 12, "max_tokens": 24}

    async def scene(it: Doors) -> None:
        whole = (await it.tell(path, body))[1]
        numbers = [number for number, event in enumerate(whole) if event.id]
        number = numbers[len(numbers) * 3 // 4]
        texts = texts_of(whole[: number + 1], 3 if wish == "three choices" else 1)
        steps = []
        for said in (texts, ["no such text"] * len(texts), None):
            for node in it.swarm.hops:
                node.hosts[0].parking.clear()
            more = {} if said is None else {"received": said[0]} if path == NATIVE else ours(body, received=said)
            before = it.swarm.hops[0].hosts[0].engine.steps_run
            status, rest = await it.tell(path, {**body, **more}, whole[number].id)
            assert status == 200 and by_choice(shown(rest)) == by_choice(shown(whole[number + 1 :])), said
            steps.append(it.swarm.hops[0].hosts[0].engine.steps_run - before)
        assert steps[0] < steps[2], steps

    play(folder, scene, limits=LimitsConfig(max_choices=4))


def ours(body: Any, **more: Any) -> Any:
    return {"manyhands": {**body.get("manyhands", {}), **more}}


def texts_of(events: list[Told], num_choices: int) -> list[str]:
    """What a client has of each choice."""
    texts = [""] * num_choices
    for event in events:
        if event.name == "token":
            texts[0] += event.data["token_text"]
        for choice in event.data.get("choices", ()) if isinstance(event.data, dict) else ():
            texts[choice["index"]] += choice["delta"].get("content") or ""
    return texts


def test_a_text_that_nothing_would_be_made_of_is_refused(folder: Path) -> None:
    """Without Last-Event-ID, not one of each choice, or more than the context holds. A path without streams that go on
    refuses it always."""

    async def scene(it: Doors) -> None:
        event = next(event for event in (await it.tell(CHAT, chat()))[1] if event.id)
        asked: list[tuple[str, Any, str]] = [
            (CHAT, chat(manyhands={"received": ["a"]}), ""),
            (CHAT, chat(stream=False, manyhands={"received": ["a"]}), ""),
            (CHAT, chat(manyhands={"received": ["a", "b"]}), event.id),
            (CHAT, chat(manyhands={"received": ["a" * 1_000_000]}), event.id),
            (NATIVE, {"prompt": "ab", "received": "a"}, ""),
            ("/api/infer", {"prompt": "ab", "received": "a"}, ""),
        ]
        for path, body, last in asked:
            status, told = await it.tell(path, body, last)
            assert status == 400 and "received" in json.dumps(told[0].data), (path, told)

    play(folder, scene)


def test_an_answer_whose_prompt_went_with_loss_is_not_gone_on_with(folder: Path) -> None:
    """What was rounded on its way is not known of a stream that was cut: its rest could be that of another text."""

    async def scene(it: Doors) -> None:
        for path, body in (
            (CHAT, chat(manyhands={"codec": "int8"})),
            (NATIVE, {"prompt": "Once upon", "max_tokens": 9, "codec": "int8"}),
        ):
            status, whole = await it.tell(path, body)
            assert status == 200
            event = next(event for event in whole if event.id)
            status, told = await it.tell(path, body, event.id)
            assert status == 400 and "codec int8 cannot be gone on with" in json.dumps(told[0].data), (path, told)
            status, again = await it.tell(path, body)
            assert status == 200 and len(again) > 3

    play(folder, scene)


# -- what a gateway remembers -----------------------------------------------------------------------------------------


def id_of(stream: Any) -> str:
    line = stream._with_id(b"x").splitlines()[0]
    return str(line.removeprefix(b"id: ").decode())


def test_an_attempt_that_was_asked_for_first_does_not_end_a_later_one() -> None:
    """It was prepared for longer, for a client that has come back since and reads the other one."""

    async def main() -> None:
        streams, ann, told = Streams(SECRET), Caller("ann", tenant="a"), list[str]()
        last = id_of(streams.open(None, b"r" * 8, ann, 1, 1))
        claims = [streams.claim(last, ann) for _ in range(2)]
        first, second = (streams.open(claim, b"r" * 8, ann, 1, 1) for claim in claims)
        is_over = asyncio.Event()

        async def produce(name: str) -> None:
            await is_over.wait()
            told.append(name)

        running = asyncio.ensure_future(second.run(lambda: produce("second")))
        await asyncio.sleep(0)
        with pytest.raises(TakenOver):
            await asyncio.wait_for(first.run(lambda: produce("first")), GUARD_S)
        is_over.set()
        await running
        assert told == ["second"]
        third = streams.open(streams.claim(last, ann), b"r" * 8, ann, 1, 1)
        await third.run(lambda: produce("third"))
        assert told == ["second", "third"]

    asyncio.run(main())


def test_claims_are_bounded_in_age_number_and_memory() -> None:
    now = [1000.0]
    streams, ann = Streams(SECRET, lambda: now[0]), Caller("ann", tenant="a")
    first = id_of(streams.open(None, b"r" * 8, ann, 1, 1))
    elsewhere = Streams(SECRET, lambda: now[0])
    assert [elsewhere.claim(first, ann).is_free for _ in range(10)] == [True] * 8 + [False] * 2
    for caller in (Caller(), Caller("bob", tenant="b")):
        with pytest.raises(BadEventId, match="another key"):
            streams.claim(first, caller)
    with pytest.raises(BadEventId, match="not the id"):
        Streams(b"another swarm" * 3).claim(first, ann)
    for number in range(MAX_REMEMBERED + 100):
        streams.claim(id_of(streams.open(None, b"r" * 8, ann, number, 1)), ann)
    (remembered,) = streams._callers.values()
    assert len(remembered.streams) == MAX_REMEMBERED
    now[0] += MAX_AGE_S + 1
    with pytest.raises(BadEventId, match="good for"):
        streams.claim(first, ann)


def test_who_rotates_more_streams_than_are_remembered_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was forgotten before its turn came again, and so resumed for free without end."""
    monkeypatch.setattr("manyhands.api.streams.MAX_REMEMBERED", 16)
    now = [1000.0]
    streams, ann, bob = Streams(SECRET, lambda: now[0]), Caller("ann", tenant="a"), Caller("bob", tenant="b")
    ids = [id_of(streams.open(None, b"r" * 8, ann, number, 1)) for number in range(17)]
    others = id_of(streams.open(None, b"r" * 8, bob, 1, 1))
    free = sum(streams.claim(each, ann).is_free for _ in range(50) for each in ids)
    assert len(ids) <= free <= len(ids) * FREE_RESUMPTIONS
    assert streams.claim(others, bob).is_free, "what one key forgets is no other's loss"
    now[0] += 1
    assert streams.claim(id_of(streams.open(None, b"r" * 8, ann, 99, 1)), ann).is_free
