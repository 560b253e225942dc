"""Keys: hashed at rest, checked on every path, revoked at once; who may listen where."""

import asyncio
import contextlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from manyhands.api.auth import RECENT_S, Caller, KeyRing
from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.server import serving
from manyhands.api.limits import Quota
from manyhands.api.openai.chat import openai_router
from manyhands.cli.key import app as key_app
from manyhands.errors import BadRequest, NotFound, Unauthorized
from manyhands.files import write_private
from tests.api.served import MODEL, make_model, post, raw, served
from tests.waiting import GUARD_S, until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("auth") / "m")


def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "home" / "keys.json")


def check(keys: KeyRing, header: str | None) -> Caller:
    """As a gateway does."""

    async def main() -> Caller:
        await keys.latest()
        return keys.check(header)

    return asyncio.run(main())


def test_a_key_is_known_and_its_text_is_nowhere(tmp_path: Path) -> None:
    keys = ring(tmp_path)
    assert keys.is_empty
    secret = keys.add("ann", 1.0, quota=Quota(concurrency=2), models=("tiny",))
    caller = check(keys, f"Bearer {secret}")
    assert (caller.name, caller.quota.concurrency, caller.models, caller.is_admin) == (
        "ann",
        2,
        frozenset({"tiny"}),
        False,
    )
    assert secret.removeprefix("mhk_") not in keys.path.read_text() and len(secret) > 40
    assert os.stat(keys.path).st_mode & 0o777 == 0o600
    assert KeyRing(keys.path).keys == keys.keys


def test_two_that_write_at_once_undo_nothing_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is made while another process revokes one: both wait for the disk at the same time."""
    ring(tmp_path).add("old", 1.0)
    both = threading.Barrier(2)

    def slow(path: Path, text: str) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # both have read by now, unless the second waits for the first
        write_private(path, text)

    monkeypatch.setattr("manyhands.api.auth.write_private", slow)
    with ThreadPoolExecutor(2) as pool:
        made, revoked = pool.submit(ring(tmp_path).add, "new", 2.0), pool.submit(ring(tmp_path).revoke, "old", 2.0)
        made.result(), revoked.result()
    assert {key.name: key.revoked for key in ring(tmp_path).keys} == {"old": 2, "new": None}


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer mhk_x", "Basic abc", "Bearer \udcff", "mhk_x"])
def test_anything_else_is_refused(header: str | None, tmp_path: Path) -> None:
    keys = ring(tmp_path)
    keys.add("ann", 1.0)
    with pytest.raises(Unauthorized):
        check(keys, header)


def test_a_revoked_key_ends_and_still_locks(tmp_path: Path) -> None:
    keys, other = ring(tmp_path), ring(tmp_path)
    secret = keys.add("ann", 1.0)
    assert check(other, f"Bearer {secret}").name == "ann"
    keys.revoke("ann", 2.0)
    time.sleep(RECENT_S)
    with pytest.raises(Unauthorized):
        check(other, f"Bearer {secret}")
    assert not other.is_empty
    with pytest.raises(NotFound):
        keys.revoke("bob", 2.0)
    with pytest.raises(BadRequest, match="there is a key"):
        keys.add("ann", 3.0)
    with pytest.raises(BadRequest, match="name"):
        keys.add("a b", 3.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": [{}]}', '{"keys": 3}', '{"keys": ["x"]}'])
def test_a_damaged_file_locks_every_client_out(text: str, tmp_path: Path) -> None:
    keys = ring(tmp_path)
    keys.path.parent.mkdir()
    keys.path.write_text(text)
    with pytest.raises(BadRequest, match=r"keys\.json"):
        check(keys, "Bearer x")
    with pytest.raises(Unauthorized, match="cannot be read"):
        keys.check("Bearer x")


def test_a_slow_disk_holds_up_neither_the_loop_nor_one_look_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait share a look, which is no older than RECENT_S."""
    keys, looks, go_on = ring(tmp_path), list[int](), threading.Event()
    secret = keys.add("ann", 1.0)
    real = Path.stat

    def slow(path: Path, **how: Any) -> os.stat_result:
        if path == keys.path:
            looks.append(threading.get_ident())
            go_on.wait(GUARD_S)
        return real(path, **how)

    async def main() -> None:
        first = asyncio.create_task(keys.latest())
        await until(lambda: len(looks) == 1)
        others = [asyncio.create_task(keys.latest()) for _ in range(5)]
        await asyncio.sleep(0)
        assert not first.done()
        go_on.set()
        for found in await asyncio.gather(first, *others):
            assert [key.name for key in found] == ["ann"]
        assert keys.check(f"Bearer {secret}").name == "ann"

    monkeypatch.setattr(Path, "stat", slow)
    asyncio.run(main())
    assert len(looks) <= 2 and threading.get_ident() not in looks


def test_clients_that_leave_while_the_disk_is_stuck_leave_one_look_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, go_on = ring(tmp_path), threading.Event()
    keys.add("ann", 1.0)
    real = Path.stat

    def stuck(path: Path, **how: Any) -> os.stat_result:
        if path == keys.path:
            go_on.wait(GUARD_S)
        return real(path, **how)

    async def main() -> None:
        before = threading.active_count()
        for _ in range(20):
            asked = asyncio.create_task(keys.latest())
            await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.wait([asked])
        assert threading.active_count() <= before + 1
        go_on.set()
        assert [key.name for key in await keys.latest()] == ["ann"]

    monkeypatch.setattr(Path, "stat", stuck)
    asyncio.run(main())


