"""Files that are not what their writers left: tables that are bombs, packed weights of others, links where files were to be."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.checkpoint.header import MAX_COMMAS, parse_header
from manyhands.checkpoint.manifest import Manifest
from manyhands.cli.log_file import LogFile, log_path
from manyhands.cli.runfile import run_file, run_path, running_pid
from manyhands.core import ModelId
from manyhands.errors import BadRequest, ModelError
from manyhands.files import private_folder, write_private
from manyhands.weights import packed
from manyhands.weights.packed import PackedShelf, packed_folder

MODEL = ModelId("ab" * 32)


# -- tables of tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [b"[],", b"{},", b"0,", b'"",'])
def test_a_table_of_many_values_is_refused_before_it_is_parsed(inner: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MB of `[],` were 6 GB of lists; from a peer, or from the hub."""
    bomb = b'{"a":[' + inner * (MAX_COMMAS + 1) + b"0]}"
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ModelError, match="commas"):
        parse_header(bomb, "x.safetensors", 8 + len(bomb))
    with pytest.raises(ModelError, match="commas"):
        Manifest.decode(bomb)


# -- packed weights ---------------------------------------------------------------------------------------------------


def allocate(count: int, dtype: type[Any]) -> NDArray[Any]:
    return np.zeros(count, dtype)


def kept(home: Path) -> tuple[PackedShelf, Path]:
    shelf = PackedShelf(home, MODEL)
    assert shelf.keep("k", [("a", np.arange(64, dtype=np.uint8)), ("b", np.ones(8, np.float32))])
    (path,) = packed_folder(home, MODEL).iterdir()
    return shelf, path


def with_head(path: Path, change: Callable[[Any], None]) -> None:
    """Write another head, with its right hash."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[32:40], "little")
    told, rest = json.loads(raw[40 : 40 + length]), raw[40 + length :]
    change(told)
    head = json.dumps(told).encode()
    path.write_bytes(hashlib.sha256(head).digest() + len(head).to_bytes(8, "little") + head + rest)


def set_sizes(*sizes: Any) -> Callable[[Any], None]:
    def change(told: Any) -> None:
        for row, size in zip(told["arrays"], sizes, strict=True):
            row[2] = size

    return change


@pytest.mark.parametrize("sizes", [(1 << 50, 96 - (1 << 50)), (96, 0.0), (97, -1), (94, 2), (True, 95), ("96", 0)])
def test_sizes_that_no_array_has_are_damage(tmp_path: Path, sizes: tuple[Any, Any]) -> None:
    """A negative size beside a huge one has the right sum: the load ended with a MemoryError, at each start."""
    shelf, path = kept(tmp_path)
    with_head(path, set_sizes(*sizes))
    assert shelf.load("k", allocate) is None and not path.exists()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """To open a named pipe is to wait for who writes it."""
    shelf, path = kept(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert shelf.load("k", allocate) is None and not path.exists()
    path.symlink_to("/dev/zero")
    assert shelf.load("k", allocate) is None and not path.exists()
    path.mkdir()
    assert shelf.load("k", allocate) is None


def test_room_is_not_made_in_folders_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link in the folder of packed weights led to files of the same endings elsewhere."""
    other = tmp_path / "elsewhere"
    other.mkdir()
    for name in ("mine.pack", "work.tmp"):
        (other / name).write_bytes(bytes(64))
        os.utime(other / name, (1, 1))
    _, path = kept(tmp_path)
    (tmp_path / packed.PACKED / "linked").symlink_to(other)
    monkeypatch.setattr(packed, "LIMIT_BYTES", 100)
    assert PackedShelf(tmp_path, MODEL).keep("other", [("a", np.zeros(90, np.uint8))])
    assert not path.exists() and sorted(each.name for each in other.iterdir()) == ["mine.pack", "work.tmp"]


# -- files of a node that runs ----------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_link_in_place_of_a_run_file_leads_nowhere(home: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = run_path("desk")
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    with run_file("desk", victim):
        assert running_pid(path) == os.getpid() and not path.is_symlink()
        assert path.stat().st_mode & 0o077 == 0
    assert victim.read_text() == "precious" and not path.exists()


def test_a_link_in_place_of_a_log_is_refused(home: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    path = log_path("desk")
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    with pytest.raises(BadRequest, match="cannot be written"):
        LogFile(path)
    assert not victim.exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadRequest, match="cannot be written"):
        LogFile(path)


def test_a_draft_that_is_there_already_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "own" / "api-8000.secret"
    path.parent.mkdir()
    monkeypatch.setattr(os, "urandom", bytes)
    path.with_name(f".{path.name}.00000000.tmp").symlink_to(victim)
    with pytest.raises(BadRequest, match="cannot be written"):
        write_private(path, "secret")
    assert victim.read_text() == "precious" and not path.exists()
    write_private(path, "secret")
    assert victim.read_text() == "precious" and path.read_text() == "secret" and path.stat().st_mode & 0o077 == 0


def test_a_folder_that_others_may_write_is_closed_and_that_of_others_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    assert private_folder(folder).stat().st_mode & 0o022 == 0
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(BadRequest, match="another user"):
        private_folder(folder)
