"""The attackers of bench.siege, in a process of their own: what each family tried, and how it was answered.

Reads one JSON line {"api": URL, "ticket": TICKET, "addresses": ["HOST:PORT", ...], "seconds": S} on stdin, attacks for S
seconds, prints one JSON line {FAMILY: {"attempts": N, ANSWER: N, ...}}. Every family is bounded in rate, connections and
memory: it shows what the swarm bears, not what the machine does. Addresses must be on loopback.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from ipaddress import ip_address
from typing import Any

from bench import insider
from bench.target import Target

HALF_OPEN = 200  # connections to each port at a time
IDLE_HTTP = 200


async def post(target: Target, family: str, path: str, body: bytes, *, headers: str = "", method: str = "POST") -> None:
    """One request; its status is counted. A connection that breaks or is silent for a minute counts as such."""
    target.count(family)
    host, port = target.host
    content = "" if "content-type" in headers else "content-type: application/json\r\n"
    named = "" if "host:" in headers.lower() else f"host: {host}:{port}\r\n"
    head = (
        f"{method} {path} HTTP/1.1\r\n{named}{content}{headers}connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(host, port)
            with contextlib.closing(writer):
                writer.write(head.encode() + body)
                line = await reader.readline()
                target.count(family, line[9:12].decode() or "closed")
                while await reader.read(1 << 16):
                    pass
    except OSError:  # TimeoutError too
        target.count(family, "broken")


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "tales", "max_tokens": 2, **fields}).encode()


def talk(**fields: Any) -> dict[str, Any]:
    return {"model": "tales", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}], **fields}


def chat(**fields: Any) -> bytes:
    return json.dumps(talk(**fields)).encode()


def tool_of(parameters: str) -> bytes:
    """A chat with one tool whose parameters are the given JSON text."""
    marker = '"PARAMETERS"'
    tool = {"type": "function", "function": {"name": "f", "parameters": json.loads(marker)}}
    return chat(tools=[tool]).replace(marker.encode(), parameters.encode())


async def costly_bodies(target: Target) -> None:
    """Bodies just below 16 MiB that cost much to parse, check or tokenise, one after the other."""
    ids = list(range(250))
    texts = {
        "ids": lambda: completion(prompt=ids * 4000),
        "lists": lambda: completion(prompt=[ids * 4000] * 4),
        "parts": lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 400_000}]),
        "arrays": lambda: tool_of("{" + '"a":[' + ",".join(["[]"] * 4_000_000) + "]}"),
        "deep": lambda: tool_of("[" * 50_000 + "]" * 50_000),
        "text": lambda: completion(prompt="a b " * 4_000_000),
        "message": lambda: chat(messages=[{"role": "user", "content": "word " * 3_000_000}]),
        "bias": lambda: completion(prompt="x", logit_bias={str(i): 1 for i in range(300_000)}),
        "stops": lambda: completion(prompt="x", stop=["s"] * 500_000),
    }
    while not target.is_over:
        for name, make in texts.items():
            path = "/v1/chat/completions" if name in ("parts", "arrays", "deep", "message") else "/v1/completions"
            body = await asyncio.to_thread(make)
            await post(target, "costly_bodies", path, body)
            if target.is_over:
                return
            await asyncio.sleep(0.5)


COSTLY_GRAMMARS = [
    talk(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    for schema in (
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{10 + i}}}"} for i in range(20)]},
        {"$ref": "#"},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
        {"type": "string", "pattern": "(((a{1,50}){1,50}){1,50})b"},
    )
]


async def costly_grammars(target: Target) -> None:
    """Grammars and templates that take long to compile, from clients that leave at once."""
    host, port = target.host
    while not target.is_over:
        body = json.dumps(random.choice(COSTLY_GRAMMARS)).encode()
        target.count("costly_grammars")
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await asyncio.sleep(0.05)
            writer.close()
            target.count("costly_grammars", "left")
        await asyncio.sleep(0.2)


async def foreign_pages(target: Target) -> None:
    """What a web page could send: other origins, other hosts, no JSON, paths that change state."""
    evil = "origin: http://evil.example\r\n"
    while not target.is_over:
        await post(
            target,
            "foreign_pages",
            "/v1/completions",
            completion(prompt="x"),
            headers=evil + "content-type: text/plain\r\n",
        )
        rebound = "host: evil.example:80\r\norigin: http://evil.example:80\r\n"
        await post(target, "foreign_pages", "/api/workers/b?force=true", b"", headers=rebound, method="DELETE")
        await post(
            target, "foreign_pages", "/api/workers/b/readmit", b"", headers=evil + "content-type: text/plain\r\n"
        )
        await post(target, "foreign_pages", "/api/workers/c?force=true", b"", headers=evil, method="DELETE")
        await post(target, "foreign_pages", "/api/workers/b?force=true", b"", method="DELETE")
        await asyncio.sleep(0.5)


async def slow_clients(target: Target) -> None:
    """Connections to the API that send half a request and wait."""
    host, port = target.host
    held: list[asyncio.StreamWriter] = []
    try:
        while not target.is_over:
            with contextlib.suppress(OSError):
                target.count("slow_clients")
                _, writer = await asyncio.open_connection(host, port)
                writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1000\r\n")
                held.append(writer)
            if len(held) > IDLE_HTTP:
                held.pop(0).close()
            await asyncio.sleep(0.02)
    finally:
        for writer in held:
            writer.close()


async def leaving_clients(target: Target) -> None:
    """Streams whose clients leave after a moment, four at a time."""
    host, port = target.host

    async def one() -> None:
        target.count("leaving_clients")
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            body = completion(prompt="Once upon a time", max_tokens=200, stream=True, n=2)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(0.0, 1.0)):
                    while await reader.read(4096):
                        pass
            writer.transport.abort()

    while not target.is_over:
        await asyncio.gather(*(one() for _ in range(4)))
        await asyncio.sleep(0.5)


async def half_open(target: Target) -> None:
    """TLS connections to every node that send six bytes of a ClientHello and wait; closed ones are replaced."""
    hello = bytes.fromhex("160301020001")
    held: dict[str, list[socket.socket]] = {address: [] for address in target.addresses}
    loop = asyncio.get_running_loop()
    try:
        while not target.is_over:
            for address, sockets in held.items():
                host, port = address.rsplit(":", 1)
                for _ in range(20):
                    target.count("half_open")
                    sock = socket.socket()
                    sock.setblocking(False)
                    try:
                        async with asyncio.timeout(1):
                            await loop.sock_connect(sock, (host, int(port)))
                            await loop.sock_sendall(sock, hello)
                    except OSError:
                        target.count("half_open", "refused")
                        sock.close()
                        continue
                    sockets.append(sock)
                while len(sockets) > HALF_OPEN:
                    sockets.pop(0).close()
            await asyncio.sleep(0.25)
    finally:
        for sockets in held.values():
            for sock in sockets:
                sock.close()


FAMILIES: list[Callable[[Target], Coroutine[Any, Any, None]]] = [
    costly_bodies,
    costly_grammars,
    foreign_pages,
    slow_clients,
    leaving_clients,
    half_open,
]


async def attack(order: dict[str, Any]) -> dict[str, dict[str, int]]:
    target = Target(order["api"], order["ticket"], order["addresses"], time.monotonic() + order["seconds"])
    for host in [target.host[0], *(address.rsplit(":", 1)[0] for address in target.addresses)]:
        if not ip_address(host).is_loopback:
            raise SystemExit(f"{host} is not on loopback: attackers attack this machine only")
    async with asyncio.TaskGroup() as group:
        for family in [*FAMILIES, *insider.FAMILIES]:
            group.create_task(family(target))
    return {family: dict(counts) for family, counts in target.counts.items()}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(attack(json.loads(sys.stdin.readline())))))
    sys.stdout.flush()
    os._exit(0)
