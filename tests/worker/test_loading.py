"""How far a load is: all its bytes are told, once, whether matrices are packed now or lie here packed."""

import asyncio
from pathlib import Path
from threading import Event

import pytest

from manyhands import tales
from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.manifest import build_manifest
from manyhands.checkpoint.partition import layer_of
from manyhands.core import Precision, Span
from manyhands.worker.execute import Device
from manyhands.worker.loading import LoadBar, Loading
from manyhands.worker.runner import load_ends, load_span
from tests.waiting import GUARD_S

SPAN = Span(1, 4)


class Heard:
    """A HashProgress that keeps what it is told."""

    def __init__(self) -> None:
        self.text, self.total, self.num_done = "", -1, 0
        self.amounts: list[int] = []

    def start(self, name: str, total: int) -> None:
        self.text, self.total = name, total
        self.amounts.clear()

    def advance(self, amount: int) -> None:
        self.amounts.append(amount)
        assert 0 < amount and sum(self.amounts) <= self.total

    def done(self) -> None:
        self.num_done += 1


def bytes_of(folder: Path, layers: range) -> int:
    return sum(len(entry) for entry in read_entries(folder) if layer_of(entry.name) in layers)


@pytest.mark.parametrize("precision", ["bf16", "w8"])
def test_a_span_tells_all_of_its_bytes(precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of w8 the second load takes what the first has packed, and reads no tensor."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    folder, heard = tales.model_path(), Heard()
    manifest = build_manifest(folder)
    for count in (1, 2):
        load_span(folder, SPAN, precision, 1, manifest, Loading(heard, "tales"))
        assert heard.text == "loading tales, layers 1-3"
        assert sum(heard.amounts) == heard.total == bytes_of(folder, range(1, 4)) > 0
        assert heard.num_done == count and len(heard.amounts) >= len(SPAN)


def test_the_ends_tell_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    folder, heard = tales.model_path(), Heard()
    load_ends(folder, "bf16", 1, build_manifest(folder), loading=Loading(heard, "tales"))
    assert heard.text == "loading embedding and head of tales"
    assert (
        sum(heard.amounts)
        == heard.total
        == bytes_of(folder, range(0))
        + sum(len(entry) for entry in read_entries(folder) if layer_of(entry.name) is None)
    )
    load_ends(folder, "bf16", 1, head=False, loading=Loading(heard, "tales"))
    assert heard.text == "loading embedding of tales"


def test_parts_that_are_skipped_count_when_the_next_begins() -> None:
    heard = Heard()
    bar = LoadBar(heard, "x", [10, 20, 30])
    bar.begin_part()
    bar.read(4)
    bar.read(400)  # a fused matrix that is read for each of its parts does not run ahead of its layer
    assert sum(heard.amounts) == 10
    bar.begin_part()
    bar.begin_part()
    assert sum(heard.amounts) == 30
    bar.end()
    assert sum(heard.amounts) == 60 and heard.num_done == 1


class Closing(Heard):
    """Waits, when it is first told how far the load is, until the device is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.told_to_end = Event(), Event()

    def advance(self, amount: int) -> None:
        super().advance(amount)
        self.began.set()
        self.told_to_end.wait(GUARD_S)


@pytest.mark.parametrize("with_device", [True, False])
@pytest.mark.parametrize("what", ["bf16", "w8", "hashes"])
def test_a_load_ends_with_its_device_or_when_it_is_cancelled(
    what: str, with_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing a large model takes minutes, for which Ctrl-C would wait; so does hashing it. Nothing of a half is kept."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    folder, heard = tales.model_path(), Closing()

    def load(heard: Heard) -> None:
        if what == "hashes":
            Loading(heard, "tales").manifest(folder)
        else:
            load_span(folder, SPAN, "w8" if what == "w8" else "bf16", 1, manifest, Loading(heard, "tales"))

    manifest = build_manifest(folder, home=tmp_path / "elsewhere")

    async def main() -> None:
        device = Device.start(1)
        job = device.run(lambda: load(heard))
        assert await asyncio.to_thread(heard.began.wait, GUARD_S)
        if with_device:
            device.thread.shutdown(wait=False)
        else:
            job.cancel()
        heard.told_to_end.set()
        if not with_device:
            await device.run(lambda: None)
        device.close()
        await asyncio.wait([job])
        assert job.cancelled()

    asyncio.run(main())
    assert len(heard.amounts) == 1 and heard.num_done == 0
    again = Heard()
    load(again)
    assert sum(again.amounts) == again.total and again.num_done == 1
