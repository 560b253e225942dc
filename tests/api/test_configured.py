"""From manyhands.toml to what a gateway does."""

import asyncio
import json
from pathlib import Path

import pytest

from manyhands.cli.gateway import api_for
from manyhands.config_file import read_settings
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.tiny import make_tiny
from tests.api.served import post, raw


def test_what_the_configuration_says_is_what_a_gateway_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway as commands open it: limits reach it from the file, and browsers those of the one origin named."""
    (tmp_path / "manyhands.toml").write_text(
        '[api]\ncors = ["https://chat.example"]\n[limits]\nmax_running = 3\nmax_body_bytes = 300\nrequests_per_minute = 2\n'
    )
    monkeypatch.setenv("MANYHANDS_CONFIG", str(tmp_path / "manyhands.toml"))
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 1}).encode()

    async def main() -> None:
        async with (
            memory_swarm(make_tiny("qwen3", tmp_path / "m", layers=1), "0") as swarm,
            api_for({"m": swarm.origin}, NodeAddr("127.0.0.1", 0), max_running=9) as url,
        ):
            addr = NodeAddr.parse(url.removeprefix("http://"))
            for origin, is_named in (("https://chat.example", True), ("https://other.example", False)):
                status, said = await raw(addr, post("/v1/completions", body, origin=origin))
                assert status == (200 if is_named else 403)
                assert (b"access-control-allow-origin: " + origin.encode() in said) is is_named
                asked = f"OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\n"
                asked += "access-control-request-method: POST\r\nconnection: close\r\n\r\n"
                status, _ = await raw(addr, asked.encode())
                assert status == (200 if is_named else 403)
            assert (await raw(addr, post("/v1/completions", body)))[0] == 200
            assert (await raw(addr, post("/v1/completions", body)))[0] == 429
            assert (await raw(addr, post("/v1/completions", b"x" * 301)))[0] == 413

    asyncio.run(main())


def test_a_key_that_is_no_limit_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, wrong in (("max_queue", -1), ("patience_s", "nan"), ("keep_alive_s", 1e7), ("concurrency", 0)):
        (tmp_path / "manyhands.toml").write_text(f"[limits]\n{name} = {wrong}\n")
        with pytest.raises(BadRequest, match=rf"manyhands\.toml: \[limits\] {name} is .* it must be"):
            read_settings({"MANYHANDS_HOME": str(tmp_path)}, tmp_path)


@pytest.mark.parametrize(
    "wrong", ['cors = ["chat.example"]', 'cors = ["https://chat.example/"]', 'cors = ["https://*.x"]']
)
def test_what_is_no_origin_is_refused_in_one_line(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "manyhands.toml").write_text(f"[api]\n{wrong}\n")
    with pytest.raises(BadRequest, match=r"manyhands\.toml: \[api\] cors has .*SCHEME://HOST"):
        read_settings({"MANYHANDS_HOME": str(tmp_path)}, tmp_path)
