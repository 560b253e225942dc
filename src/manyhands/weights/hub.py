"""The hub as we need it: what a repository holds, and byte ranges of its files.

huggingface_hub handles addresses, tokens and redirects, so HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE work as
everywhere. Blocking. Every foreign error is turned into one of ours here, with the remedy.
"""

import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import HfApi, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from manyhands.checkpoint.folder import check_file_name
from manyhands.checkpoint.header import LENGTH_BYTES, TensorEntry, header_length, parse_header
from manyhands.errors import ModelError
from manyhands.plain import one_line

T = TypeVar("T")

_PROXIES: Final = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
TIMEOUT_S: Final = 30.0  # of connecting and of each read; a hub that is silent this long has stalled
RETRIES: Final = 5  # in a row without a byte of progress
FIRST_RETRIES: Final = 2  # of the first question, with which nothing is lost yet: 1.5 s
# What may be done to an answer that was asked for as it is. By gzip 64 KiB become 64 MiB; by two codings, or a newer one, more.
CODINGS: Final = ("", "identity", "gzip", "deflate")
BACKOFF_S: Final = 0.5  # doubled each time: 0.5 + 1 + 2 + 4 + 8 s in all
# Of the environment, what an HTTP client is made with.
OF_CLIENTS: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR", *_PROXIES, *map(str.lower, _PROXIES))
# What huggingface_hub fails with at answers that it does not expect, a list in place of an object say.
_ODD: Final = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class HubUnreachable(ModelError):
    """The hub gave no answer (or must not be asked); a copy on disk may do."""


class HubSilent(HubUnreachable):
    """The hub gave no answer now; the same request may succeed later."""

    http_status = 503


class RangeIgnored(Exception):
    """The server answered a range request with the whole file."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; `sha256` is known for files in large-file storage."""

    name: str
    size: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HubWeightsFile:
    """A weights file on the hub: its header's bytes and what they describe."""

    name: str
    size: int
    sha256: str | None
    header: bytes
    entries: list[TensorEntry]


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository at one commit, or a folder of it: `folder` ends with a slash, and names are those within."""

    repo: str
    revision: str  # as asked for: a branch, a tag or a commit
    commit: str
    names: frozenset[str]
    sizes: dict[str, HubFile]  # of the files whose size came with the listing
    folder: str = ""

    def within(self, folder: str) -> "HubModel":
        """What lies in a folder of it, "" for itself."""
        start = f"{folder}/" if folder else ""
        names = frozenset(name.removeprefix(start) for name in self.names if name.startswith(start))
        sizes = {name: replace(self.sizes[start + name], name=name) for name in names if start + name in self.sizes}
        return replace(self, names=names, sizes=sizes, folder=self.folder + start)

    def url(self, file: str) -> str:
        return str(hf_hub_url(self.repo, self.folder + file, revision=self.commit))

    def describe(self, file: str) -> HubFile:
        """Size and hash of `file`; asks the hub if the listing did not say. Raises ModelError."""
        if file in self.sizes:
            return self.sizes[file]
        if file not in self.names:
            raise ModelError(f"{self.repo}@{self.commit[:8]} has no file {self.folder}{file}")
        found = _retried(lambda: get_hf_file_metadata(self.url(file), timeout=TIMEOUT_S), self.repo)
        if found.size is None:
            raise ModelError(f"{self.repo}: the hub does not say how large {file} is")
        etag = found.etag or ""
        return HubFile(file, found.size, etag if _SHA256.fullmatch(etag) else None)


def find_model(repo: str, revision: str, *, is_vital: bool = True) -> HubModel:
    """Ask the hub for `repo`; once only unless `is_vital`.

    Raises ModelError if it is unknown or closed to us, HubUnreachable without answer.
    """
    return _retried(lambda: _found(repo, revision), f"{repo}@{revision}", FIRST_RETRIES if is_vital else 0)


def _found(repo: str, revision: str) -> HubModel:
    info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    commit = str(info.sha or "")
    if not re.fullmatch(r"[\w-]{1,64}", commit):
        raise ModelError(f"{repo}@{revision}: the hub names no commit")
    siblings = [(check_file_name(sibling.rfilename), sibling) for sibling in info.siblings or []]
    sized = [pair for pair in siblings if isinstance(pair[1].size, int) and pair[1].size >= 0]
    names = frozenset(name for name, _ in siblings)
    return HubModel(repo, revision, commit, names, {name: _file(name, sibling) for name, sibling in sized})


def _file(name: str, sibling: Any) -> HubFile:
    lfs = sibling.lfs.sha256 if sibling.lfs else ""
    return HubFile(name, sibling.size, lfs if _SHA256.fullmatch(lfs) else None)


def read_range(
    model: HubModel, file: str, start: int, end: int, *, may_skip: bool = False, first_retries: int = RETRIES
) -> Generator[bytes, None, None]:
    """Bytes [start, end) of `file` in blocks as they arrive; goes on where a broken connection ended.

    Raises RangeIgnored if the server sends whole files only, unless `may_skip`: then the rest is read and dropped.
    Before the first byte it is asked `first_retries` times again at most.
    """
    position, failures = start, 0
    while position < end:
        try:
            for block in _request(model.url(file), position, end, may_skip):
                position, failures = position + len(block), 0
                yield block
            if position < end:
                raise HTTPError(f"{file} ended at byte {position}, {end} expected")
        except (HTTPError, OfflineModeIsEnabled) as error:
            failures = _wait(error, failures, model.repo, RETRIES if position > start else first_retries)


def read_whole(model: HubModel, file: HubFile, limit: int) -> bytes:
    """A small file. Raises ModelError if it is larger than `limit` bytes."""
    if file.size > limit:
        raise ModelError(f"{model.repo}: {file.name} has {file.size} bytes, more than the {limit} allowed")
    return b"".join(read_range(model, file.name, 0, file.size, may_skip=True))


def read_remote_header(model: HubModel, name: str) -> HubWeightsFile:
    """A safetensors file, read up to its data. Raises ModelError."""
    file = model.describe(name)
    prefix = read_start(model, file, 0, min(LENGTH_BYTES, file.size))
    end = LENGTH_BYTES + header_length(prefix, name, file.size)
    raw = read_start(model, file, LENGTH_BYTES, end)
    return HubWeightsFile(name, file.size, file.sha256, prefix + raw, parse_header(raw, name, file.size))


def read_start(model: HubModel, file: HubFile, start: int, end: int) -> bytes:
    """A few bytes [start, end) near the start of a file; what lies before them may be sent too."""
    with closing(read_range(model, file.name, start, end, may_skip=True)) as blocks:
        return b"".join(blocks)


def _request(url: str, start: int, end: int, may_skip: bool) -> Iterator[bytes]:
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    with _client().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        if response.status_code >= 400:
            hf_raise_for_status(_without_body(response))
        if (coding := response.headers.get("Content-Encoding", "").lower()) not in CODINGS:
            raise ModelError(
                f"{urlsplit(url).netloc} sent {url} coded by {coding[:40]!a}, asked for it as it is: set HF_ENDPOINT"
            )
        is_partial = response.status_code == 206
        if is_partial and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise ModelError(f"{urlsplit(url).netloc} sent another range of {url} than asked for")
        if not is_partial and not may_skip:
            raise RangeIgnored
        yield from _cut(response.iter_bytes(), 0 if is_partial else start, end - start)


def _without_body(refusal: Any) -> Any:
    """A refusal's status and headers. Its body may have no end, be a gigabyte once decoded, or what the library fails at."""
    kept = [pair for pair in refusal.headers.multi_items() if pair[0].lower().startswith(("x-", "www-"))]
    return type(refusal)(refusal.status_code, headers=kept, content=b"", request=refusal.request)


