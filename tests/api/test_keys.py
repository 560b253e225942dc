"""Keys over HTTP: for admins alone, shown once, bounded, with what is used of each quota."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from manyhands.api import keys as keys_module
from manyhands.api.access import Access
from manyhands.api.auth import KeyRing
from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.server import serving
from manyhands.api.limits import Admission, Quota
from manyhands.config import LimitsConfig
from manyhands.core import NodeAddr
from tests.api.served import raw


class Site:
    """A gateway without a model."""

    def __init__(self, addr: NodeAddr, access: Access) -> None:
        self.addr, self.access = addr, access

    async def ask(self, line: str, body: Any = None, *, key: str = "", is_owner: bool = False) -> tuple[int, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{line} HTTP/1.1", f"host: {self.addr}", "connection: close", f"content-length: {len(data)}"]
        lines += ["content-type: application/json"] if data else []
        lines += [f"authorization: Bearer {key}"] if key else []
        lines += [f"x-manyhands-owner: {self.access.owner_secret}"] if is_owner else []
        status, said = await raw(self.addr, "\r\n".join([*lines, "", ""]).encode() + data)
        return status, json.loads(said.split(b"\r\n\r\n", 1)[1])


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[Site]:
    app = create_app(Gateway({}), keys=KeyRing(tmp_path / "keys.json"))
    async with serving(app, "127.0.0.1", 0) as addr:
        yield Site(addr, app.state.access)


def test_an_owner_makes_the_first_key_and_an_admin_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as site:
            status, made = await site.ask("POST /api/keys", {"name": "boss", "is_admin": True}, is_owner=True)
            assert status == 201 and made["key"].startswith("mhk_")
            boss = made["key"]
            wish = {"name": "guest", "requests_per_minute": 3, "models": ["tales"]}
            guest = (await site.ask("POST /api/keys", wish, key=boss))[1]["key"]
            status, listed = await site.ask("GET /api/keys", key=boss)
            assert [key["name"] for key in listed["keys"]] == ["boss", "guest"]
            assert listed["keys"][1]["quota"]["requests_per_minute"] == 3 and listed["keys"][1]["models"] == ["tales"]
            text = json.dumps(listed)
            assert (
                guest not in text
                and "sha256" not in text
                and KeyRing(tmp_path / "keys.json").keys[1].sha256 not in text
            )
            for line in ("GET /api/keys", "DELETE /api/keys/boss"):
                assert (await site.ask(line, key=guest))[0] == 403
            assert (await site.ask("GET /v1/nothing", key=guest))[0] == 404
            assert (await site.ask("DELETE /api/keys/guest", key=boss))[0] == 200
            assert (await site.ask("GET /v1/nothing", key=guest))[0] == 401
            assert (await site.ask("DELETE /api/keys/none", key=boss))[0] == 404

    asyncio.run(main())


def test_what_is_no_key_is_refused_and_there_are_not_many(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(keys_module, "MAX_KEYS", 2)

    async def main() -> None:
        async with opened(tmp_path) as site:
            for wish in ({"name": "a b"}, {"name": ""}, {"name": "a", "concurrency": 0}, {"name": "a", "more": 1}, {}):
                assert (await site.ask("POST /api/keys", wish, is_owner=True))[0] == 400, wish
            names = ["a", "a", "b", "c"]
            asked = [await site.ask("POST /api/keys", {"name": name}, is_owner=True) for name in names]
            assert [status for status, _ in asked] == [201, 400, 201, 409]
            assert "there are 2 keys" in asked[-1][1]["error"]["message"]

    asyncio.run(main())


def test_the_use_of_a_quota_is_what_its_buckets_lack() -> None:
    started: list[str] = []
    admission = Admission(LimitsConfig(), started.append, lambda job, why: None)
    assert admission.use_of("a", 0.0) is None
    quota = Quota(concurrency=2, requests_per_minute=60, tokens_per_minute=600)
    admission.ask("job", "a", quota, 100, 0.0)
    used = {"running": 1, "requests_per_minute": 1, "tokens_per_minute": 100}
    assert started == ["job"] and admission.use_of("a", 0.0) == used
    admission.leave("job", 40, 0.0)  # what it did not use comes back
    assert admission.use_of("a", 0.0) == {**used, "running": 0, "tokens_per_minute": 40}
    assert admission.use_of("a", 60.0) == {"running": 0, "requests_per_minute": 0, "tokens_per_minute": 0}
