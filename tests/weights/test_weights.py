"""Where the weights of a hosted model come from: this disk, then peers, then the hub. In one process, with a hub of its own."""

import asyncio
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from manyhands.checkpoint.folder import MANIFEST, read_entries
from manyhands.checkpoint.manifest import Silent, build_manifest
from manyhands.checkpoint.partition import needed_tensors
from manyhands.checkpoint.split import split_model
from manyhands.core import ModelId, Precision, Span
from manyhands.errors import DiskFull, ModelError, ShardUnavailable, WeightsMismatch
from manyhands.member.hosting import Hosting
from manyhands.member.providers import provider_of
from manyhands.member.weights import ServedModel, Weights, kinds_of, weights_in, weights_of
from manyhands.place.strategy import SpanChoice
from manyhands.swarm.record import Record
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.weights.hub import HubUnreachable
from manyhands.weights.provider import Provider
from manyhands.weights.workers import Blame
from manyhands.worker.execute import Device
from tests.member.members import room_for, town
from tests.swarm.records import info_of, record_of
from tests.weights.hub_server import REPO, FakeHub, serving
from tests.weights.providers import FromDisk, Twist, after, lie, vanish

FIRST, LAST = Span(0, 3), Span(3, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("weights") / "tiny", layers=6, seed=3)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(FakeHub(shutil.copytree(folder, tmp_path / "repo"))) as hub:
        point_to(hub.endpoint, monkeypatch)
        yield hub


def point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def id_of(folder: Path) -> ModelId:
    return build_manifest(folder).id


def served(folder: Path, precision: Precision = "bf16", name: str = REPO) -> list[Record]:
    """What a swarm says that serves `folder`."""
    return [record_of(info=info_of(0, 6, model=id_of(folder), model_name=name, precision=precision, num_layers=6))]


def up(name: str, home: Path, records: Sequence[Record] = (), providers: Sequence[Provider] = ()) -> Weights:
    return asyncio.run(weights_of(name, None, records, home, Silent(), lambda kind: providers))


def joined(folder: Path, home: Path, providers: Sequence[Provider], name: str = REPO) -> Weights:
    return asyncio.run(weights_in(ServedModel(id_of(folder), name, "bf16"), providers, home, Silent()))


def fetch(
    weights: Weights, span: Span, home: Path, providers: Sequence[Provider] = (), blamed: list[Blame] | None = None
) -> tuple[Path, Weights]:
    heard = [] if blamed is None else blamed
    return asyncio.run(
        weights.fetch(span, home, providers, Silent(), with_ends=False, on_blame=heard.append),
    )


def size_of(folder: Path, span: Span) -> int:
    entries = {entry.name: entry for entry in read_entries(folder)}
    return sum(len(entries[name]) for name in needed_tensors(entries, 6, span, False))


