"""What one process has proven of the engine another of the same user takes, and nothing that another user wrote."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.engine import golden, library, proofs
from manyhands.errors import ModelError
from tests.few_digests import few_digests, forget

BEST = library.supported()[0]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine that says which boot it is in, and a home without notes."""
    monkeypatch.delenv(library.FORCED, raising=False)
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    _is_in_boot("one", tmp_path, monkeypatch)
    few_digests(monkeypatch)
    yield tmp_path / "home"
    forget()


def _is_in_boot(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, text in (("BOOT", name), ("CPU", "processor : 0\ncpu MHz : 1\nflags : fma\n\nprocessor : 1\n")):
        (folder / part).write_text(text)
        monkeypatch.setattr(proofs, part, folder / part)


def computes() -> bool:
    """Whether a process that starts now reproduces the digests itself."""
    forget()
    before = library.calls(BEST)
    assert golden.choose() == BEST
    return library.calls(BEST) > before


def test_the_first_process_proves_and_the_next_believes_it(home: Path) -> None:
    assert [computes(), computes(), computes()] == [True, False, False]
    assert (home / proofs.FILE).stat().st_mode & 0o777 == 0o600
    forget()
    assert golden.choose("w8+c8") == BEST  # its other groups are proven for themselves
    assert golden._unlike.cache_info().currsize == 2


def test_another_boot_cpu_library_or_digest_is_proven_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert computes() and not computes()
    _is_in_boot("two", tmp_path, monkeypatch)
    assert computes() and not computes()
    (tmp_path / "CPU").write_text("processor : 0\ncpu MHz : 2\nflags : fma avx512f\n\nprocessor : 1\n")
    assert computes() and not computes()
    other = tmp_path / "other.so"
    other.write_bytes(library.PATH.read_bytes() + b"\0")
    monkeypatch.setattr(library, "PATH", other)
    assert computes() and not computes()
    digests = {**json.loads(golden.FILE.read_text()), "norms": "0" * 64}
    (tmp_path / "golden.json").write_text(json.dumps(digests))
    monkeypatch.setattr(golden, "FILE", tmp_path / "golden.json")
    for _ in range(2):  # what fails is not noted
        forget()
        with pytest.raises(ModelError, match="norms"):
            golden.choose()


def test_the_speed_of_a_cpu_and_its_other_cores_do_not_matter(tmp_path: Path) -> None:
    assert computes()
    (tmp_path / "CPU").write_text("processor : 0\ncpu MHz : 99\nflags : fma\n\nprocessor : 1\nflags : none\n")
    assert not computes()


def test_notes_that_others_can_write_are_not_believed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert computes() and not computes()
    file = home / proofs.FILE
    file.chmod(0o620)
    assert computes()  # and written anew, for this user alone
    assert not computes() and file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # it is another user's
    assert computes()


def test_a_link_or_a_pipe_is_no_note(home: Path, tmp_path: Path) -> None:
    assert computes()
    file, elsewhere = home / proofs.FILE, tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert computes() and not file.is_symlink() and elsewhere.exists()
    file.unlink()
    os.mkfifo(file)
    assert computes()  # without waiting for a writer
    assert not computes()


@pytest.mark.parametrize("raw", [b"", b"\xff" * 100, b"x\n" * 1_000_000], ids=["empty", "no text", "large"])
def test_any_file_of_notes_is_read_in_bounds_and_mended(home: Path, raw: bytes) -> None:
    home.mkdir()
    file = home / proofs.FILE
    file.write_bytes(raw)
    assert computes() and not computes()
    assert file.stat().st_size <= proofs.MAX_NOTES * (proofs.NOTE_CHARS + 1)


def test_the_oldest_notes_go(home: Path) -> None:
    names = [proofs.note([str(i).encode()]) for i in range(proofs.MAX_NOTES + 3)]
    for name in [*names, names[-1]]:
        proofs.keep(name)
    assert [proofs.is_noted(name) for name in names] == [False] * 3 + [True] * proofs.MAX_NOTES


def test_without_a_boot_or_a_home_each_process_proves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "file"))  # no folder can be made there
    assert computes() and computes()
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    (tmp_path / "BOOT").unlink()
    assert computes() and computes()


def test_parts_of_a_name_cannot_be_shifted() -> None:
    assert proofs.note([b"a", b"bc"]) != proofs.note([b"ab", b"c"])
