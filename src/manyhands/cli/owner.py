"""How the commands of this machine prove to a gateway here that its owner runs them: $MANYHANDS_HOME/run/api-PORT.secret.

The file (0600) holds a random text that the gateway made when it started, and that is worth nothing once it has ended. So
a command may show it to what listens at that port on this machine: at worst to a program that came after the gateway.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from manyhands.errors import ManyhandsError

logger = logging.getLogger(__name__)
MAX_BYTES = 1 << 10  # of such a file


@contextlib.contextmanager
def owner_file(home: Path, port: int, secret: str) -> Iterator[None]:
    """While the block runs, the file of the gateway at `port` holds `secret`. Without a file the owner needs a key."""
    from manyhands.files import removed, write_private

    path = _path(home, port)
    try:
        write_private(path, secret, is_durable=False)
    except ManyhandsError as error:
        logger.warning("commands of this machine need an admin's key to change the swarm: %s", error)
    try:
        yield
    finally:
        if _read(path) == secret:  # and not that of another gateway with this port, at another address
            removed(path)


def owner_secret(home: Path, api: str) -> str | None:
    """The secret of the gateway at `api`, if that is on this machine and was started with this home; None else."""
    from manyhands.api.http.hosts import is_loopback

    url = urlsplit(api)
    here = url.hostname is not None and (is_loopback(url.hostname) or url.hostname in ("0.0.0.0", "::"))
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    return _read(_path(home, port)) if here else None


def _path(home: Path, port: int) -> Path:
    from manyhands.member.home import secret_path

    return secret_path(home / "run", port)


def _read(path: Path) -> str | None:
    from manyhands.files import read_plain

    try:
        return read_plain(path, MAX_BYTES).decode("ascii").strip() or None
    except (OSError, UnicodeDecodeError, ManyhandsError):
        return None