def check_holds(where: Path, folder: Path, span: Span) -> None:
    there, truth = ({entry.name: entry for entry in read_entries(each)} for each in (where, folder))
    for name in needed_tensors(truth, 6, span, False):
        bytes_of = [
            (at / e.file).read_bytes()[e.start : e.end] for at, e in ((where, there[name]), (folder, truth[name]))
        ]
        assert bytes_of[0] == bytes_of[1]
    assert (where / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


# -- from where -------------------------------------------------------------------------------------------------------


def test_the_first_one_learns_from_the_hub_what_the_model_is(folder: Path, home: Path, hub: FakeHub) -> None:
    named = up(REPO, home)
    assert (named.id, named.kind, named.here, named.shape.num_layers) == (None, None, None, 6)
    where, known = fetch(named, FIRST, home)
    assert known.id == id_of(folder)
    check_holds(where, folder, FIRST)


def test_a_published_manifest_tells_it_at_once(folder: Path, home: Path, hub: FakeHub) -> None:
    (hub.folder / MANIFEST).write_bytes(build_manifest(folder).encode())
    named = up(REPO, home)
    assert named.id == id_of(folder) and hub.weight_bytes == 0
    fetch(named, FIRST, home)
    assert hub.weight_bytes < size_of(folder, FIRST) + 20_000, "headers aside"


def test_a_joiner_asks_peers_for_its_span_and_the_hub_for_nothing(folder: Path, home: Path, hub: FakeHub) -> None:
    peer = FromDisk("peer", folder)
    where, _ = fetch(joined(folder, home, [peer]), FIRST, home, [peer])
    check_holds(where, folder, FIRST)
    assert set(peer.asked) == {
        name for name in peer.asked if ".layers.0." in name or ".layers.1." in name or ".2." in name
    }
    assert hub.tokens == []


def test_the_hub_gives_what_peers_lack(folder: Path, home: Path, hub: FakeHub, tmp_path: Path) -> None:
    part, _ = split_model(folder, [FIRST, LAST], tmp_path / "parts")
    peer = FromDisk("peer", part)
    where, _ = fetch(joined(folder, home, [peer]), Span(0, 6), home, [peer])
    check_holds(where, folder, Span(0, 6))
    assert size_of(folder, LAST) <= hub.weight_bytes < size_of(folder, LAST) + 40_000


@pytest.mark.parametrize("twist, fault", [(after(8, vanish), "lost"), (lie, "garbage")], ids=["dies", "lies"])
def test_a_peer_that_dies_or_lies_is_blamed_and_the_hub_takes_over(
    folder: Path, home: Path, hub: FakeHub, twist: Twist, fault: str
) -> None:
    peer, blamed = FromDisk("peer", folder), list[Blame]()
    weights = joined(folder, home, [peer])
    where, _ = fetch(weights, FIRST, home, [replace_twist(peer, twist)], blamed)
    check_holds(where, folder, FIRST)
    assert [(blame.name, blame.fault) for blame in blamed] == [("peer", fault)]
    assert hub.weight_bytes > 0


def replace_twist(peer: FromDisk, twist: Twist) -> FromDisk:
    peer.twist = twist
    return peer


def test_a_swarm_with_a_hub_model_needs_no_hub(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for `join` nor for `up` with the hub id, while peers have it."""
    point_to("http://127.0.0.1:9", monkeypatch)
    peer = FromDisk("peer", folder)
    weights = up(REPO, home, served(folder), [peer])
    assert (weights.id, weights.hub) == (id_of(folder), REPO)
    where, _ = fetch(weights, LAST, home, [peer])
    check_holds(where, folder, LAST)


def test_without_hub_and_peers_it_is_said_who_was_asked(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(
        HubUnreachable, match=r"127.0.0.1:9 gives no usable answer for tests/tiny@main .*HF_ENDPOINT"
    ) as silent:
        up(REPO, home)
    assert silent.value.http_status == 503, "a service tries again (exit code 1); wrong options end it (2)"
    gone = FromDisk("peer", folder)
    weights = joined(folder, home, [gone])
    with pytest.raises(
        ShardUnavailable, match=r"no provider has .*, dropped: peer .* lost: closed by the peer.*127.0.0.1:9"
    ):
        fetch(weights, FIRST, home, [replace_twist(gone, vanish)])


def test_a_full_disk_is_said_before_anything_is_fetched(
    folder: Path, home: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = FromDisk("peer", folder)
    weights, named = joined(folder, home, [peer]), up(REPO, home)
    before = hub.weight_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1000))
    for source, providers in ((weights, [peer]), (named, [])):
        with pytest.raises(
            DiskFull, match=r"needs [\d.]+ kB, [\d.]+ kB more than are free; make room or set MANYHANDS_HOME"
        ):
            fetch(source, FIRST, home, providers)
    assert peer.asked == [] and hub.weight_bytes - before < 20_000


# -- once is enough ---------------------------------------------------------------------------------------------------


def test_what_the_hub_gave_is_not_asked_of_peers_after_a_restart(folder: Path, home: Path, hub: FakeHub) -> None:
    """The layers it had are the ones that it takes again if they help (place.choose_span), and they lie there."""
    first, _ = fetch(up(REPO, home), FIRST, home)
    sent, peer = hub.weight_bytes, FromDisk("peer", folder)
    for again in (up(REPO, home), up(REPO, home, served(folder), [peer])):
        assert (again.id, again.here) == (id_of(folder), FIRST)
        assert fetch(again, FIRST, home, [peer])[0] == first
    assert peer.asked == [] and hub.weight_bytes == sent


def test_what_peers_gave_is_not_asked_of_the_hub_after_a_restart(folder: Path, home: Path, hub: FakeHub) -> None:
    peer = FromDisk("peer", folder)
    first, _ = fetch(joined(folder, home, [peer]), FIRST, home, [peer])
    again = up(REPO, home, served(folder))
    sent = hub.weight_bytes
    assert again.here == FIRST and fetch(again, FIRST, home)[0] == first
    assert hub.weight_bytes == sent
    more, _ = fetch(again, Span(0, 5), home)
    check_holds(more, folder, Span(0, 5))
    assert more == first and hub.weight_bytes - sent < size_of(folder, Span(3, 5)) + 20_000


def test_more_layers_are_added_to_what_is_here(folder: Path, home: Path, hub: FakeHub) -> None:
    """From the hub first, then from a peer: the peer is asked for what is new."""
    fetch(up(REPO, home), FIRST, home)
    sent, peer = hub.weight_bytes, FromDisk("peer", folder)
    where, _ = fetch(up(REPO, home), Span(0, 6), home, [peer])
    check_holds(where, folder, Span(0, 6))
    assert hub.weight_bytes == sent
    assert set(peer.asked) <= set(needed_tensors([entry.name for entry in read_entries(folder)], 6, LAST, False))


def test_a_damaged_copy_here_is_blamed_and_fetched_anew(folder: Path, home: Path, hub: FakeHub) -> None:
    first, _ = fetch(up(REPO, home), FIRST, home)
    (entry,) = [e for e in read_entries(first) if e.name == "model.layers.1.mlp.up_proj.weight"]
    with (first / entry.file).open("r+b") as handle:
        handle.seek(entry.start)
        handle.write(b"\x55" * 8)
    peer, blamed = FromDisk("peer", folder), list[Blame]()
    where, _ = fetch(up(REPO, home), Span(0, 6), home, [peer], blamed)
    check_holds(where, folder, Span(0, 6))
    assert [(blame.name, blame.fault) for blame in blamed] == [(str(first), "garbage")]


def test_a_hub_that_is_down_does_not_stop_a_restart(
    folder: Path, home: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = fetch(up(REPO, home), FIRST, home)
    waits = list[float]()
    point_to("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr(time, "sleep", waits.append)
    again = up(REPO, home)
    assert fetch(again, FIRST, home)[0] == first and waits == []


def test_a_part_is_served_as_it_is_and_lacks_the_rest(folder: Path, home: Path, tmp_path: Path) -> None:
    part, _ = split_model(folder, [FIRST, LAST], tmp_path / "parts")
    weights = up(str(part), home)
    assert (weights.id, weights.here, weights.folder) == (id_of(folder), FIRST, None)
    assert fetch(weights, FIRST, home)[0] == part
    with pytest.raises(ShardUnavailable, match=r"no provider has tensor model\.layers\.[345].*0 peers"):
        fetch(weights, Span(0, 6), home)
    peer = FromDisk("peer", folder)
    where, _ = fetch(weights, Span(0, 6), home, [peer])
    check_holds(where, folder, Span(0, 6))
    assert not any(".layers.0." in name for name in peer.asked)


def test_a_member_that_comes_back_takes_the_layers_that_lie_here(folder: Path, home: Path) -> None:
    """Nothing is missing and the first layers would do as well; those on the disk cost no fetch."""

    async def scene() -> None:
        async with town(folder, home) as place:
            for index in range(2):
                await place.host(index)
            member = await place.open(2)
            (kind,) = kinds_of(member.records())
            peers = [provider_of(member, r) for r in member.records() if r.node != member.id]
            weights = await weights_in(kind, peers, home, Silent())
            await weights.fetch(Span(2, 5), home, peers, Silent(), with_ends=False)
            member.config = replace(member.config, memory_bytes=room_for(weights, 3))
            again = await weights_in(kind, peers, home, Silent())
            device = Device.start(1)
            place.stack.callback(device.close)
            hosting = Hosting(member, again, device, home, Silent(), place.said.append, with_ends=False)
            choice = await hosting.start()
            assert choice.span == Span(2, 5) and "on this machine's disk already" in choice.why

    run_virtual(scene())


def test_who_names_a_part_serves_what_it_holds(folder: Path, home: Path, tmp_path: Path) -> None:
    """`up` with a part that was carried to this machine, before another node is there."""
    _, part = split_model(folder, [FIRST, LAST], tmp_path / "parts")

    async def scene() -> None:
        async with town(part, home) as place:
            hosting = await place.host(0)
            assert hosting.choice == SpanChoice(LAST, "the folder holds these") and hosting.folder == part

    run_virtual(scene())


# -- other models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, text", [("chat_template.jinja", "{{ 'evil' }}"), ("generation_config.json", '{"eos_token_id": 7}')]
)
def test_another_tokenizer_under_the_same_name_is_refused_and_named(
    folder: Path, home: Path, tmp_path: Path, file: str, text: str
) -> None:
    mine = shutil.copytree(folder, tmp_path / "tiny")
    (mine / file).write_text(text)
    swarm = served(folder, name="tiny")
    with pytest.raises(WeightsMismatch, match=rf"another tiny: its {file} differs \({id_of(folder)[:12]} there, "):
        up(str(mine), home, swarm, [FromDisk("peer", folder)])
    with pytest.raises(WeightsMismatch, match="another tiny: its weights differ"):
        up(str(mine), home, swarm)


def test_another_precision_is_refused(folder: Path, home: Path) -> None:
    with pytest.raises(WeightsMismatch, match="serves tiny in fp32, not bf16: leave --dtype out"):
        asyncio.run(weights_of(str(folder), "bf16", served(folder, "fp32", "tiny"), home, Silent()))
    assert up(str(folder), home, served(folder, "fp32", "tiny")).precision == "fp32"


def test_a_corrupt_tensor_on_the_hub_is_named(folder: Path, home: Path, hub: FakeHub) -> None:
    entry = next(e for e in read_entries(folder) if e.name == "model.layers.1.mlp.up_proj.weight")
    hub.corrupt_at[entry.file] = (entry.start, 99)
    with pytest.raises(ModelError, match=r"tests/tiny: model\.safetensors arrived wrong twice: SHA-256 expected"):
        fetch(up(REPO, home), FIRST, home)
