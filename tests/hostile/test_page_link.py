"""Links that sign the owner in on the page: used twice, guessed, too old, from other origins and machines; who makes them."""

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from manyhands.api.http.hosts import Hosts, single
from manyhands.api.sign_in import FRAGMENT, LINK_S, MAX_LINKS, MAX_PAGES, REDEEM_PATH, OwnerLinks, check_is_here
from manyhands.errors import Forbidden, ManyhandsError, Unauthorized
from tests.hostile.test_web import EVIL, JSON, Door, keys_of, opened

MAKE = "POST /api/session/link"
REDEEM = f"POST {REDEEM_PATH}"


def body_of(said: bytes) -> Any:
    return json.loads(said.split(b"\r\n\r\n", 1)[1])


async def make(door: Door, *headers: str) -> str:
    """The token of a new link."""
    status, said = await door.send(MAKE, f"x-manyhands-owner: {door.access.owner_secret}", *headers)
    assert status == 200 and b"cache-control: no-store" in said
    told = body_of(said)
    assert told["fragment"].startswith(FRAGMENT) and told["seconds"] == LINK_S
    return str(told["fragment"].removeprefix(FRAGMENT))


async def redeem(door: Door, token: str, *headers: str) -> tuple[int, bytes]:
    """As the page does it, unless `headers` say otherwise."""
    given = headers or (f"origin: http://{door.addr}", "sec-fetch-site: same-origin")
    return await door.send(REDEEM, JSON, *given, body=json.dumps({"token": token}).encode())


def test_a_link_signs_one_page_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = keys_of(tmp_path)
    keys.add("ann", 1.0)

    async def main() -> None:
        for ring in (None, keys):  # with keys nothing else is open
            async with opened(keys=ring) as door:
                token = await make(door)
                status, said = await redeem(door, token)
                assert status == 200 and b"cache-control: no-store" in said, said
                secret = body_of(said)["secret"]
                assert secret not in (door.access.owner_secret, door.access.page_token, token)
                shown = (f"x-manyhands-owner: {secret}", "sec-fetch-site: same-origin")
                status, said = await door.send("GET /api/session", *shown)
                assert body_of(said)["is_admin"] is True
                page = (*shown, f"origin: http://{door.addr}", JSON)
                assert await door.status("DELETE /api/workers/b?force=true", *page) not in (401, 403)
                assert await door.status(MAKE, *page) == 403  # a page that was signed in signs no other in
                status, said = await redeem(door, token)  # the same link again
                assert status == 401 and b"manyhands page" in said and token.encode() not in said
                assert body_of((await door.send("DELETE /api/session", *page))[1]) == {"ended": True}
                assert await door.status("DELETE /api/workers/b?force=true", *page) in (401, 403)
                assert token not in caplog.text and secret not in caplog.text

    asyncio.run(main())


def test_only_a_page_of_this_gateway_on_this_machine_uses_it() -> None:
    async def main() -> None:
        async with opened(cors=["https://ok.example"], hosts=["llm.example.org"]) as door:
            token = await make(door)
            ways: list[tuple[str, ...]] = [
                (f"origin: {EVIL}",),
                ("origin: null",),
                ("origin: https://ok.example",),  # which may generate
                ("sec-fetch-site: cross-site",),
                ("sec-fetch-site: same-site",),
                (f"origin: http://{door.addr}", "sec-fetch-site: cross-site"),
                ("user-agent: curl/8",),  # a program: it has the owner's file, or is not the owner's
                (f"origin: http://127.0.0.1:{door.addr.port + 1}",),  # another server of this machine
            ]
            for headers in ways:
                status, said = await redeem(door, token, *headers)
                assert status == 403 and b"secret" not in said, (headers, said)
            for host, origin in (
                ("llm.example.org", "http://llm.example.org"),
                (str(door.addr), "https://llm.example.org"),
            ):
                # behind a proxy of this machine, which passes the Host on, or does not
                status, said = await door.send(
                    REDEEM,
                    f"host: {host}",
                    f"origin: {origin}",
                    JSON,
                    body=json.dumps({"token": token}).encode(),
                    has_host=False,
                )
                assert status in (403, 421) and b"secret" not in said, (host, origin, said)
            for bad in (
                b'{"token": ""}',
                b"{}",
                b'{"token": 5}',
                b'{"token": "x", "link": 1}',
                b"x",
                b'{"token": "\\ud800"}',
            ):
                assert await door.status(REDEEM, JSON, f"origin: http://{door.addr}", body=bad) in (400, 401), bad
            assert (await redeem(door, token))[0] == 200  # none of them used it up

    asyncio.run(main())


