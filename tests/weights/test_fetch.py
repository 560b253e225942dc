"""Fetching from a hub on loopback: only what is needed travels, and only what is right stays."""

import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from manyhands import tales
from manyhands.checkpoint import gguf, store
from manyhands.checkpoint.folder import INDEX, JOURNAL, MANIFEST, RANKED, SINGLE, TOKENIZER, read_entries
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.manifest import Silent, build_manifest
from manyhands.checkpoint.partition import needed_tensors
from manyhands.checkpoint.split import split_model
from manyhands.core import Span
from manyhands.errors import BadRequest, CutError, DiskFull, ModelError
from manyhands.weights.fetch import resolve_model, runs
from tests.checkpoints import SPAN, check_holds
from tests.gguf_files import tiny_gguf
from tests.multimodal import make_multimodal
from tests.weights.hub_server import COMMIT, REPO, FakeHub, serving

StartHub = Callable[..., FakeHub]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartHub]:
    """start(folder, with_manifest=False) serves a copy of `folder`; huggingface_hub is pointed at it."""
    stack: list[Iterator[FakeHub]] = []

    def begin(folder: Path, with_manifest: bool = False) -> FakeHub:
        copy = shutil.copytree(folder, tmp_path / "repo")
        if with_manifest:
            (copy / MANIFEST).write_bytes(build_manifest(folder).encode())
        context = serving(FakeHub(copy))
        hub = context.__enter__()
        stack.append(context)  # type: ignore[arg-type]
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        return hub

    yield begin
    for context in stack:
        context.__exit__(None, None, None)  # type: ignore[attr-defined]


def fetch(home: Path, span: Span | None = SPAN, with_ends: bool = False, name: str = REPO) -> Path:
    return resolve_model(name, span, with_ends, home, Silent())


def size_of(source: Path, names: set[str]) -> int:
    return sum(len(entry) for entry in read_entries(source) if entry.name in names)


@pytest.mark.parametrize("kind", ["llama", "sharded", "tied"])
@pytest.mark.parametrize("with_ends", [False, True])
def test_known_manifest_fetches_only_the_ranges_of_the_span(
    start: StartHub, home: Path, request: pytest.FixtureRequest, kind: str, with_ends: bool
) -> None:
    source = request.getfixturevalue(kind)
    hub = start(source, with_manifest=True)
    folder = fetch(home, with_ends=with_ends)
    held = check_holds(folder, source, with_ends=with_ends)
    assert held == set(needed_tensors([e.name for e in read_entries(source)], 6, SPAN, with_ends))
    headers = sum(end - begin for _, begin, end in hub.ranges if begin <= 8)
    assert hub.weight_bytes == size_of(source, held) + headers
    assert headers < 30_000
    assert folder == home / "models" / f"tests--tiny@{COMMIT}"
    assert (folder / "tokenizer.json").exists()


def test_sparse_file_has_the_original_size(start: StartHub, home: Path, llama: Path) -> None:
    start(llama, with_manifest=True)
    folder = fetch(home)
    assert (folder / SINGLE).stat().st_size == (llama / SINGLE).stat().st_size


def test_files_without_needed_tensors_are_not_touched(start: StartHub, home: Path, sharded: Path) -> None:
    hub = start(sharded, with_manifest=True)
    folder = fetch(home, Span(2, 3))
    asked = {name for name, _, _ in hub.ranges}
    places = json.loads((sharded / INDEX).read_text())["weight_map"]
    assert asked == {file for name, file in places.items() if ".layers.2." in name} < set(places.values())
    assert {path.name for path in folder.glob("*.safetensors")} == asked


@pytest.mark.parametrize("kind", ["llama", "sharded"])
@pytest.mark.parametrize("has_sizes", [True, False])
def test_unknown_manifest_is_made_in_one_pass(
    start: StartHub, home: Path, request: pytest.FixtureRequest, kind: str, has_sizes: bool
) -> None:
    source = request.getfixturevalue(kind)
    hub = start(source)
    hub.has_sizes = has_sizes
    folder = fetch(home)
    held = check_holds(folder, source)
    assert held == set(needed_tensors([e.name for e in read_entries(source)], 6, SPAN, False))
    assert hub.weight_bytes == sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert (folder / MANIFEST).read_bytes() == build_manifest(source).encode()


def test_unneeded_bytes_stay_unwritten(start: StartHub, home: Path, llama: Path) -> None:
    start(llama)
    folder = fetch(home)
    head = next(entry for entry in read_entries(llama) if entry.name == "lm_head.weight")
    assert not any((folder / SINGLE).read_bytes()[head.start : head.end])