def test_what_another_process_changes_is_seen_soon_and_what_this_one_does_at_once(tmp_path: Path) -> None:
    mine, others = ring(tmp_path), ring(tmp_path)

    async def main() -> None:
        others.add("ann", 1.0)
        assert [key.name for key in await mine.latest()] == ["ann"]
        others.add("bob", 1.0)
        await asyncio.sleep(RECENT_S)
        assert len(await mine.latest()) == 2
        mine.revoke("bob", 2.0)
        assert (await mine.latest())[1].revoked == 2

    asyncio.run(main())


def test_a_key_that_cannot_be_kept_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"/proc/none.* cannot be written .*set MANYHANDS_HOME"):
        KeyRing(Path("/proc/none/keys.json")).add("me", 1.0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    runner = CliRunner()
    made = runner.invoke(key_app, ["add", "ann", "--concurrency", "3", "--model", "tiny", "--admin"])
    assert made.exit_code == 0 and made.output.startswith("mhk_")
    caller = check(KeyRing(tmp_path / "keys.json"), f"bearer {made.output.strip()}")
    assert caller.quota == Quota(concurrency=3) and caller.is_admin
    assert "concurrency 3; only tiny; admin" in runner.invoke(key_app, ["list"]).output
    assert runner.invoke(key_app, ["revoke", "ann"]).exit_code == 0
    (listed,) = json.loads(runner.invoke(key_app, ["list", "--json"]).output)["keys"]
    assert listed["name"] == "ann" and listed["revoked"] and "sha256" not in listed


def test_every_path_wants_the_key(folder: Path, tmp_path: Path) -> None:
    keys = ring(tmp_path)
    secret, narrow = keys.add("ann", 1.0), keys.add("bob", 1.0, models=("other",))

    async def main() -> None:
        async with served(folder, keys=keys) as it:
            for path in ("/v1/models", "/v1/chat/completions", "/anything"):
                status, said = await raw(it.addr, post(path, b"{}"))
                assert status == 401 and b"authentication_error" in said and b"www-authenticate" in said.lower()
            status, _ = await raw(it.addr, b"GET /docs HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert status == 200
            with pytest.raises(openai.AuthenticationError):
                await (await it.client("mhk_wrong")).models.list()
            client = await it.client(secret)
            assert len((await client.models.list()).data) == 1
            made = await client.completions.create(model=MODEL, prompt="x", max_tokens=2)
            assert made.choices and it.watcher.ended_jobs[0].key == "ann"
            other = await it.client(narrow)
            assert (await other.models.list()).data == []
            with pytest.raises(openai.PermissionDeniedError, match="bob"):
                await other.completions.create(model=MODEL, prompt="x", max_tokens=2)
            keys.revoke("ann", 2.0)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    asyncio.run(main())


def test_a_quota_is_said_with_the_time_to_wait(folder: Path, tmp_path: Path) -> None:
    keys = ring(tmp_path)
    secret = keys.add("ann", 1.0, quota=Quota(requests_per_minute=1))

    async def main() -> None:
        async with served(folder, keys=keys) as it:
            client = await it.client(secret)
            await client.completions.create(model=MODEL, prompt="x", max_tokens=2)
            with pytest.raises(openai.RateLimitError, match="requests_per_minute") as refusal:
                await client.completions.create(model=MODEL, prompt="x", max_tokens=2)
            assert int(refusal.value.response.headers["retry-after"]) > 50
            assert it.watcher.outcomes == ["done", "refused"]

    asyncio.run(main())


def test_wider_than_loopback_wants_a_key(tmp_path: Path) -> None:
    async def main() -> None:
        open_app = create_app(Gateway({}), keys=ring(tmp_path))
        for host in ("0.0.0.0", "::", "example.org", ""):
            with pytest.raises(BadRequest, match="key add"):
                async with serving(open_app, host, 0):
                    pass
        async with serving(open_app, "0.0.0.0", 0, insecure=True), serving(open_app, "::1", 0):
            pass
        ring(tmp_path).add("ann", 1.0)
        async with serving(open_app, "0.0.0.0", 0) as addr:
            with pytest.raises(BadRequest, match="--api"):
                async with serving(open_app, "0.0.0.0", addr.port):
                    pass

    asyncio.run(main())


def test_browsers_may_call_only_from_where_they_were_named(folder: Path) -> None:
    ask = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: http://here\r\nconnection: close\r\n\r\n"

    async def main() -> None:
        async with served(folder) as it:
            assert b"access-control" not in (await raw(it.addr, ask))[1].lower()
            async with serving(
                create_app(it.gateway, cors=["http://here"], routers=[openai_router(it.gateway)]), "127.0.0.1", 0
            ) as addr:
                assert b"access-control-allow-origin: http://here" in (await raw(addr, ask))[1].lower()

    asyncio.run(main())