def test_who_is_not_the_owner_makes_no_link(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    admin = keys.add("root", 1.0, is_admin=True)

    async def main() -> None:
        async with opened() as door:
            page = (f"origin: http://{door.addr}", f"x-manyhands-token: {door.access.page_token}")
            for extra in ((), page, ("x-manyhands-owner: x",)):
                assert await door.status(MAKE, *extra) == 403, extra
            owner = f"x-manyhands-owner: {door.access.owner_secret}"
            assert await door.status(MAKE, owner, f"origin: {EVIL}") == 403
            assert await door.status("GET /api/session/link", owner) == 405  # a link in a page makes none
        async with opened(keys=keys) as door:
            assert await door.status(MAKE, f"authorization: Bearer {admin}") == 403  # a key does not become the owner
            assert await door.status(MAKE) == 401

    asyncio.run(main())


def test_guesses_and_old_links_open_nothing() -> None:
    now = [1000.0]
    links = OwnerLinks(lambda: now[0])
    token = links.make().removeprefix(FRAGMENT)
    for guess in ("", token[:-1], token + "A", token.swapcase(), FRAGMENT + token, "\ud800", "x" * 64):
        with pytest.raises(Unauthorized, match="manyhands page"):
            links.redeem(guess)
    now[0] += LINK_S - 1
    assert links.knows(links.redeem(token))
    token = links.make().removeprefix(FRAGMENT)
    now[0] += LINK_S
    with pytest.raises(Unauthorized):
        links.redeem(token)
    assert not links.knows(None) and not links.knows("") and not links.end(None) and not links.end("x")


def test_links_and_pages_are_bounded() -> None:
    links = OwnerLinks(lambda: 5.0)
    tokens = [links.make().removeprefix(FRAGMENT) for _ in range(3 * MAX_LINKS)]
    assert len(set(tokens)) == len(tokens) and len(links._links) == MAX_LINKS
    with pytest.raises(Unauthorized):
        links.redeem(tokens[0])
    secrets = [links.redeem(token) for token in tokens[-MAX_LINKS:]]
    secrets += [links.redeem(links.make().removeprefix(FRAGMENT)) for _ in range(MAX_PAGES)]
    assert len(links._pages) == MAX_PAGES and links._links == {}
    assert not links.knows(secrets[0]) and links.knows(secrets[-1])


@pytest.mark.parametrize(
    ("client", "host", "is_here"),
    [
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("::ffff:127.0.0.1", "localhost:8000", True),
        ("::1", "[::1]:8000", True),
        ("192.168.1.9", "192.168.1.5:8000", False),
        ("192.168.1.9", "127.0.0.1:8000", False),  # says that it is here
        ("127.0.0.1", "192.168.1.5:8000", False),
        ("", "127.0.0.1:8000", False),
        ("10.88.0.1", "localhost", False),  # a container's published port
    ],
)
def test_a_browser_elsewhere_signs_in_with_a_key(client: str, host: str, is_here: bool) -> None:
    """A gateway beyond loopback knows every address; the link is good on its own machine alone."""
    headers = [(b"host", host.encode()), (b"origin", f"http://{host}".encode())]
    names = Hosts()
    names.listen("0.0.0.0")
    scope: dict[str, Any] = {"type": "http", "headers": headers, "client": (client, 1) if client else None, "state": {}}
    request = Request(scope)
    try:
        request.state.sender = names.sender("POST", "1.1", single(headers))
        check_is_here(request)
    except ManyhandsError as error:
        assert not is_here and isinstance(error, Forbidden), error
    else:
        assert is_here


def test_a_page_without_an_origin_is_no_page() -> None:
    """A GET that is sent from here has none; what changes something always says where it is from."""
    request = SimpleNamespace(
        headers={"host": "127.0.0.1:1"}, client=SimpleNamespace(host="127.0.0.1"), state=SimpleNamespace(sender="page")
    )
    with pytest.raises(Forbidden):
        check_is_here(request)  # type: ignore[arg-type]
