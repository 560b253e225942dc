"""A node's key: its identity, for as long as the file exists. Knows nothing of swarms or networks."""

import os
import re
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from manyhands.core import NodeId
from manyhands.errors import BadRequest
from manyhands.files import is_full, not_written, put_new

_FORM = re.compile(rb"manyhands-node-key-1 ([0-9a-f]{64})\n")


class NodeKey:
    """An Ed25519 key pair. Never prints its secret."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self.private_key = private_key
        self.node_id = NodeId(private_key.public_key().public_bytes_raw().hex())

    def __repr__(self) -> str:
        return f"<NodeKey {self.node_id[:16]}>"

    @classmethod
    def generate(cls) -> "NodeKey":
        """A new key, in memory only."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> "NodeKey":
        """The key in `path` (mode 0600); made there if absent, also when several processes ask at once.

        Missing parent directories are made with mode 0700. Raises BadRequest for a file that others may read, that is
        not a key, or that cannot be read or written, and DiskFull.
        """
        try:
            if not path.exists():
                _create(path, cls.generate())
            return cls(_load(path))
        except OSError as exc:
            if is_full(exc):
                raise not_written(path, exc) from exc
            where = f"its folder {path.parent} cannot be made" if not path.parent.is_dir() else exc.strerror or exc
            raise BadRequest(
                f"node key {path}: {where}; fix its rights, or give another path (--key FILE; MANYHANDS_HOME)"
            ) from exc

    def sign(self, data: bytes) -> bytes:
        """A 64-byte signature that `verify` accepts for `node_id`."""
        return self.private_key.sign(data)


def verify(node: NodeId, data: bytes, signature: bytes) -> bool:
    """Whether `node` signed `data`. False also for an id or a signature that makes no sense."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(node)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _create(path: Path, key: NodeKey) -> None:
    """Put the key at `path`, whole or not at all; keep the file that another process put there first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"manyhands-node-key-1 " + key.private_key.private_bytes_raw().hex().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        put_new(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)


def _load(path: Path) -> Ed25519PrivateKey:
    # A named pipe is not waited for: it is empty.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        text = file.read(1024)
    match = _FORM.fullmatch(text)
    if match is None:  # looked at before its mode: another file's is not ours to change
        raise BadRequest(
            f"{path} is not a node key: name another file (--key); if it was one, restore it, or move it away to get a new "
            "identity"
        )
    if mode & 0o077:
        raise BadRequest(f"node key {path} is open to other users (mode {mode:04o}); run: chmod 600 {path}")
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(match[1].decode()))
