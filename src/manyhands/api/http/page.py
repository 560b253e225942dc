"""The page at `/`: the built files of /dashboard, served from memory (docs/page.md).

A table of exact paths is served, so no path leads out of the folder. Every answer carries a Content-Security-Policy that allows
scripts, styles and requests of this origin alone: no inline script, no eval, no frame, no other host.
"""

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

FOLDER = files("manyhands") / "dashboard"
INDEX, PACKED = "index.html", ".gz"  # files are stored as they are sent to most
BUILD = "build.json"  # what it was built from (tools/dashboard.py): not served
STYLE = "/page/reference.css"  # of /docs
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "svelte-trusted-html",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, plain and compressed."""

    kind: str
    plain: bytes
    packed: bytes
    tag: str

    @classmethod
    def of(cls, name: str, packed: bytes) -> "PageFile":
        kind, plain = mimetypes.guess_type(name)[0] or "application/octet-stream", gzip.decompress(packed)
        tag = f'"{hashlib.sha256(plain).hexdigest()[:16]}"'
        text = kind.startswith("text/") or kind.endswith(("javascript", "json", "xml"))
        return cls(f"{kind}; charset=utf-8" if text else kind, plain, packed, tag)


@lru_cache(maxsize=1)
def page_files() -> dict[str, PageFile]:
    """The files by the path they are served at; read once a process."""
    index = FOLDER / f"{INDEX}{PACKED}"
    below = sorted((FOLDER / "page").iterdir(), key=lambda file: file.name)
    return {"/": PageFile.of(INDEX, index.read_bytes())} | dict(_served(file) for file in below if file.is_file())


def _served(file: Traversable) -> tuple[str, PageFile]:
    path = f"/page/{file.name.removesuffix(PACKED)}"
    return path, PageFile.of(path, file.read_bytes())


def icon_path() -> str:
    """Where the page's icon is served, under a name that changes with it."""
    return next(path for path, file in page_files().items() if file.kind.startswith("image/"))


def page_router() -> APIRouter:
    """GET and HEAD of every file of the page. None needs a key: they tell nothing of the swarm."""
    router = APIRouter(include_in_schema=False)
    for path in page_files():
        router.add_api_route(path, _serve, methods=["GET", "HEAD"], response_class=Response)
    return router


async def _serve(request: Request) -> Response:
    path: str = request.scope["path"]
    file = page_files()[path]
    # Names below /page/ change with their content, except those that other pages link to.
    is_fixed = path == "/" or path == STYLE
    headers = HEADERS | {"etag": file.tag, "vary": "accept-encoding"}
    headers["cache-control"] = "no-cache" if is_fixed else "public, max-age=31536000, immutable"
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, headers=headers | {"content-encoding": "gzip"}, media_type=file.kind)
    return Response(file.plain, headers=headers, media_type=file.kind)


def document(text: str) -> HTMLResponse:
    """A page of our own making, under the same policy."""
    return HTMLResponse(text, headers=HEADERS | {"cache-control": "no-cache"})
