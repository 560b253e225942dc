"""GGUF models in several files on a hub: one model, of which weights come only from the parts that hold what is needed."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from manyhands.checkpoint import gguf
from manyhands.checkpoint.folder import MANIFEST, read_config, read_entries
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.checkpoint.manifest import Silent, build_manifest
from manyhands.checkpoint.partition import needed_tensors
from manyhands.checkpoint.split import split_model
from manyhands.core import Span
from manyhands.errors import ModelError
from manyhands.place.shape import look_up, stored_precision
from manyhands.weights.download import Need, pull
from manyhands.weights.fetch import resolve_model
from manyhands.weights.hub_provider import HubProvider
from manyhands.weights.shelf import find, on_shelf
from tests.gguf_files import tiny_gguf
from tests.gguf_parts import split_gguf
from tests.weights.hub_server import COMMIT, REPO, FakeHub, serving
from tests.weights.providers import FromDisk

FOLDER = "Q4_0"
NAMES = [f"tiny-Q4_0-0000{number}-of-00004.gguf" for number in (1, 2, 3, 4)]
MODEL = f"hf:{REPO}:{FOLDER}/{NAMES[0]}"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in one file."""
    return tiny_gguf("llama", tmp_path_factory.mktemp("gguf") / "tiny-Q4_0.gguf", "Q4_0")[0]


