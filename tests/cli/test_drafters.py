"""manyhands.cli.drafters: which small model drafts, by the model's own config.json; what it names is not trusted."""

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.torch import load_file, save_file

from manyhands import tales
from manyhands.checkpoint.header import read_header
from manyhands.cli.drafters import MAX_NAME, drafter_name, find_drafter, load_drafter
from manyhands.errors import BadRequest, ManyhandsError, ModelError
from manyhands.origin import OriginModel
from manyhands.origin.draft_model import DraftModel
from manyhands.text.tokenizer import load_tokenizer
from manyhands.weights import fetched


def model(folder: Path, drafter: Any, **changes: int) -> OriginModel:
    """tales in `folder`, as far as load_drafter looks: config.json with `drafter` and `changes`, and the tokenizer."""
    config = json.loads((tales.model_path() / "config.json").read_bytes()) | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config if drafter is None else config | {"manyhands": drafter}))
    return cast(OriginModel, SimpleNamespace(folder=folder, tokenizer=load_tokenizer(tales.model_path())))


def drafter_in(folder: Path) -> Path:
    """The drafter of tales in `folder`, with the embedding and the tokenizer of tales."""
    shutil.copytree(tales.drafter_path(), folder)
    table = "model.embed_tokens.weight"
    save_file({table: load_file(tales.model_path() / "model.safetensors")[table]}, folder / "table.safetensors")
    places = {entry.name: path.name for path in folder.glob("*.safetensors") for entry in read_header(path)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tales.model_path() / name, folder / name)
    return folder


def load(model: OriginModel, draft: str) -> DraftModel | None:
    drafter = asyncio.run(load_drafter(model, draft))
    if drafter is not None:
        drafter.close()
    return drafter


@pytest.mark.parametrize("draft", ["auto", "model"])
def test_a_folder_inside_the_model_drafts_for_it(tmp_path: Path, draft: str) -> None:
    drafter_in(tmp_path / "m" / "drafter")
    drafter = load(model(tmp_path / "m", {"drafter": "drafter"}), draft)
    assert drafter is not None and drafter.name == "drafter"
    assert load(model(tmp_path / "m", {"drafter": "drafter"}), "suffix") is None


def test_a_model_of_the_hub_drafts_if_it_was_fetched_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is fetched for it: `auto` goes on without and says how to have it, `model` is refused with the same words."""
    found: list[Path | None] = [drafter_in(tmp_path / "small"), None, None]
    monkeypatch.setattr(fetched, "find_local", lambda home, id, span, ends: found.pop(0))
    named = model(tmp_path / "m", {"drafter": "org/small"})
    drafter = load(named, "auto")
    assert drafter is not None and drafter.name == "org/small"
    remedy = "the drafter org/small that config.json names is not here: fetch it with --draft model:org/small"
    with caplog.at_level(logging.WARNING):
        assert load(named, "auto") is None
    assert remedy in caplog.text
    with pytest.raises(ModelError, match=remedy):
        load(named, "model")


def test_a_model_that_names_none_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names: list[Any] = [None, {}, [], {"drafter": None}, "drafter"]
    for own in names:
        assert load(model(tmp_path / "m", own), "auto") is None
        with pytest.raises(BadRequest, match="--draft model:MODEL"):
            load(model(tmp_path / "m", own), "model")
    assert not caplog.records


@pytest.mark.parametrize("name", ["../out", "/etc", ".", "..", "m", "drafter/../../out", "link"])
def test_what_leads_out_of_the_model_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "link").symlink_to(tmp_path / "out")
    with pytest.raises(ManyhandsError):
        find_drafter(tmp_path / "m", name, tmp_path / "home")


@pytest.mark.parametrize("name", ["", 5, ["a"], "a\nb", "\x1b[2J", "x" * (MAX_NAME + 1)])
def test_what_cannot_be_a_name_is_refused_in_printable_words(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ModelError, match=r'"drafter" in config\.json is') as refused:
        drafter_name(model(tmp_path / "m", {"drafter": name}).folder)
    assert str(refused.value).isprintable()


def test_a_drafter_as_large_as_the_model_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A config could make a gateway hold a second large model that happens to be on its disk."""
    drafter_in(tmp_path / "m" / "drafter")
    large = model(tmp_path / "m", {"drafter": "drafter"}, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        assert load(large, "auto") is None
    assert "the limit is 0.5" in caplog.text


@pytest.mark.parametrize(
    "command",
    ["local tales -p hello", "up tales --listen 127.0.0.1:0", "serve tales --layers 0-11 --listen 127.0.0.1:0"],
)
def test_a_named_drafter_that_is_not_there_is_refused_before_anything_is_served(tmp_path: Path, command: str) -> None:
    api = [] if command.startswith("local") else ["--api", "127.0.0.1:0"]
    line = [sys.executable, "-m", "manyhands", *command.split(), *api, "--draft", "model:nowhere"]
    env = os.environ | {"MANYHANDS_HOME": str(tmp_path)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("manyhands: model 'nowhere' is no folder")
