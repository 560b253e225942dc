"""A hub on loopback: model info, redirecting resolve URLs, ranges, and faults on demand."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub

from tests.waiting import GUARD_S

COMMIT = "c0ffee" * 6 + "c0de"
REPO = "tests/tiny"
WEIGHTS = (".safetensors", ".gguf")


@dataclass
class FakeHub:
    """What the server has, what it shall do wrong, and what it was asked for."""

    folder: Path
    endpoint: str = ""
    has_sizes: bool = True  # in the listing; else a HEAD is needed
    has_hashes: bool = True  # weights are in large-file storage
    has_ranges: bool = True
    is_gated: bool = False
    extra_names: list[str] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # end the next weights answers after so many bytes
    statuses: list[int] = field(default_factory=list)  # answer the next weights requests so
    corrupt_at: dict[str, tuple[int, int]] = field(default_factory=dict)  # file -> (byte to flip, how often)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    is_silent: bool = False  # takes questions and answers none
    stalls: dict[str, int] = field(default_factory=dict)  # file -> of longer answers only so many bytes come
    stalled: threading.Event = field(default_factory=threading.Event)  # set once something is asked that does not come
    goes_on: threading.Event = field(default_factory=threading.Event)  # what stalls is cut then, and no more does
    weight_bytes: int = 0  # sent so far
    tokens: list[str | None] = field(default_factory=list)

    def info(self) -> dict[str, Any]:
        return {"id": REPO, "sha": COMMIT, "siblings": [self._sibling(name) for name in self.names()]}

    def names(self) -> list[str]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in files) + self.extra_names

    def _sibling(self, name: str) -> dict[str, Any]:
        if not self.has_sizes or name in self.extra_names:
            return {"rfilename": name}
        raw = (self.folder / name).read_bytes()
        lfs = {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 1}
        is_large = self.has_hashes and name.endswith(WEIGHTS)
        return {"rfilename": name, "size": len(raw), **({"lfs": lfs} if is_large else {})}

    def read(self, name: str) -> bytes:
        raw = bytearray((self.folder / name).read_bytes())
        at, left = self.corrupt_at.get(name, (0, 0))
        if left > 0:
            raw[at] ^= 0xFF
        return bytes(raw)

    def stall(self) -> None:
        self.stalled.set()
        self.goes_on.wait()

    def sent_wrong(self, name: str, start: int, end: int) -> None:
        at, left = self.corrupt_at.get(name, (0, 0))
        if start <= at < end:
            self.corrupt_at[name] = (at, left - 1)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if self.hub.is_silent:
            self.hub.stall()
        self.hub.tokens.append(self.headers.get("Authorization"))
        if self.hub.is_gated:
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif path in (f"/api/models/{REPO}/revision/main", f"/api/models/{REPO}/revision/{COMMIT}"):
            self._answer(200, json.dumps(self.hub.info()).encode())
        elif (match := re.fullmatch(rf"/({REPO}/resolve/{COMMIT}|cdn)/(\S+)", path)) and self._has(match[2]):
            self._file(match[1] == "cdn", match[2])
        else:
            code = "EntryNotFound" if path.startswith(f"/{REPO}/") else "RepoNotFound"
            self._answer(404, b"", {"X-Error-Code": code})

    def _has(self, name: str) -> bool:
        return (self.hub.folder / name).is_file()

    def _file(self, is_cdn: bool, name: str) -> None:
        raw = (self.hub.folder / name).read_bytes()
        digest = hashlib.sha256(raw).hexdigest() if self.hub.has_hashes else hashlib.sha1(raw).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'}
        if not name.endswith(WEIGHTS):
            return self._answer(200, raw, headers)
        if not is_cdn:
            linked = {"X-Linked-Size": str(len(raw)), "X-Linked-ETag": f'"{digest}"', "Location": f"/cdn/{name}"}
            return self._answer(302, b"", headers | linked)
        return self._weights(name, headers)

    def _weights(self, name: str, headers: dict[str, str]) -> None:
        if self.command == "HEAD":
            return self._answer(200, self.hub.read(name), headers)
        if self.hub.statuses:
            return self._answer(self.hub.statuses.pop(0), b"")
        raw = self.hub.read(name)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not self.hub.has_ranges:
            self.hub.sent_wrong(name, 0, len(raw))
            return self._answer(200, raw, headers, is_weights=True)
        start, end = int(asked[1]), int(asked[2]) + 1
        self.hub.ranges.append((name, start, end))
        self.hub.sent_wrong(name, start, end)
        headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(raw)}"}
        most = end - start if self.hub.goes_on.is_set() else self.hub.stalls.get(name, end - start)
        return self._answer(206, raw[start:end], headers, is_weights=True, most=most)

    def _answer(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        is_weights: bool = False,
        most: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_weights and self.hub.cuts and len(body) > self.hub.cuts[0]:
            body = body[: self.hub.cuts.pop(0)]
            self.close_connection = True
        self.hub.weight_bytes += len(body) if is_weights else 0
        try:
            self.wfile.write(body[:most])
            if most is not None and most < len(body):
                self.hub.stall()
                self.close_connection = True
        except OSError:  # the client has what it wanted
            self.close_connection = True


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve `hub` on a free port of loopback until the block ends and all that this process asked of it is answered.

    A fetch that gives the hub up leaves its thread (aside.py), which would put its next question to the hub of the next test.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.goes_on.set()
        for asking in [thread for thread in threading.enumerate() if thread.name == "aside"]:
            asking.join(GUARD_S)
        huggingface_hub.close_session()  # its connections are kept, and the server waits for their ends
        server.shutdown()
        thread.join()
        server.server_close()
