"""Quantised models in a swarm: three nodes, of which one fetches its layers from the others, give one node's text."""

import asyncio
from pathlib import Path

import pytest

from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.manifest import Silent
from manyhands.checkpoint.partition import layer_of
from manyhands.core import Precision, SamplingParams
from manyhands.member.hosting import Hosting
from manyhands.member.providers import provider_of
from manyhands.member.weights import kinds_of, weights_in, weights_of
from manyhands.testing.clock import run_virtual
from manyhands.worker.execute import Device
from tests.gguf_files import tiny_gguf
from tests.gguf_parts import split_gguf
from tests.member.members import room_for, spans, town
from tests.quantised_cases import CASES
from tests.quantised_files import quantised_tiny

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = tuple(range(3, 40))


async def alone(folder: Path, home: Path, precision: Precision) -> list[int]:
    async with town(folder, home, precision) as place:
        origin = place.origin((await place.host(0)).member)
        return (await origin.complete(origin.request_ids(PROMPT, PARAMS))).token_ids


async def three(folder: Path, home: Path, precision: Precision) -> list[int]:
    """The third knows records only, and gets the last two layers from the first."""
    async with town(folder, home, precision) as place:
        weights = await weights_of(str(folder), precision, (), home, Silent())
        first = (await place.host(0, memory_bytes=room_for(weights, 2))).member
        await place.host(1, memory_bytes=room_for(weights, 2))
        member = await place.open(2, memory_bytes=room_for(weights, 2))
        (kind,) = kinds_of(member.records())
        holders = [provider_of(member, record) for record in member.records() if record.node != member.id]
        device = Device.start(1)
        place.stack.callback(device.close)
        joined = await weights_in(kind, holders, home, Silent())
        await Hosting(member, joined, device, home, Silent(), place.said.append, with_ends=False).start()
        while spans(first) != {"n0": ["0-1"], "n1": ["2-3"], "n2": ["4-5"]}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        fetched = read_entries(home / "models" / kind.model)
        whole = [entry for entry in read_entries(folder) if layer_of(entry.name) in (4, 5)]
        assert {entry.name for entry in fetched} == {entry.name for entry in whole}
        origin = place.origin(first)
        return (await origin.complete(origin.request_ids(PROMPT, PARAMS))).token_ids


@pytest.mark.parametrize("name", ["awq", "gptq", "int4 zeros"])
def test_three_nodes_write_what_one_writes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    config, pack, _, facts = CASES[name]
    folder, _ = quantised_tiny(tmp_path / "q", config, pack, layers=6, **facts)
    assert run_virtual(asyncio.wait_for(three(folder, tmp_path, "w4"), 60)) == run_virtual(
        alone(folder, tmp_path, "w4")
    )


def test_three_nodes_with_a_gguf_model_in_parts_write_what_one_with_the_one_file_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    file, _ = tiny_gguf("llama", tmp_path / "tiny.gguf", "Q4_0")
    parts = split_gguf(file, tmp_path / "parts", (0, 20, 33))
    one, several = (gguf_folder(path, tmp_path) for path in (file, parts[0]))
    assert run_virtual(asyncio.wait_for(three(several, tmp_path, "w4"), 60)) == run_virtual(alone(one, tmp_path, "w4"))


def test_in_fp32_the_text_is_that_of_the_unquantised_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    config, pack, _, facts = CASES["awq"]
    folder, plain = quantised_tiny(tmp_path / "q", config, pack, layers=4, **facts)
    assert run_virtual(alone(folder, tmp_path, "fp32")) == run_virtual(alone(plain, tmp_path, "fp32"))
