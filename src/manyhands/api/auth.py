"""API keys: made here, shown once, kept as hashes in $MANYHANDS_HOME/keys.json (mode 0600).

A key is 256 random bits, so one SHA-256 of it is as good as any slow hash: there is nothing to guess.
"""

import asyncio
import hashlib
import json
import math
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from manyhands.api.http.hosts import is_loopback
from manyhands.api.limits import NO_QUOTA, Quota
from manyhands.aside import aside
from manyhands.errors import BadRequest, Forbidden, NotFound, Unauthorized
from manyhands.files import alone, private_folder, read_plain, write_private

PREFIX = "mhk_"
FILE = "keys.json"
MAX_BYTES = 16 << 20  # of that file: some 50,000 keys
RECENT_S = 0.1  # so long a gateway takes the file for what it was: a look takes longer than all else that is done for a request


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is: the name of a key (None: none is needed) and what it may do.

    `models`: those it may use (None: all). `is_admin`: it may also change the swarm (evict, reassign). `tenant`: with whose
    earlier requests it may share caches (origin/reuse.py); None: with none.
    """

    name: str | None = None
    quota: Quota = NO_QUOTA
    models: frozenset[str] | None = None
    is_admin: bool = False
    tenant: str | None = None

    def check_model(self, model: str) -> None:
        """Raise Forbidden if this key may not use `model`."""
        if self.models is not None and model not in self.models:
            raise Forbidden(
                f"key {self.name!r} may not use model {model[:100]!r}, only {', '.join(sorted(self.models))}"
            )


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key. Times are Unix seconds; `revoked` is None while it is good."""

    name: str
    sha256: str
    created: int
    quota: Quota = NO_QUOTA
    models: tuple[str, ...] | None = None
    is_admin: bool = False
    revoked: int | None = None

    @property
    def caller(self) -> Caller:
        models = None if self.models is None else frozenset(self.models)
        return Caller(self.name, self.quota, models, self.is_admin, tenant=self.sha256)


class KeyRing:
    """The keys of a file. Read again whenever the file changes, so a revoked key ends at once, in a gateway within RECENT_S."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._keys: tuple[ApiKey, ...] = ()
        self._by_hash: dict[str, ApiKey] = {}
        self._failure = ""  # of the last look
        # Goes on when those who wait for it have left: the disk may be stuck.
        self._looking: asyncio.Task[None] | None = None
        self._reading = threading.Lock()
        self._looked_at = -math.inf  # when the last look of `latest` began, by the loop's clock

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """In the order they were made. Blocking. Raises BadRequest for a file that cannot be read."""
        with self._reading:
            try:
                self._look()
            except BadRequest as error:
                self._failure, self._seen, self._by_hash = str(error), None, {}
                raise
            self._failure = ""
            return self._keys

    async def latest(self) -> tuple[ApiKey, ...]:
        """As `keys`, of a look that began RECENT_S ago at most, beside the event loop: the disk may be slow."""
        asked = asyncio.get_running_loop().time()
        while asked - self._looked_at >= RECENT_S:  # a look under way may have begun too long ago
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look_aside())
            await asyncio.shield(self._looking)
        if self._failure:
            raise BadRequest(self._failure)
        return self._keys

    async def _look_aside(self) -> None:
        began = asyncio.get_running_loop().time()
        with suppress(BadRequest):  # kept as _failure
            await aside(lambda: self.keys)
        self._looked_at = began

    def _look(self) -> None:
        """Read the file again if it has changed. Raises BadRequest."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            self._seen, self._keys, self._by_hash = None, (), {}
            return
        except OSError as error:
            raise BadRequest(f"{self.path} cannot be looked at ({error.strerror}): repair its rights") from error
        if (seen := (stat.st_mtime_ns, stat.st_ino, stat.st_size)) != self._seen:
            self._keys = _read(self.path)
            self._by_hash = {key.sha256: key for key in self._keys}
            self._seen = seen

    @property
    def is_empty(self) -> bool:
        """Whether no key was ever made. One that has been revoked still counts."""
        return not self.keys

    def check(self, authorization: str | None) -> Caller:
        """Whose key an Authorization header carries, by the last look. Raises Unauthorized."""
        if not authorization:
            raise Unauthorized("this gateway needs a key: send the header Authorization: Bearer mhk_...")
        if self._failure:
            raise Unauthorized("the file of keys cannot be read: its owner finds the reason in the log")
        scheme, _, secret = authorization.partition(" ")
        key = self._by_hash.get(hash_of(secret.strip())) if scheme.lower() == "bearer" else None
        if key is None or key.revoked is not None:
            raise Unauthorized("this key is not known or was revoked: ask for one (manyhands key add NAME)")
        return key.caller

    def add(self, name: str, now: float, **limits: Any) -> str:
        """Make a key and return its text, which nothing else keeps. Raises BadRequest for a name that is taken."""
        if not re.fullmatch(r"[\w.@-]{1,64}", name):
            raise BadRequest(f"name {name!r} is not 1 to 64 letters, digits or ._@-")
        secret = PREFIX + secrets.token_urlsafe(32)
        with alone(private_folder(self.path.parent)):
            if any(key.name == name for key in self.keys):
                raise BadRequest(f"there is a key named {name!r}: choose another name (revoked ones keep theirs)")
            self._write([*self.keys, ApiKey(name, hash_of(secret), int(now), **limits)])
        return secret

    def revoke(self, name: str, now: float) -> None:
        """From now on the key is refused. Raises NotFound."""
        with alone(private_folder(self.path.parent)):
            if not any(key.name == name for key in self.keys):
                raise NotFound(f"there is no key named {name!r}; manyhands key list shows them")
            self._write([replace(k, revoked=k.revoked or int(now)) if k.name == name else k for k in self.keys])

    def _write(self, keys: Sequence[ApiKey]) -> None:
        """Replace the file. Raises BadRequest if it cannot be written."""
        write_private(self.path, json.dumps({"keys": [asdict(key) for key in keys]}, indent=1))
        self._looked_at = -math.inf


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _read(path: Path) -> tuple[ApiKey, ...]:
    try:
        return tuple(_key(entry) for entry in json.loads(read_plain(path, MAX_BYTES))["keys"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, BadRequest) as error:
        raise BadRequest(f"{path} is not a file of keys ({type(error).__name__}: {error!s:.200}): repair it") from error


def _key(entry: Mapping[str, Any]) -> ApiKey:
    models = entry["models"]
    known = {**entry, "quota": Quota(**entry["quota"]), "models": None if models is None else tuple(models)}
    return ApiKey(**known)


def check_exposure(host: str, keys: KeyRing | None, *, insecure: bool) -> None:
    """Raise BadRequest if others than this machine could come in at `host` without being asked for a key."""
    if not insecure and not is_loopback(host) and (keys is None or keys.is_empty):
        raise BadRequest(
            f"{host} lets other machines in without a key: make one (manyhands key add NAME) or --insecure"
        )
