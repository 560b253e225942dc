"""`manyhands model` as a person runs it."""

import errno
import json
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError
from typer.testing import CliRunner

from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.folder import SINGLE
from manyhands.checkpoint.manifest import build_manifest
from manyhands.cli import app as cli
from manyhands.cli import lines, model
from manyhands.cli.model import app
from manyhands.core import Precision
from manyhands.errors import BadRequest, DiskFull, ModelError
from manyhands.place import kernels, measure
from manyhands.place.kernels import Kernels
from manyhands.place.measure import Speed
from manyhands.place.shape import look_up
from manyhands.testing.tiny import make_tiny
from manyhands.worker.runner import describe
from tests.gguf_files import tiny_gguf


def run(*arguments: str) -> str:
    """Standard output of the command; errors are raised as they are."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure_kernels", lambda _, types: Kernels(dict.fromkeys(types, 1e-9), 1e-6))


def test_inspect_says_what_a_model_is(tied: Path) -> None:
    facts = json.loads(run("inspect", str(tied), "--json"))
    assert (facts["family"], facts["num_layers"], facts["tied"]) == ("qwen2", 6, True)
    assert facts["model_id"] == build_manifest(tied).id
    assert facts["bytes"]["fp32"] == facts["bytes"]["bf16"], "matrices of 16 bits stay as they are stored"
    assert facts["bytes"]["w8"]["total"] < facts["bytes"]["bf16"]["total"]
    assert facts["tokens_per_s"]["w4"] > facts["tokens_per_s"]["fp32"] > 0


def test_the_context_told_is_the_context_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rope holds a model to fewer positions than its config.json states."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    folder = make_tiny("llama", tmp_path / "llama", rope_parameters=rope)
    assert read_facts(folder).context == 1024
    assert describe(folder, "bf16").context_length == 256
    assert json.loads(run("inspect", str(folder), "--json"))["context"] == 256
    assert look_up(str(folder), "bf16", tmp_path / "home").shape.context == 256


def test_inspect_shows_a_table(llama: Path) -> None:
    shown = run("inspect", str(llama))
    assert "LlamaForCausalLM" in shown and "smallest layer" in shown
    assert build_manifest(llama).id[:60] in shown


def test_inspect_fits_a_narrow_terminal(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lines, model):
        monkeypatch.setattr(module, "width_of", lambda out: 40)
    shown = run("inspect", str(llama)).splitlines()
    assert [line for line in shown if len(line) > 40 and len(line.split()) > 2] == []
    below = " ".join(" ".join(shown).partition("held as")[2].split())
    assert below.startswith("smallest layer largest layer bf16 ") and "embedding and head" in below.partition("w8")[0]


def test_what_inspect_says_is_stored_is_on_disk(llama: Path) -> None:
    """In memory vectors take four bytes a number."""
    facts = json.loads(run("inspect", str(llama), "--json"))
    header = int.from_bytes((llama / SINGLE).read_bytes()[:8], "little")
    stored = (llama / SINGLE).stat().st_size - header - 8
    assert facts["stored"] == {"BF16": stored} and stored < facts["bytes"]["bf16"]["total"] < 1.1 * stored


def test_inspect_and_plan_tell_bytes_and_speed_of_a_gguf_file_at_each_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At w8 and w4 blocks are as they are stored: the same bytes and speed; bf16 and fp32 hold more."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(measure, "measure_speed", lambda _: Speed(0.01, 0.0001, 0.002, 0.0005, 1.0, 0.0, "layers"))
    monkeypatch.setattr("manyhands.cli.rehearsal.rehearsed", measure.Overheads)
    file, _ = tiny_gguf("llama", tmp_path / "tiny.gguf", "Q4_1")
    facts = json.loads(run("inspect", str(file), "--json"))
    totals = {name: each["total"] for name, each in facts["bytes"].items()}
    assert totals["w4"] == totals["w8"] < totals["bf16"] / 3 < totals["fp32"] / 5
    assert facts["stored"]["Q4_1"] * 0.99 < totals["w4"] < facts["stored"]["Q4_1"] * 1.1
    assert facts["tokens_per_s"]["w4"] == facts["tokens_per_s"]["w8"] > facts["tokens_per_s"]["bf16"]
    planned = CliRunner().invoke(cli, ["plan", str(file), "--json"], catch_exceptions=False)
    told = {each["precision"]: each["tokens_per_s"] for each in json.loads(planned.stdout)["precisions"]}
    scaled = {name: facts["tokens_per_s"][name] * told["bf16"] / facts["tokens_per_s"]["bf16"] for name in told}
    assert told == pytest.approx(scaled, rel=1e-3)  # plan has measured the model at one precision, inspect at none


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("precision", ["w8", "w4"])
def test_inspect_counts_what_nodes_load(family: str, precision: Precision, tmp_path: Path) -> None:
    """Routers and latent attention's matrices are not rounded: plan and inspect agree on that."""
    folder = make_tiny(family, tmp_path / family)
    inspected = json.loads(run("inspect", str(folder), "--json"))["bytes"][precision]
    shape = look_up(str(folder), precision, tmp_path / "home").shape
    found = min(shape.layer_bytes), max(shape.layer_bytes), shape.ends_bytes
    assert (inspected["layer_min"], inspected["layer_max"], inspected["ends"]) == found
    assert inspected["total"] == sum(shape.layer_bytes) + shape.ends_bytes


@pytest.mark.parametrize("how", [("--cut", "0-2,3-5"), ("--nodes", "2")])
def test_split_lists_the_parts(llama: Path, tmp_path: Path, how: tuple[str, str]) -> None:
    out = tmp_path / "out"
    assert run("split", str(llama), str(out), *how).split() == [str(out / "00-first-0-2"), str(out / "01-last-3-5")]


def test_split_needs_one_way_to_cut(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="either --cut"):
        run("split", str(llama), str(tmp_path / "out"))


def test_tiny_makes_a_model(tmp_path: Path) -> None:
    out = tmp_path / "x"
    assert run("tiny", "--family", "qwen3", "--layers", "3", "--shard-mb", "0.1", str(out)).strip() == str(out)
    assert json.loads(run("inspect", str(out), "--json"))["num_layers"] == 3
    with pytest.raises(BadRequest, match="exists already"):
        run("tiny", str(out))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_tiny_model_that_could_not_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(family: str, out: Path, **_: object) -> None:
        out.mkdir()
        raise error

    monkeypatch.setattr("manyhands.testing.tiny.make_tiny", fail)
    with pytest.raises(DiskFull, match=f"{tmp_path / 'x'} cannot be written .No space left on device.: make room"):
        run("tiny", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_unknown_model_is_one_clear_error() -> None:
    with pytest.raises(ModelError, match="no folder or GGUF file here"):
        run("inspect", "nonsense")


def test_what_a_tiny_model_needs_is_installed_by_what_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra `torch`, which was named, has no transformers: the refusal was the same after it."""
    monkeypatch.delitem(sys.modules, "manyhands.testing.tiny", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"torch, transformers and safetensors .* -m pip install 'manyhands\[test\]'"):
        run("tiny", str(tmp_path / "tiny"))