@pytest.fixture
def hub(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A repository with the model in four parts, in a folder; others are beside it."""
    total = len(read_gguf(file).tensors)
    split_gguf(file, tmp_path / "repo" / FOLDER, (0, total // 3, 2 * total // 3))
    (tmp_path / "repo" / "README.md").write_text("GGUF")
    (tmp_path / "repo" / "Q8_0").mkdir()
    (tmp_path / "repo" / "Q8_0" / NAMES[1]).write_bytes(b"other")
    with serving(FakeHub(tmp_path / "repo")) as hub:
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        yield hub


@pytest.fixture
def source(file: Path, home: Path) -> Path:
    return gguf_folder(file, home)


def fetch(home: Path, span: Span | None, with_ends: bool = False, name: str = MODEL) -> Path:
    return resolve_model(name, span, with_ends, home, Silent())


def check_holds(folder: Path, source: Path, span: Span | None, with_ends: bool = False) -> set[str]:
    """The folder has the tensors of the span as `source` has them, and its id; returns the files that they are in."""
    entries = {entry.name: entry for entry in read_entries(folder)}
    originals = {entry.name: entry for entry in read_entries(source)}
    needed = needed_tensors(originals, 6, span, with_ends)
    for one, two in [(entries[name], originals[name]) for name in needed]:
        theirs = (source / two.file).read_bytes()[two.start : two.end]
        assert (folder / one.file).read_bytes()[one.start : one.end] == theirs
    assert build_manifest(folder).id == build_manifest(source).id
    return {entries[name].file for name in needed}


def weights_in(home: Path) -> list[Path]:
    return [path for path in home.rglob("*.gguf") if path.is_file()]


@pytest.mark.parametrize("has_sizes", [True, False])
@pytest.mark.parametrize("has_ranges", [True, False])
def test_the_model_is_that_of_the_one_file(
    hub: FakeHub, home: Path, source: Path, has_sizes: bool, has_ranges: bool
) -> None:
    hub.has_sizes, hub.has_ranges = has_sizes, has_ranges
    folder = fetch(home, None, True)
    check_holds(folder, source, None, True)
    assert read_config(folder) == read_config(source)
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (folder / MANIFEST).read_bytes() == build_manifest(source).encode()


def test_weights_come_from_the_parts_that_hold_the_span(
    hub: FakeHub, home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first fetch, which reads all once to learn the hashes, as it does of safetensors without a manifest."""
    fetch(home, Span(0, 1))
    hub.ranges.clear()
    monkeypatch.setattr(gguf, "PART_BYTES", 1024)
    before = hub.weight_bytes
    folder = fetch(home, Span(5, 6))
    files = check_holds(folder, source, Span(5, 6))
    layer = sum(len(entry) for entry in read_entries(source) if ".layers.5." in entry.name)
    first = (hub.folder / FOLDER / NAMES[0]).stat().st_size  # all of it is header
    assert files == {NAMES[3]} and layer < hub.weight_bytes - before <= layer + first + 3 * 4096
    assert {name for name, start, _ in hub.ranges if start >= 4096} == {f"{FOLDER}/{NAMES[3]}"}


def test_any_part_names_it_and_it_is_fetched_once(
    hub: FakeHub, home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(home, None, True, f"{REPO}:{FOLDER}/{NAMES[2]}")
    before = len(hub.ranges)
    assert fetch(home, None, True) == folder
    headers = [(name, start) for name, start, _ in hub.ranges[before:]]
    assert headers == [(f"{FOLDER}/{name}", 0) for name in NAMES]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch(home, None, True, f"{REPO}:{FOLDER}/{NAMES[3]}") == folder
    (shelved,) = [one for one in on_shelf(home) if one.kind == "hub"]
    assert shelved.name == f"hf:{REPO}@{COMMIT[:8]}:{FOLDER}/{NAMES[0]}" and shelved.is_whole
    assert find(shelved.name, home) == [shelved]


def test_what_is_lost_of_a_part_is_fetched_again(hub: FakeHub, home: Path, source: Path) -> None:
    """Of a part that is gone its tensors, of one with a damaged header the header; of the others nothing."""
    folder = fetch(home, None, True)
    (folder / NAMES[2]).unlink()
    with (folder / NAMES[1]).open("r+b") as handle:
        handle.write(bytes(16))
    lost = (hub.folder / FOLDER / NAMES[2]).stat().st_size
    headers = sum(read_gguf(hub.folder / FOLDER / name).data_start for name in NAMES[:1])
    before = hub.weight_bytes
    assert fetch(home, None, True) == folder
    check_holds(folder, source, None, True)
    assert hub.weight_bytes - before < lost + headers + 3 * gguf.PART_BYTES


def test_its_size_is_known_before_it_is_fetched(hub: FakeHub, home: Path, file: Path) -> None:
    for precision in ("w4", "bf16"):
        there, here = look_up(MODEL, precision, home), look_up(str(file), precision, home)
        assert (there.shape.layer_bytes, there.shape.ends_bytes) == (here.shape.layer_bytes, here.shape.ends_bytes)
        assert there.config == here.config
    assert stored_precision(MODEL, home) == stored_precision(str(file), home) == "w4"
    assert not list((home / "models").glob("*--*"))


def test_the_hub_gives_a_joiner_what_peers_lack(hub: FakeHub, home: Path, source: Path, tmp_path: Path) -> None:
    """Peers hold layers 0-2; the others, and config and tokenizer of those that have none, come from the parts."""
    (part, _) = split_model(source, [Span(0, 3), Span(3, 6)], tmp_path / "parts")
    need = Need(build_manifest(source).id, Span(2, 6), with_files=True)
    provider = HubProvider(f"{REPO}:{FOLDER}/{NAMES[1]}")
    pulled = asyncio.run(pull(need, [FromDisk("a", part)], home, hub=provider))
    check_holds(pulled.folder, source, Span(2, 6))
    wanted = [entry for entry in read_entries(source) if any(f".layers.{n}." in entry.name for n in (3, 4, 5))]
    assert pulled.received["hub"] == sum(map(len, wanted))
    assert asyncio.run(provider.file(need.model, "config.json")) == read_config(source)


def test_wrong_bytes_of_a_part_are_fetched_again(hub: FakeHub, home: Path, source: Path) -> None:
    name = f"{FOLDER}/{NAMES[2]}"
    hub.corrupt_at[name] = (read_gguf(hub.folder / name).tensors[-1].start, 1)
    check_holds(fetch(home, None, True), source, None, True)
    hub.corrupt_at[name] = (hub.corrupt_at[name][0], 99)
    with pytest.raises(ModelError, match=f"{NAMES[2]} arrived wrong twice"):
        fetch(home / "again", None, True)


@pytest.mark.parametrize("name", [NAMES[1], f"Q8_0/{NAMES[1]}"])
def test_a_model_of_which_a_part_is_not_there_is_refused(name: str, hub: FakeHub, home: Path) -> None:
    message = rf"has no file (Q8_0/)?{NAMES[0]}: the 4 parts of .* are needed, take a model of which all are there$"
    with pytest.raises(ModelError, match=message):
        fetch(home, None, True, f"{REPO}:{name}")
    assert not hub.ranges and not weights_in(home)


def test_parts_of_different_models_are_refused_before_weights_are_read(hub: FakeHub, home: Path) -> None:
    raw = (hub.folder / FOLDER / NAMES[3]).read_bytes()
    (hub.folder / FOLDER / NAMES[2]).write_bytes(raw)
    for ask in (lambda: fetch(home, None, True), lambda: look_up(MODEL, "w4", home)):
        with pytest.raises(ModelError, match=f"^{NAMES[2]} refused: its split.no is 3, by its name it is 2"):
            ask()
    assert all(start == 0 for _, start, _ in hub.ranges) and not weights_in(home)


def test_its_quantisation_names_it(hub: FakeHub, home: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file does: fetched into the same folder, found there without a hub, looked up, and given to others."""
    (hub.folder / "Q8_0" / NAMES[1]).rename(hub.folder / "Q8_0" / "tiny-Q8_0.gguf")
    short = f"hf:{REPO}:q4_0"
    assert stored_precision(short, home) == "w4"
    assert look_up(short, "w4", home).shape.layer_bytes == look_up(MODEL, "w4", home).shape.layer_bytes
    folder = fetch(home, None, True, short)
    check_holds(folder, source, None, True)
    assert fetch(home, None, True) == folder
    assert asyncio.run(HubProvider(short).file(build_manifest(source).id, "config.json")) == read_config(source)
    with pytest.raises(
        ModelError, match=r"has no GGUF model Q5_0; there are Q4_0/tiny-Q4_0-00001.*, Q8_0/tiny-Q8_0.gguf"
    ):
        fetch(home, None, True, f"hf:{REPO}:Q5_0")
    with pytest.raises(
        ModelError, match=r"holds no weights.*; of its GGUF files name one \(hf:.*:Q4_K_M\): there are Q4_0/"
    ):
        fetch(home, None, True, REPO)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch(home, None, True, short) == folder and stored_precision(short, home) == "w4"