def test_another_span_is_added_by_ranges(start: StartHub, home: Path, sharded: Path) -> None:
    hub = start(sharded)
    fetch(home)
    before = hub.weight_bytes
    folder = fetch(home, Span(3, 6), with_ends=True)
    assert Path(folder) == fetch(home)
    held = check_holds(folder, sharded, Span(2, 6), with_ends=True)
    new = held - set(needed_tensors(held, 6, SPAN, False))
    assert 0 <= hub.weight_bytes - before - size_of(sharded, new) < 30_000  # headers


def test_second_call_downloads_nothing(start: StartHub, home: Path, llama: Path) -> None:
    hub = start(llama, with_manifest=True)
    fetch(home)
    before = hub.weight_bytes
    fetch(home)
    assert hub.weight_bytes == before


def test_broken_connection_goes_on_where_it_ended(start: StartHub, home: Path, llama: Path) -> None:
    hub = start(llama, with_manifest=True)
    hub.cuts = [20_000, 1_000]
    hub.statuses = [503]
    folder = fetch(home)
    held = check_holds(folder, llama)
    assert hub.cuts == []
    headers = sum(end - begin for _, begin, end in hub.ranges if begin <= 8)
    assert hub.weight_bytes - headers == size_of(llama, held)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_killed_fetch_resumes_from_the_journal(
    start: StartHub, home: Path, sharded: Path, with_manifest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash after 60 KB of tensors; the next run does not ask for them again."""
    monkeypatch.setattr(store, "COMMIT_BYTES", 1)
    hub = start(sharded, with_manifest=with_manifest)
    seen = 0

    class Crash(Silent):
        def advance(self, amount: int) -> None:
            nonlocal seen
            seen += amount
            if seen > 260_000 // (2 if with_manifest else 1):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model(REPO, None, True, home, Crash())
    kept = json.loads((home / "models" / f"tests--tiny@{COMMIT}" / JOURNAL).read_text())["tensors"]
    kept_bytes = size_of(sharded, {name for names in kept.values() for name in names})
    assert kept_bytes > 40_000
    before = hub.weight_bytes
    folder = fetch(home, None, True)
    check_holds(folder, sharded, None, True)
    total = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    assert hub.weight_bytes - before <= total - kept_bytes + 2_000


@pytest.mark.parametrize("with_manifest", [True, False])
def test_wrong_bytes_once_are_fetched_again(start: StartHub, home: Path, llama: Path, with_manifest: bool) -> None:
    hub = start(llama, with_manifest=with_manifest)
    victim = next(entry for entry in read_entries(llama) if ".layers.3." in entry.name)
    hub.corrupt_at[SINGLE] = (victim.start, 1)
    check_holds(fetch(home), llama)


def test_wrong_bytes_always_name_the_tensor(start: StartHub, home: Path, llama: Path) -> None:
    hub = start(llama, with_manifest=True)
    victim = next(entry for entry in read_entries(llama) if ".layers.3." in entry.name)
    hub.corrupt_at[SINGLE] = (victim.start, 99)
    with pytest.raises(ModelError, match=rf"{victim.name} in {SINGLE} arrived wrong twice.*expected \w+, got \w+"):
        fetch(home)
    folder = home / "models" / f"tests--tiny@{COMMIT}"
    assert victim.name not in {entry.name for entry in read_entries(folder)}
    assert not any((folder / SINGLE).read_bytes()[victim.start : victim.end])


def test_wrong_bytes_always_name_the_file_without_manifest(start: StartHub, home: Path, llama: Path) -> None:
    hub = start(llama)
    victim = next(entry for entry in read_entries(llama) if ".layers.3." in entry.name)
    hub.corrupt_at[SINGLE] = (victim.start, 99)
    with pytest.raises(ModelError, match=f"{SINGLE} arrived wrong twice"):
        fetch(home)
    folder = home / "models" / f"tests--tiny@{COMMIT}"
    assert not (folder / MANIFEST).exists()
    assert json.loads((folder / JOURNAL).read_text())["tensors"] == {}


@pytest.mark.parametrize("with_manifest", [True, False])
def test_server_without_ranges_is_streamed(start: StartHub, home: Path, llama: Path, with_manifest: bool) -> None:
    hub = start(llama, with_manifest=with_manifest)
    hub.has_ranges = False
    held = check_holds(fetch(home, with_ends=True), llama, with_ends=True)
    assert held == set(needed_tensors([e.name for e in read_entries(llama)], 6, SPAN, True))


def test_unknown_model_names_id_host_and_remedy(start: StartHub, home: Path, llama: Path) -> None:
    hub = start(llama)
    host = hub.endpoint.removeprefix("http://")
    with pytest.raises(ModelError, match=f"no/such@main is unknown to {host}: check the spelling"):
        fetch(home, name="no/such")
    with pytest.raises(ModelError, match=f"{REPO}@v9 is unknown"):
        fetch(home, name=f"{REPO}@v9")


def test_gated_model_says_how_to_get_in(start: StartHub, home: Path, llama: Path) -> None:
    start(llama).is_gated = True
    with pytest.raises(ModelError, match=r"HTTP 403.*HF_TOKEN"):
        fetch(home)


def test_token_of_the_environment_is_sent(
    start: StartHub, home: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub = start(llama, with_manifest=True)
    fetch(home)
    assert set(hub.tokens) == {"Bearer hf_secret"}


def test_server_that_always_fails_gives_up(start: StartHub, home: Path, llama: Path) -> None:
    hub = start(llama, with_manifest=True)
    hub.statuses = [500] * 99
    with pytest.raises(ModelError, match=r"no usable answer.*HTTP 500"):
        fetch(home)
    assert len(hub.statuses) == 99 - 6


def test_offline_uses_what_is_here(start: StartHub, home: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(llama, with_manifest=True)
    folder = fetch(home)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(home) == folder
    assert fetch(home, Span(3, 4), name=f"{REPO}@{COMMIT}") == folder
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        fetch(home, Span(0, 6))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        fetch(home, name=f"{REPO}@other")


def test_too_small_a_disk_is_refused_before_the_download(
    start: StartHub, home: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = start(llama, with_manifest=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 999, 999))
    with pytest.raises(DiskFull, match=r"tests--tiny@.*needs [\d.]+ kB, [\d.]+ kB more than are free"):
        fetch(home)
    assert hub.weight_bytes < 20_000


def test_disk_that_fills_up_leaves_only_whole_tensors_marked(
    start: StartHub, home: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(llama, with_manifest=True)
    take, room = store.Sink._take, 5
    begun: set[str] = set()  # a tensor arrives in as many pieces as the network likes

    def full(self: store.Sink, same: list[TensorEntry], at: int, piece: memoryview) -> None:
        begun.add(same[0].name)
        if len(begun) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        take(self, same, at, piece)

    monkeypatch.setattr(store.Sink, "_take", full)
    with pytest.raises(DiskFull, match=r"the disk is full; needed .* kB"):
        fetch(home)
    folder = home / "models" / f"tests--tiny@{COMMIT}"
    assert len(read_entries(folder)) == 5
    build_manifest(folder)
    room = 10**6
    check_holds(fetch(home), llama)


def test_pickle_weights_are_refused(start: StartHub, home: Path, llama: Path) -> None:
    hub = start(llama)
    (hub.folder / SINGLE).unlink()
    hub.extra_names = ["pytorch_model.bin"]
    with pytest.raises(ModelError, match="refused: pickle weights; convert to safetensors"):
        fetch(home)


@pytest.mark.parametrize("name", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a\\b.json"])
def test_file_names_that_leave_the_folder_are_refused(start: StartHub, home: Path, llama: Path, name: str) -> None:
    start(llama).extra_names = [name]
    with pytest.raises(ModelError, match="not a plain relative path"):
        fetch(home)


def test_index_that_leaves_the_folder_is_refused(start: StartHub, home: Path, sharded: Path) -> None:
    hub = start(sharded)
    (hub.folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "../../x.safetensors"}}))
    with pytest.raises(ModelError, match="not a plain relative path"):
        fetch(home)


def test_hidden_files_of_the_repository_stay_there(start: StartHub, home: Path, llama: Path) -> None:
    """A repository must not bring its own journal."""
    hub = start(llama, with_manifest=True)
    (hub.folder / JOURNAL).write_text('{"tensors": {"model.safetensors": ["model.norm.weight"]}}')
    assert "model.norm.weight" not in check_holds(fetch(home), llama)


@pytest.mark.parametrize("name", RANKED)
def test_a_tokenizer_by_ranks_comes_along(start: StartHub, home: Path, llama: Path, tmp_path: Path, name: str) -> None:
    source = shutil.copytree(llama, tmp_path / "ranked")
    (source / TOKENIZER).unlink()
    (source / name).write_bytes(b"AA== 0\n")
    start(source)
    folder = fetch(home)
    assert (folder / name).read_bytes() == b"AA== 0\n"
    assert name in dict(build_manifest(folder).files)
    check_holds(folder, source)


def test_span_outside_the_model_is_refused(start: StartHub, home: Path, llama: Path) -> None:
    start(llama, with_manifest=True)
    with pytest.raises(CutError, match="out of range"):
        fetch(home, Span(4, 7))


def test_local_folder_is_itself(home: Path, llama: Path) -> None:
    assert fetch(home, name=str(llama)) == llama


def test_tales_come_with_the_package(home: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tales, "model_path", lambda: llama, raising=False)
    assert fetch(home, name="tales") == llama


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "../x", "a/b@../c", "", "/no/such/folder"])
def test_names_that_mean_nothing_are_refused(
    home: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried in a folder of its own: "../x" may well exist beside a checkout."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises((ModelError, BadRequest), match=r"no folder or GGUF file here|there is no '"):
        fetch(home, name=name)


def test_runs_join_neighbours_only() -> None:
    def entry(start: int, end: int) -> TensorEntry:
        return TensorEntry(f"t{start}", "f", "U8", (end - start,), start, end)

    groups = runs([entry(30, 40), entry(10, 20), entry(20, 25)])
    assert [[(one.start, one.end) for one in group] for group in groups] == [[(10, 20), (20, 25)], [(30, 40)]]
    assert runs([]) == []


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file alone in its folder."""
    file, _ = tiny_gguf("llama", tmp_path_factory.mktemp("gguf") / "model.gguf", "Q8_0")
    alone = tmp_path_factory.mktemp("alone") / "tiny.Q8_0.gguf"
    return file.replace(alone)


def test_a_span_of_a_gguf_file_costs_its_bytes(
    quantised: Path, home: Path, start: StartHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first fetch, which reads all once to learn the hashes: its tensors, and the header twice."""
    monkeypatch.setattr(gguf, "FIRST_BYTES", 2048)
    hub = start(quantised.parent)
    name = f"hf:{REPO}:{quantised.name}"
    source = gguf_folder(quantised, home)
    folder = fetch(home, name=name)
    check_holds(folder, source)
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    begun = hub.weight_bytes
    check_holds(fetch(home, Span(4, 5), name=name), source, Span(4, 5))
    layer = sum(len(entry) for entry in read_entries(source) if ".layers.4." in entry.name)
    header = min(entry.start for entry in read_entries(source))
    assert layer + 8 * header < quantised.stat().st_size
    assert layer < hub.weight_bytes - begun <= layer + 8 * header  # a header is read in pieces that grow fourfold


def test_tensors_that_are_lists_of_the_metadata_are_fetched_too(tmp_path: Path, home: Path, start: StartHub) -> None:
    """Of apertus: ranges of the header's bytes, before all others."""
    file = tiny_gguf("apertus", tmp_path / "made.gguf")[0].replace(tmp_path / "alone.gguf")
    (alone := tmp_path / "hub").mkdir()
    start(file.replace(alone / file.name).parent)
    name, source = f"hf:{REPO}:{file.name}", gguf_folder(alone / file.name, home)
    check_holds(fetch(home, name=name), source)
    check_holds(fetch(home, Span(4, 5), name=name), source, Span(4, 5))
    lists = {entry.name: entry for entry in read_entries(source) if ".act_fn." in entry.name}
    assert len(lists) == 4 * 6 and lists["model.layers.0.mlp.act_fn.beta"].shape == ()


@pytest.mark.parametrize("has_ranges", [True, False])
def test_layers_of_the_same_bytes_are_fetched_as_layers_of_their_own(
    has_ranges: bool, tmp_path: Path, home: Path, start: StartHub
) -> None:
    """Of nanbeige: three layers, gone through twice. Their bytes are hashed once, and asked for once where both are needed."""
    file = tiny_gguf("llama_nanbeige", tmp_path / "made.gguf", layers=3)[0].replace(tmp_path / "alone.gguf")
    (alone := tmp_path / "hub").mkdir()
    hub = start(file.replace(alone / file.name).parent)
    hub.has_ranges = has_ranges
    name, source = f"hf:{REPO}:{file.name}", gguf_folder(alone / file.name, home)
    check_holds(fetch(home, Span(4, 5), name=name), source, Span(4, 5))
    begun = hub.weight_bytes
    folder = fetch(home, None, True, name=name)
    check_holds(folder, source, None)
    assert not has_ranges or hub.weight_bytes - begun < 2 * (alone / file.name).stat().st_size
    entries = {entry.name: entry for entry in read_entries(folder)}
    one, again = (entries[f"model.layers.{i}.mlp.up_proj.weight"] for i in (1, 4))
    assert (one.start, one.end) == (again.start, again.end)
    parts = split_model(source, [Span(0, 2), Span(2, 6)], tmp_path / "parts")
    assert [build_manifest(part).id for part in parts] == [build_manifest(source).id] * 2


def test_a_killed_fetch_of_a_gguf_file_goes_on_where_it_was(
    quantised: Path, home: Path, start: StartHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another span, when hashes are known: what was written down is not asked for again, nor what came before a cut."""
    monkeypatch.setattr(store, "COMMIT_BYTES", 1)
    monkeypatch.setattr(gguf, "FIRST_BYTES", 2048)
    hub, name, source = start(quantised.parent), f"hf:{REPO}:{quantised.name}", gguf_folder(quantised, home)
    held = check_holds(fetch(home, Span(0, 1), name=name), source, Span(0, 1))

    class Crash(Silent):
        seen = 0

        def advance(self, amount: int) -> None:
            self.seen += amount
            if self.seen > size_of(source, held) * 5 // 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model(name, Span(1, 6), True, home, Crash())
    (journal,) = (home / "models").rglob(JOURNAL)
    kept = {one for names in json.loads(journal.read_text())["tensors"].values() for one in names} - held
    assert size_of(source, kept) > size_of(source, held)
    before, hub.cuts = hub.weight_bytes, [5_000]
    folder = fetch(home, Span(1, 6), True, name=name)
    missing = check_holds(folder, source, None, True) - held - kept
    header = min(entry.start for entry in read_entries(source))
    assert not hub.cuts
    assert size_of(source, missing) <= hub.weight_bytes - before <= size_of(source, missing) + 8 * header


def test_a_fetched_gguf_file_is_not_taken_for_the_repository(quantised: Path, home: Path, start: StartHub) -> None:
    start(quantised.parent)
    fetch(home, name=f"{REPO}:{quantised.name}")
    with pytest.raises(ModelError, match="holds no weights"):
        fetch(home)


def test_a_fetched_gguf_file_needs_no_hub(
    quantised: Path, home: Path, start: StartHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"hf:{REPO}@main:{quantised.name}"
    start(quantised.parent)
    folder = fetch(home, name=name)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch(home, name=name) == folder


def test_wrong_bytes_of_a_gguf_file_are_fetched_again(quantised: Path, home: Path, start: StartHub) -> None:
    source = gguf_folder(quantised, home)
    hub = start(quantised.parent)
    entry = next(e for e in read_entries(source) if e.name == "model.layers.2.mlp.up_proj.weight")
    hub.corrupt_at[quantised.name] = (entry.start + 5, 1)
    check_holds(fetch(home, name=f"hf:{REPO}:{quantised.name}"), source)


@pytest.mark.parametrize(
    "name", ["missing.gguf", "hf:a/b:../x.gguf", "a/b:x.bin", "hf:a/b:c//d.gguf", "a/missing.gguf"]
)
def test_names_that_are_no_gguf_file_are_refused(name: str, home: Path) -> None:
    with pytest.raises(ModelError, match=r"no folder or GGUF file here|there is no '"):
        fetch(home, name=name)


@pytest.mark.parametrize("with_manifest", [False, True])
def test_of_a_multimodal_model_only_the_text_part_is_fetched(
    start: StartHub, home: Path, tmp_path: Path, with_manifest: bool
) -> None:
    """Old names on the hub, those of a text model here; files for images alone are not touched."""
    source = make_multimodal("gemma3", tmp_path / "source", tied=False, max_shard_bytes=40_000)
    hub = start(source, with_manifest)
    folder = fetch(home, None, with_ends=True)
    held = {entry.name for entry in read_entries(folder)}
    assert held == {entry.name for entry in read_entries(source)} == set(build_manifest(source).names)
    places = json.loads((source / INDEX).read_text())["weight_map"]
    of_text = {file for name, file in places.items() if name.startswith("language_model.")}
    assert {name for name, _, _ in hub.ranges} == of_text < set(places.values())
    assert "model.layers.0.mlp.up_proj.weight" in held and "lm_head.weight" in held
    assert build_manifest(folder).id == build_manifest(source).id
    parts = split_model(folder, [Span(0, 1), Span(1, 4)], tmp_path / "parts")
    assert {build_manifest(part).id for part in parts} == {build_manifest(source).id}
