"""What is wrong is said in one line before anything else is: before a swarm is founded, and before "serving"."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli import app
from manyhands.errors import ManyhandsError, ModelError
from tests.waiting import GUARD_S

HERE = ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0"]


def without(*patterns: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return spoil


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")


def adapter(folder: Path) -> None:
    without("*")(folder)
    (folder / "adapter_config.json").write_text("{}")


def refused(words: list[str]) -> ManyhandsError:
    """What a command ends with that says nothing on stdout."""
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, ManyhandsError), found.output
    assert found.stdout == ""
    return found.exception


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without("tokenizer*"), "no tokenizer in"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot read the tokenizer in"),
        (without("*.safetensors"), "holds no weights"),
        (pointer, "model.safetensors is a pointer of Git LFS and no weights: `git lfs pull`"),
        (adapter, r"holds an adapter \(LoRA\) and no model: merge it"),
    ],
)
@pytest.mark.parametrize("command", [["up"], ["serve", "--layers", "0-1"]])
def test_a_checkpoint_that_cannot_be_asked_is_refused_before_a_swarm_is_founded(
    command: list[str], spoil: Callable[[Path], None], said: str, llama: Path, tmp_path: Path, home: Path
) -> None:
    """`up` and `serve --api` said that they serve, and then that there is no tokenizer."""
    folder = Path(shutil.copytree(llama, tmp_path / "copy"))
    spoil(folder)
    error = refused([*command, str(folder), *HERE])
    assert isinstance(error, ModelError)
    with pytest.raises(ModelError, match=said):
        raise error
    assert not (home / "swarm.ticket").exists()


@pytest.mark.parametrize("command", [["up", "tales"], ["serve", "tales", "--layers", "0-1"], ["local", "tales"]])
def test_what_would_watch_the_api_is_looked_for_before_anything_is_loaded(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    for file in (tmp_path, tmp_path / "text"):
        assert "cannot keep jobs in" in str(refused([*command, "--api", "127.0.0.1:0", "--job-file", str(file)]))
    assert re.search("trace exporter|SDK", str(refused([*command, "--api", "127.0.0.1:0", "--trace", "nothing"])))
    assert (tmp_path / "text").read_text() == "no database " * 100


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Tales", "did you mean tales?"),
        ("smolm2", "did you mean smollm2?"),
        ("./tales-copy", "there is no './tales-copy' in /"),
        ("tales.gguf", "there is no 'tales.gguf' in /"),
        (__file__, "is a file, and no GGUF file: name the folder of the checkpoint"),
    ],
)
def test_a_slip_in_a_models_name_is_pointed_out(name: str, said: str) -> None:
    assert said in str(refused(["up", name]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "a\x1b[31mb"], "cannot name a node: 1 to 64 printable characters without a slash"),
        (["--name", "n" * 65], "cannot name a node"),
        (["--max-sessions", "9" * 30], "it must be at most 4294967295"),
    ],
)
def test_serve_refuses_what_no_node_can_have_before_it_loads(words: list[str], said: str, home: Path) -> None:
    """It said that it serves, and its first peer refused its Hello."""
    assert said in str(refused(["serve", "tales", "--layers", "0-1", *words]))
    assert not home.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "tales", "--add", "laptop"], "'laptop' describes no machine"),
        (["plan", "tales", "--memory", "5XB"], "memory '5XB' is not a size"),
        (["up", "tales", "--memory", "much"], "memory 'much' is not a size"),
        (["up", "tales", "--layers", "all"], "layers 'all' are not of the form 0-7"),
        (["join", "--code", "abc-def", "--listen", "7700"], "--listen: address '7700' is not of the form host:port"),
        (["join", "--code", "abc-def", "--api", "8000"], "--api: address '8000' is not of the form host:port"),
        (["infer", "-p", "K\udcf6nig"], "character 2 of the text is not valid utf-8: set the terminal to UTF-8"),
        (["plan", "tales", "--force"], "--force goes with --apply"),
        (["local", "tales", "-p", "hi", "--kill", "2@5"], "--kill: there is no hop 2; hops are 0 to 1"),
        (["local", "tales", "-p", "hi", "--cut", "0-3,4-7,8-11", "--drain", "3@5"], "hops are 0 to 2"),
        (["benchmark", "--api", "here"], "--api is 'here'; it is of the form"),
        (
            ["status", "--api", "http://127.0.0.1:1", "--api-key", "mhk_a\nb"],
            "--api-key holds characters that no key has",
        ),
        (["key", "add", "ann", "--model", ""], "--model is empty"),
    ],
)
def test_what_is_wrong_is_said_before_work_begins(words: list[str], said: str, home: Path) -> None:
    """Before a machine is measured, nodes are loaded, a gateway is asked, or a key is written."""
    assert said in str(refused(words))
    assert not home.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["benchmark", "-n", "9" * 30],
        ["model", "split", "tales", "out", "--nodes", "0"],
        ["model", "tiny", "out", "--shard-mb", "9" * 400],
        ["model", "tiny", "out", "--shard-mb", "-1"],
    ],
)
def test_a_number_that_an_option_cannot_have_is_refused_by_it(words: list[str]) -> None:
    """Two ended in a traceback, `--nodes 0` cut into one part."""
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2 and "Invalid value for '" in found.output and words[-2] in found.output


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_the_parent_closed_harms_nothing(closed: str, home: Path) -> None:
    """The event loop's library aborted the process: its first descriptor had the number of a standard stream."""
    command = f"{sys.executable} -m manyhands local tales --nodes 1 -p Once -n 2 {closed}"
    found = subprocess.run(["sh", "-c", command], capture_output=True, check=False, timeout=GUARD_S)
    assert found.returncode == 0, found.stderr
    assert (b"upon a" in found.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_a_code_in_the_place_of_a_ticket_is_known_as_one(home: Path) -> None:
    for code in ("K7W-4QX", "k7w 4qx"):
        error = refused(["join", code])
        assert "that is a code, no ticket: manyhands join --code" in str(error)
    assert "this is not a ticket" in str(refused(["join", "desk"]))
