"""A gateway on a real port of this machine, over a swarm in this process."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from manyhands.api.access import Access
from manyhands.api.auth import KeyRing
from manyhands.api.formats import ModelFormats
from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.server import serving
from manyhands.api.jobs import History
from manyhands.api.native.routes import native_router
from manyhands.api.routers import compatible_routers
from manyhands.api.run import Job, Outcome
from manyhands.config import LimitsConfig
from manyhands.core import NodeAddr
from manyhands.origin import Token
from manyhands.origin.repair_plan import Event
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.testing.tiny import make_tiny
from tests.waiting import GUARD_S

MODEL = "tiny"
HERMES_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }} answer with <tool_call>{}</tool_call><|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(folder: Path, template: str | None = None, **options: Any) -> Path:
    """A tiny model of two layers; `template` instead of its chat template."""
    out = make_tiny("qwen3", folder, layers=2, seed=21, **options)
    if template is not None:
        (out / "chat_template.jinja").write_text(template)
        config = json.loads((out / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (out / "tokenizer_config.json").write_text(json.dumps(config))
    return out


@dataclass(slots=True)
class Watcher:
    """An observer that writes down what it is told."""

    started_jobs: list[Job] = field(default_factory=list)
    ended_jobs: list[Job] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    num_tokens: int = 0
    events: list[Event] = field(default_factory=list)

    def started(self, job: Job) -> None:
        self.started_jobs.append(job)

    def token(self, job: Job, token: Token) -> None:
        self.num_tokens += 1

    def event(self, job: Job, event: Event) -> None:
        self.events.append(event)

    def ended(self, job: Job, outcome: Outcome) -> None:
        self.ended_jobs.append(job)
        self.outcomes.append(outcome)


@dataclass(slots=True)
class Served:
    """What a test holds on to."""

    addr: NodeAddr
    gateway: Gateway
    swarm: MemorySwarm
    watcher: Watcher
    clients: AsyncExitStack
    access: Access

    async def client(self, key: str = "none") -> AsyncOpenAI:
        made = AsyncOpenAI(base_url=f"http://{self.addr}/v1", api_key=key, max_retries=0, timeout=30.0)
        return await self.clients.enter_async_context(made)

    @property
    def num_sessions(self) -> int:
        """Sessions open at the origin and leased on its hops."""
        hosts = [host for node in self.swarm.hops for host in node.hosts]
        return len(self.swarm.origin.node.sessions) + sum(host.num_sessions for host in hosts)

    async def freed(self) -> float:
        """Wait until no session is left and no request, which ends after its session; the seconds it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(GUARD_S):
            while self.num_sessions or self.gateway.jobs:  # noqa: ASYNC110 - what is waited for is another's state
                await asyncio.sleep(0.005)
        return loop.time() - began


@asynccontextmanager
async def served(
    folder: Path, *, limits: LimitsConfig | None = None, keys: KeyRing | None = None, cut: str = "0,1", **options: Any
) -> AsyncIterator[Served]:
    watcher = Watcher()
    async with memory_swarm(folder, cut, **options) as swarm:
        gateway = Gateway({MODEL: swarm.origin}, limits, [watcher])
        formats = ModelFormats(gateway)
        routers = [*compatible_routers(gateway, formats), native_router(gateway, History(), formats)]
        app = create_app(gateway, keys=keys, routers=routers)
        async with serving(app, "127.0.0.1", 0) as addr, AsyncExitStack() as clients:
            yield Served(addr, gateway, swarm, watcher, clients, app.state.access)


async def raw(addr: NodeAddr, data: bytes) -> tuple[int, bytes]:
    """Send bytes, read until the server closes; the status and all that came."""
    reader, writer = await asyncio.open_connection(addr.host, addr.port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(GUARD_S):
            said = await reader.read(1 << 20)
    finally:
        writer.close()
    return (int(said.split()[1]) if said else 0), said


async def raw_slowly(it: Served, sent: bytes) -> tuple[int, bytes]:
    """As `raw`, all of an answer that may take its time."""
    reader, writer = await asyncio.open_connection(it.addr.host, it.addr.port)
    writer.write(sent)
    async with asyncio.timeout(GUARD_S):
        said = await reader.read()
    writer.close()
    return int(said.split()[1]), said


def post(path: str, body: bytes, **headers: str) -> bytes:
    """An HTTP request that closes its connection."""
    headers = {"content-type": "application/json", **headers}
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
