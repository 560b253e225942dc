"""`plan`, `model inspect` and `doctor` on folders that hold what no writer of models leaves: one line each, within bounds."""

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperCommand

from manyhands.checkpoint import folder as folders
from manyhands.checkpoint.folder import INDEX, JOURNAL, MANIFEST, SINGLE, parse_index
from manyhands.cli import checks, rehearsal
from manyhands.cli import model as model_command
from manyhands.cli import plan as plan_command
from manyhands.errors import ManyhandsError, ModelError
from manyhands.place import kernels, measure
from manyhands.place.kernels import Kernels
from manyhands.place.measure import Overheads, Speed
from manyhands.testing.tiny import make_tiny
from tests.hostile.odd_files import circle, device, holes

MAX_GROWTH = 400 << 10  # KiB of this process, whatever a folder holds
NAMES = [
    "config.json",
    SINGLE,
    INDEX,
    MANIFEST,
    JOURNAL,
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("plan") / "tiny", layers=2, seed=8)


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(measure, "measure_speed", lambda _: Speed(0.01, 0.0001, 0.002, 0.0005, 1.0, 0.0, "layers"))
    monkeypatch.setattr(rehearsal, "rehearsed", lambda: Overheads(0.0, 0.0, 0.004))
    monkeypatch.setattr(kernels, "measure_kernels", lambda _, types: Kernels(dict.fromkeys(types, 1e-9), 1e-6))
    return shutil.copytree(model, tmp_path / "home" / "models" / "hostile")


def said(do: Callable[[], object]) -> str:
    """The one line that a command ends with; "" if it has an answer. Anything but a ManyhandsError would be a traceback."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        do()
        line = ""
    except ManyhandsError as error:
        line = str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH
    assert line.isprintable() and len(line) < 2000, line
    return line


def all_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What plan, inspect and doctor say of `folder`; "" for an answer."""
    context = typer.Context(TyperCommand("plan"))
    lines = [
        said(lambda: plan_command.plan(context, str(folder), memory="8GB", as_json=True)),
        said(lambda: model_command.inspect(str(folder), as_json=True)),
    ]
    answers = capsys.readouterr().out.splitlines()
    assert [bool(json.loads(answer)) for answer in answers] == [True] * lines.count("")
    found = list(checks.check_models(folder.parent.parent))
    assert len(found) == 1 and found[0].said.isprintable() and len(found[0].said) < 2000, found
    return [*lines, "" if found[0].level == "ok" else found[0].said]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 1_000_000)


def bytes_of_no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00\x1b[2J")


KINDS = [pipe, device, circle, Path.mkdir, holes, deep, bytes_of_no_text]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_file_is_every_command_says_one_line(
    folder: Path, name: str, kind: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to itself in place of a manifest or a journal was a traceback."""
    (folder / name).unlink(missing_ok=True)
    kind(folder / name)
    lines = all_said(folder, capsys)
    if name in ("config.json", SINGLE, MANIFEST, JOURNAL) and kind is not circle:
        assert all(lines[:2]), lines
    if name in (MANIFEST, JOURNAL):
        assert name in lines[0] and name in lines[2], lines


def test_a_model_without_a_tokenizer_can_be_looked_at(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert all_said(folder, capsys) == ["", "", ""]


ABSURD: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 4096},
    "many layers": {"num_hidden_layers": 10**9},
    "no layers": {"num_hidden_layers": None},
    "width": {"hidden_size": 1 << 17},
    "no heads": {"num_attention_heads": 0},
    "odd heads": {"num_key_value_heads": 3},
    "vocabulary": {"vocab_size": 1 << 22},
    "context": {"max_position_embeddings": 1 << 27},
    "family": {"model_type": "none\x1b[2J\n", "architectures": ["x"]},
    "no family": {"model_type": None, "architectures": None},
    "bits": {"quantization_config": {"quant_method": "awq", "bits": 10**9, "group_size": -1}},
    "groups": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}},
    "no object": {"quantization_config": "x"},
    "rope": {"rope_scaling": {"rope_type": "yarn", "factor": 1e6, "original_max_position_embeddings": 1 << 27}},
    "kinds": {"layer_types": ["full_attention"] * 99_000},
    "depth": {"a": [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]},
    "items": {"a": list(range(99_000))},
}


@pytest.mark.parametrize("name", ABSURD)
def test_whatever_a_config_says_every_command_says_one_line(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **ABSURD[name]}))
    all_said(folder, capsys)


def test_headers_that_claim_or_hold_much_say_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = b'{"a":[' + b"[]," * 2_200_000 + b"0]}"
    for length, raw in (
        (1 << 62, b"{}"),
        (len(lists), lists),
        (1_000_000, b"[" * 1_000_000),
        (1_000_000, b" " * 1_000_000),
    ):
        (folder / SINGLE).write_bytes(length.to_bytes(8, "little") + raw)
        assert all(all_said(folder, capsys))


def test_an_index_of_many_files_is_refused_before_any_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name was checked, and looked for on the disk: a minute for the largest."""
    monkeypatch.setattr(folders, "MAX_FILES", 100)
    names = {f"t{number}": f"f{number % 101}.safetensors" for number in range(300)}
    raw = json.dumps({"weight_map": names}).encode()
    monkeypatch.setattr(folders, "check_file_name", lambda _: pytest.fail("a name was checked"))
    with pytest.raises(ModelError, match="it names 101 files of weights; at most 100 are read"):
        parse_index(raw)