def _client() -> Any:
    """huggingface_hub's client. Raises HubUnreachable where proxies or certificates of the environment admit none."""
    try:
        return get_session()
    except Exception as error:  # of httpx, of the TLS library, or that a package for a kind of proxy is missing
        named = [name for name in OF_CLIENTS if os.environ.get(name)]
        why = f"{', '.join(named)} set here: {one_line(error, 200)}"
        raise HubUnreachable(
            f"the hub cannot be asked with {why}; correct or unset that, or set HF_HUB_OFFLINE=1"
        ) from error


def _cut(blocks: Iterator[bytes], skip: int, length: int) -> Iterator[bytes]:
    """Drop `skip` bytes, pass on the next `length`, stop."""
    for block in blocks:
        kept = block[skip : skip + length]
        skip = max(0, skip - len(block))
        length -= len(kept)
        if kept:
            yield kept
        if length == 0:
            return


def _retried(ask: Callable[[], T], what: str, retries: int = RETRIES) -> T:
    failures = 0
    _client()
    while True:
        try:
            return ask()
        except (HTTPError, OfflineModeIsEnabled) as error:
            failures = _wait(error, failures, what, retries)
        except HFValidationError as error:
            raise ModelError(f"{what} is no name of the hub: {one_line(error, 200)}") from error
        except _ODD as error:
            raise _unusable(what, f"{type(error).__name__}: {error}") from error


def _wait(error: Exception, failures: int, what: str, retries: int = RETRIES) -> int:
    """Sleep before the next attempt and count it; raises our error if there should be none."""
    status = _status(error)
    is_transient = not isinstance(error, OfflineModeIsEnabled) and (status is None or status >= 500 or status == 429)
    if not is_transient or failures == retries:
        raise _explain(error, status, what) from error
    time.sleep(BACKOFF_S * 2**failures)
    return failures + 1


def _status(error: Exception) -> int | None:
    return int(error.response.status_code) if isinstance(error, HfHubHTTPError) else None


def _explain(error: Exception, status: int | None, what: str) -> ModelError:
    host = urlsplit(HfApi().endpoint).netloc
    if isinstance(error, OfflineModeIsEnabled):
        return HubUnreachable(f"{what} is not here and HF_HUB_OFFLINE forbids asking {host}")
    if status == 404:
        return ModelError(f"{what} is unknown to {host}: check the spelling of org/name and of the revision")
    if status in (401, 403):
        remedy = "check the spelling; if it is private or gated, accept its terms there and set HF_TOKEN"
        return ModelError(f"{host} refuses {what} (HTTP {status}): {remedy}")
    if status is not None and status < 500 and status != 429:
        return ModelError(f"{host} refuses {what} (HTTP {status})")
    return _unusable(what, f"HTTP {status}" if status else f"{type(error).__name__}: {error}")


def _unusable(what: str, reason: str) -> HubSilent:
    host, line = urlsplit(HfApi().endpoint).netloc, one_line(reason.split("\n")[0], 200)
    return HubSilent(f"{host} gives no usable answer for {what} ({line}); try again, or set HF_ENDPOINT")
