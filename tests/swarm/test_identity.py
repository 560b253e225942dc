"""The node key's file: made once, private, and refused when it is neither."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manyhands.core import NodeId
from manyhands.errors import BadRequest
from manyhands.swarm.identity import NodeKey, verify


def test_a_key_is_made_once_and_kept_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "node.key"
    key = NodeKey.load_or_create(path)
    assert NodeKey.load_or_create(path).node_id == key.node_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path], "no draft is left"


def test_concurrent_makers_agree(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: NodeKey.load_or_create(path).node_id, range(16)))
    assert len(set(keys)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    NodeKey.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(BadRequest, match=f"open to other users .mode {mode:04o}.; run: chmod 600 "):
        NodeKey.load_or_create(path)


def test_no_advice_is_given_on_a_file_that_is_no_key(tmp_path: Path) -> None:
    """`--key /etc/passwd` was answered with "run: chmod 600 /etc/passwd"."""
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0")
    path.chmod(0o644)
    with pytest.raises(BadRequest, match="is not a node key: name another file") as refused:
        NodeKey.load_or_create(path)
    assert "chmod" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"manyhands-node-key-1 ", b"x" * 5000, b"manyhands-node-key-1 " + b"g" * 64])
def test_a_corrupt_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(BadRequest, match="is not a node key"):
        NodeKey.load_or_create(path)
    assert path.read_bytes() == content


def test_an_impossible_path_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "node.key"
    for path, why in ((tmp_path, "Is a directory"), (below, f"its folder {below.parent} cannot be made")):
        with pytest.raises(BadRequest, match=f"node key {path}: {why}; fix its rights, or give another path"):
            NodeKey.load_or_create(path)


def test_signatures() -> None:
    key, other = NodeKey.generate(), NodeKey.generate()
    signature = key.sign(b"data")
    assert verify(key.node_id, b"data", signature)
    assert not verify(key.node_id, b"date", signature)
    assert not verify(other.node_id, b"data", signature)
    assert not verify(key.node_id, b"data", signature[:-1])
    assert not verify(NodeId("nonsense"), b"data", signature)


def test_the_secret_is_not_printed() -> None:
    key = NodeKey.generate()
    assert repr(key) == f"<NodeKey {key.node_id[:16]}>"
