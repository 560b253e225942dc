"""--device: what it may name, what is missing in one line, what doctor lists, and a swarm of processes on torch-cpu."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli import app, checks
from manyhands.engine.devices import FORCED, named_device, use
from manyhands.errors import BadRequest, ManyhandsError, ModelError
from manyhands.worker import torch_program

COMMANDS = {
    "serve": ["serve", "tales", "--layers", "0-5"],
    "local": ["local", "tales", "-p", "x"],
    "up": ["up", "tales", "--api", "off", "--scope", "off"],
    "infer": ["infer", "tales", "-p", "x", "--ticket", "mh1x"],
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.setenv(FORCED, "")  # so that what a command sets is taken back
    monkeypatch.chdir(tmp_path)
    torch_program.open_device.cache_clear()
    yield tmp_path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_program, "_count", lambda kind: int(kind == "torch-cpu"))


def error_of(*words: str) -> ManyhandsError:
    with pytest.raises(ManyhandsError) as failed:
        CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert "\n" not in str(failed.value)
    return failed.value


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_computes_refuses_what_is_not_there(command: str, no_gpu: None) -> None:
    """Before anything is read or fetched: a name that is none, and a device that this machine lacks."""
    for name in ("gpu", "cuda:", "cuda:1000", "torch", "cpu:0", "CUDA"):
        assert "it is one of cpu, cuda[:N], torch-cpu, mps or xpu[:N]" in str(
            error_of(*COMMANDS[command], "--device", name)
        )
    os.environ[FORCED] = ""
    said = error_of(*COMMANDS[command], "--device", "mps")
    assert isinstance(said, ModelError) and "finds torch-cpu on this machine" in str(said)
    os.environ[FORCED] = ""
    said = error_of(*COMMANDS[command], "--device", "cuda")  # NVIDIA's packages, its driver, or the GPU is missing
    assert isinstance(said, ModelError) and re.search(r"manyhands\[cuda\]|no driver|has no NVIDIA GPU", str(said))


def test_a_file_may_name_the_device(home: Path, no_gpu: None) -> None:
    (home / "manyhands.toml").write_text('[node]\ndevice = "xpu:1"\n')
    assert "--device xpu:1: torch" in str(error_of(*COMMANDS["serve"]))


def test_a_device_and_a_back_end_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCED, "avx2")
    use("cpu")
    with pytest.raises(BadRequest, match="--device cuda and MANYHANDS_ENGINE=avx2 name two back ends"):
        use("cuda")
    assert named_device() is None
    monkeypatch.setenv(FORCED, "mps")
    use("mps")
    use("cpu")  # the default says nothing
    assert named_device() == "mps"


def test_doctor_lists_the_devices_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu = torch_program.Here("xpu:0", "Some GPU", 23_000_000_000), torch_program.Here("xpu:1", "Another", None)
    monkeypatch.setattr(torch_program, "devices_here", lambda: [torch_program.Here("torch-cpu", "CPU", None), *xpu])
    device, _, torch = list(checks.check_device(2, 0.0))
    assert device.level == "ok" and "the native engine" in device.said
    assert "torch-cpu, xpu:0 (Some GPU, 23 GB free), xpu:1 (Another, free memory unknown: give --memory)" in torch.said
    assert "no mps and no xpu has been tried" in torch.said
    monkeypatch.setenv(FORCED, "torch-cpu")
    assert "torch-cpu computes in torch, in class E2" in next(iter(checks.check_device(2, 0.0))).said
    monkeypatch.setenv(FORCED, "xpu:5")
    monkeypatch.setattr(torch_program, "_count", lambda kind: 1)
    assert [check.level for check in checks.check_device(2, 0.0)] == ["ok", "ok", "ok", "fail"]


def test_a_machine_without_torch_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'manyhands[torch]'" in list(checks.check_device(2, 0.0))[2].said


@pytest.mark.nightly
def test_three_processes_on_torch_answer_although_one_is_killed() -> None:
    """Over TLS on loopback, with a spare, as a person runs it."""
    words = ["local", "tales", "-p", "Once upon a time", "-n", "24", "--nodes", "3", "--spares", "1", "--json"]
    found = CliRunner().invoke(app, [*words, "--kill", "1@8", "--device", "torch-cpu", "--threads", "1"])
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout.splitlines()[-1])
    assert answer["exactness"] == "E2" and len(answer["repairs"]) == 1 and len(answer["token_ids"]) == 24
    assert all(hop["arithmetic"].endswith("/torch-cpu/rows-mix") for hop in answer["route"])
