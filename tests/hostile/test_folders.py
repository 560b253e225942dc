"""Folders of models that hold what no writer of models leaves: pipes, devices, files of holes, names that are no names."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from manyhands.checkpoint.folder import INDEX, JOURNAL, MANIFEST, SINGLE, check_file_name, parse_index
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.header import MAX_COMMAS, MAX_NAME, MAX_SIZES, parse_header
from manyhands.checkpoint.manifest import Manifest, build_manifest
from manyhands.checkpoint.plain_file import MAX_SMALL_BYTES, MAX_TABLE_BYTES
from manyhands.core import Span
from manyhands.errors import ModelError
from manyhands.testing.tiny import make_tiny
from manyhands.text.generation_config import load_eos_ids
from manyhands.text.tokenizer import load_tokenizer
from manyhands.worker.runner import describe, load_span
from tests.hostile.test_configs import refusal
from tests.quantised_files import mxfp4_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("folders") / "tiny", layers=2, seed=8)


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return shutil.copytree(model, tmp_path / "model")


def use(folder: Path) -> None:
    """All that a node reads of a folder."""
    build_manifest(folder)
    describe(folder, "bf16")
    tokenizer = load_tokenizer(folder)
    load_eos_ids(folder, tokenizer)


# -- what is no file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", SINGLE, INDEX, MANIFEST, JOURNAL])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_neither_waited_for_nor_read(folder: Path, name: str, kind: str) -> None:
    """To open a named pipe is to wait for who writes to it; /dev/zero has no end, and says that it has 0 bytes."""
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert name in refusal(lambda: use(folder))


def test_a_pipe_is_no_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    assert "no plain file" in refusal(lambda: gguf_folder(tmp_path / "x.gguf", tmp_path))


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("tokenizer.json", MAX_SMALL_BYTES),
        ("vocab.txt", MAX_SMALL_BYTES),
        ("generation_config.json", MAX_SMALL_BYTES),
        (INDEX, MAX_TABLE_BYTES),
        (MANIFEST, MAX_TABLE_BYTES),
    ],
)
def test_a_file_of_holes_is_refused_by_its_size(folder: Path, name: str, limit: int) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)
    text = refusal(lambda: build_manifest(folder))
    assert name in text and str(1 << 40) in text and str(limit) in text


def test_generation_config_is_held_to_the_limit_of_configs(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    (folder / "generation_config.json").write_bytes(b" " * (5 << 20) + b"{}")
    assert "the limit is" in refusal(lambda: load_eos_ids(folder, tokenizer))
    (folder / "generation_config.json").write_bytes(b"[" * 100_000)
    assert "not JSON" in refusal(lambda: load_eos_ids(folder, tokenizer))


# -- names ----------------------------------------------------------------------------------------------------------------

NAMES = ["a\nb", "\x1b[2Jx", "\u202ex", "\ud800", "x" * (MAX_NAME + 1), f"model.layers.{'9' * 5000}.x"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:12])
def test_a_name_that_cannot_stand_in_a_line_is_refused(name: str) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    raw = json.dumps({name: entry}).encode()
    row = [name, "F32", [1], "0" * 64]
    manifest = json.dumps({"manyhands": 2, "config": "0" * 64, "files": {}, "tensors": [row]}).encode()
    index = json.dumps({"weight_map": {name: "x.safetensors"}}).encode()
    for read in (
        lambda: parse_header(raw, "x.safetensors", 12 + len(raw)),
        lambda: Manifest.decode(manifest),
        lambda: parse_index(index),
    ):
        assert refusal(read).isprintable()


@pytest.mark.parametrize("name", ["a\nb", "\ud800", "x" * 256, "é" * 128, "a/" * 127 + "bb"])
def test_a_file_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="not a plain relative path of at most 255 bytes"):
        check_file_name(name)
    assert check_file_name("x" * 255)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [1] * (MAX_SIZES + 1)),
        ("shape", ["x" * 10_000]),
        ("dtype", "F" * 10_000),
        ("data_offsets", "x" * 10_000),
    ],
)
def test_what_is_said_of_a_tensor_stays_short(key: str, value: object) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], key: value}
    raw = json.dumps({"a": entry}).encode()
    refusal(lambda: parse_header(raw, "x.safetensors", 12 + len(raw)))


def test_the_sizes_of_a_manifest_are_those_of_tensors() -> None:
    def decode(shape: object) -> Manifest:
        rows = [["a", "F32", shape, "0" * 64]]
        body: dict[str, Any] = {"manyhands": 2, "config": "0" * 64, "files": {}, "tensors": rows}
        return Manifest.decode(json.dumps(body).encode())

    for shape in ([1] * (MAX_SIZES + 1), [1 << 62], [-1], [True], {"1": 1}, "11"):
        refusal(lambda: decode(shape))  # noqa: B023
    assert decode([1] * MAX_SIZES).tensors
    raw = json.dumps({"manyhands": "\n" * 1000, "config": "", "files": {}, "tensors": []}).encode()
    refusal(lambda: Manifest.decode(raw))


def test_an_index_of_many_values_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = b'{"weight_map":[' + b"[]," * (MAX_COMMAS + 1) + b"0]}"
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    assert "commas" in refusal(lambda: parse_index(bomb))


# -- quantised ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".embed_tokens_blocks", "model.layers.0.q_proj_blocks"])
def test_blocks_of_what_are_no_experts_are_not_read(name: str, tmp_path: Path) -> None:
    """They were taken for those of the expert "self_attn"."""
    folder, _ = mxfp4_tiny(tmp_path / "mxfp4", layers=2)
    before = load_span(folder, Span(0, 2), "fp32", 1)
    tensors = load_file(folder / SINGLE)
    save_file({**tensors, name: np.zeros((2, 2, 2, 16), np.uint8)}, folder / SINGLE, {"format": "pt"})
    assert load_span(folder, Span(0, 2), "fp32", 1).bytes_per_token == before.bytes_per_token
