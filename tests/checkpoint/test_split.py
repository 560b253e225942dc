"""Parts of a model that stand alone and know what they are part of."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from manyhands.checkpoint import split as split_module
from manyhands.checkpoint.folder import MANIFEST, SINGLE, read_entries
from manyhands.checkpoint.manifest import VERSION, build_manifest
from manyhands.checkpoint.split import split_model
from manyhands.core import Span, parse_cut
from manyhands.errors import BadRequest, CutError, DiskFull, ModelError

CUT = parse_cut("0-1,2-3,4-5", 6)


def names_of(folder: Path) -> set[str]:
    return {entry.name for entry in read_entries(folder)}


@pytest.mark.parametrize("kind", ["llama", "sharded", "tied"])
def test_parts_stand_alone_and_keep_the_id(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source = request.getfixturevalue(kind)
    parts = split_model(source, CUT, tmp_path / "out")
    assert [part.name for part in parts] == ["00-first-0-1", "01-inner-2-3", "02-last-4-5"]
    for part in parts:
        assert build_manifest(part).id == build_manifest(source).id
        assert (part / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
        assert (part / "chat_template.jinja").exists()
        assert not list(part.glob("*.index.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]


def test_parts_hold_what_their_place_needs(llama: Path, tied: Path, tmp_path: Path) -> None:
    first, inner, last = map(names_of, split_model(llama, CUT, tmp_path / "out"))
    assert "model.embed_tokens.weight" in first and "lm_head.weight" not in first
    assert {"model.norm.weight", "lm_head.weight"} <= last and "model.embed_tokens.weight" not in last
    assert all(".layers.2." in name or ".layers.3." in name for name in inner)
    assert first | inner | last == names_of(llama)
    assert len(first) + len(inner) + len(last) == len(names_of(llama))
    tied_last = names_of(split_model(tied, CUT, tmp_path / "tied")[2])
    assert {"model.norm.weight", "model.embed_tokens.weight"} <= tied_last


def test_tensors_are_the_same_bits(llama: Path, tmp_path: Path) -> None:
    whole = load_file(llama / SINGLE)
    for part in split_model(llama, CUT, tmp_path / "out"):
        for name, tensor in load_file(part / SINGLE).items():
            assert torch.equal(tensor.view(torch.int16), whole[name].view(torch.int16))
        with safe_open(part / SINGLE, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}


def test_one_part_is_the_whole(tied: Path, tmp_path: Path) -> None:
    (part,) = split_model(tied, [Span(0, 6)], tmp_path / "out")
    assert part.name == "00-whole-0-5"
    assert names_of(part) == names_of(tied)


def test_existing_folder_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BadRequest, match="exists already"):
        split_model(llama, CUT, tmp_path / "out")


def test_cut_must_cover_the_model(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CutError, match="no node holds"):
        split_model(llama, CUT[:2], tmp_path / "out")


def test_a_part_cannot_be_split(llama: Path, tmp_path: Path) -> None:
    part = split_model(llama, CUT, tmp_path / "out")[1]
    with pytest.raises(ModelError, match="holds a part of its model only"):
        split_model(part, CUT, tmp_path / "again")


def test_failure_leaves_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(split_module, "tensor_blocks", full)
    with pytest.raises(DiskFull, match="the disk is full"):
        split_model(llama, CUT, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_corrupt_part_is_noticed(llama: Path, tmp_path: Path) -> None:
    part = split_model(llama, CUT, tmp_path / "out")[1]
    victim = read_entries(part)[0]
    with (part / SINGLE).open("r+b") as handle:
        handle.seek(victim.start)
        handle.write(b"\x55" * 8)
    with pytest.raises(ModelError, match=f"{victim.name} is damaged"):
        build_manifest(part)


def test_part_of_another_model_is_noticed(llama: Path, tied: Path, tmp_path: Path) -> None:
    part = split_model(llama, CUT, tmp_path / "out")[1]
    (part / MANIFEST).write_bytes(build_manifest(tied).encode())
    with pytest.raises(ModelError, match=r"config.json is not the one"):
        build_manifest(part)
    assert json.loads((part / MANIFEST).read_bytes())["manyhands"] == VERSION
