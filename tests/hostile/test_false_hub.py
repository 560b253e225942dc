"""A hub (HF_ENDPOINT may name any) that answers as it likes, and repositories with more small files than any model has."""

import gzip
import http.server
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants
from huggingface_hub.errors import HTTPError

from manyhands.checkpoint.manifest import Silent
from manyhands.errors import ModelError
from manyhands.weights import fetch as fetching
from manyhands.weights import hub
from manyhands.weights.fetch import _Fetch
from manyhands.weights.hub import HubFile, HubModel, HubSilent, find_model, read_range, read_whole

FILE = HubFile("x.json", 1000, None)
MODEL = HubModel("a/b", "main", "c0ffee", frozenset({"x.json"}), {"x.json": FILE})
# huggingface_hub's HTTP client, whichever it is.
http_client: Any = sys.modules[HTTPError.__module__.partition(".")[0]]
Response: Any = http_client.Response
Answer = Callable[[Any], Any]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def use(give: Answer) -> None:
        monkeypatch.setattr(hub, "_client", lambda: http_client.Client(transport=http_client.MockTransport(give)))

    return use


@pytest.fixture
def hub_says(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], None]]:
    """A hub on loopback that says the same to all questions."""
    told: list[Any] = [200, b""]

    class Saying(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(told[0])
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(told[1])))
            self.end_headers()
            self.wfile.write(told[1])

    def say(status: int, text: str) -> None:
        told[:] = [status, text.encode()]

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Saying)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    yield say
    close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def blocks() -> Iterator[bytes]:
    yield b'{"error":'
    pytest.fail("it was read on")


@pytest.mark.parametrize("status", [400, 404, 429, 500])
@pytest.mark.parametrize("coding", ["identity", "gzip", "zstd"])
def test_a_refusal_is_not_read(answer: Callable[[Answer], None], status: int, coding: str) -> None:
    """It was read to its end into memory, and decoded; a list in it was an AttributeError of huggingface_hub's."""
    headers = {"content-encoding": coding, "x-error-message": "\x1b[2J"}
    for body in (blocks, lambda: b"[]", lambda: b"[" * 100_000, lambda: b"\xff"):
        answer(lambda _: Response(status, headers=headers, content=body()))  # noqa: B023
        with pytest.raises(ModelError) as refused:
            read_whole(MODEL, FILE, 2000)
        assert str(refused.value).isprintable() and len(str(refused.value)) < 600, str(refused.value)


@pytest.mark.parametrize(
    "said",
    [
        "[]",
        "null",
        "1",
        "[" * 100_000,
        '{"sha":"c0ffee"}',
        '{"id":"a/b","sha":"c0ffee","siblings":[1]}',
        '{"id":"a/b","sha":"c0ffee","siblings":[{"rfilename":[]}]}',
        '{"id":"a/b","sha":["x"],"siblings":[]}',
        '{"id":"a/b","sha":"c0ffee","siblings":[{"rfilename":"x.json","size":-5,"lfs":[]}]}',
    ],
)
@pytest.mark.parametrize("status", [200, 404, 418])
def test_a_listing_that_is_none_is_one_line(said: str, status: int, hub_says: Callable[[int, str], None]) -> None:
    """Whatever huggingface_hub fails with at it: an AttributeError was a traceback."""
    hub_says(status, said)
    try:
        found = find_model("a/b", "main", is_vital=False)
    except ModelError as error:
        assert str(error).isprintable() and len(str(error)) < 600, str(error)
    else:
        assert status == 200 and not found.sizes


@pytest.mark.parametrize("coding", ["gzip, gzip", "zstd", "br", "x"])
def test_an_answer_that_is_coded_as_none_is_asked_for_is_refused(answer: Callable[[Answer], None], coding: str) -> None:
    """64 KiB of gzip in gzip are 64 GB in memory."""
    bomb = gzip.compress(gzip.compress(bytes(1 << 24)))
    answer(lambda _: Response(200, headers={"content-encoding": coding}, stream=http_client.ByteStream(bomb)))
    with pytest.raises(ModelError, match=r"sent .* coded by .*, asked for it as it is: set HF_ENDPOINT"):
        read_whole(MODEL, FILE, 2000)


@pytest.mark.parametrize(("coding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("", bytes)])
def test_what_a_proxy_may_do_to_an_answer_is_undone(
    answer: Callable[[Answer], None], coding: str, encode: Callable[[bytes], bytes]
) -> None:
    raw = bytes(range(250)) * 4
    headers = {"content-encoding": coding} if coding else {}
    answer(lambda _: Response(200, headers=headers, content=encode(raw)))
    assert read_whole(MODEL, FILE, 2000) == raw


@pytest.mark.parametrize("name", ["org/na--me", "org/name-", "-org/name"])
def test_a_name_that_the_hub_refuses_unasked_is_one_line(name: str) -> None:
    """`manyhands model inspect org/na--me` was a traceback."""
    with pytest.raises(ModelError, match=rf"^{name}@main is no name of the hub: "):
        find_model(name, "main")


def test_another_range_and_an_answer_that_ends_early_are_said(answer: Callable[[Answer], None]) -> None:
    answer(lambda _: Response(206, headers={"content-range": "bytes 7-9/10"}, content=b"abc"))
    with pytest.raises(ModelError, match="another range"):
        list(read_range(MODEL, "x.json", 1, 4))
    answer(lambda _: Response(200, content=b""))
    with pytest.raises(HubSilent, match="ended at byte 0, 1000 expected"):
        read_whole(MODEL, FILE, 2000)


def small_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: list[int]) -> list[HubFile]:
    files = {f"f{number}.json": HubFile(f"f{number}.json", size, None) for number, size in enumerate(sizes)}
    others = {"a/x.json": HubFile("a/x.json", 1 << 60, None), "weights.safetensors": HubFile("w", 1 << 60, None)}
    model = HubModel("a/b", "main", "c0ffee", frozenset(files | others), files | others)
    made = _Fetch(model, None, tmp_path, Silent())
    made.folder.mkdir(parents=True, exist_ok=True)
    return made._small_files()


def test_small_files_have_a_bound_in_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each had one of 256 MiB, and a thousand of them filled the disk before any of the weights was looked for."""
    monkeypatch.setattr(fetching, "SMALL_IN_ALL", 1000)
    monkeypatch.setattr(fetching, "MAX_SMALL_FILES", 5)
    assert len(small_files(monkeypatch, tmp_path, [200] * 5)) == 5
    with pytest.raises(ModelError, match="a/b has small files of 1001 bytes; at most 1000 are fetched: download what"):
        small_files(monkeypatch, tmp_path, [200] * 4 + [201])
    with pytest.raises(ModelError, match="a/b has 6 small files; at most 5 are fetched"):
        small_files(monkeypatch, tmp_path, [1] * 6)
