"""What a model's name means, and what the model is called where others see it."""

from pathlib import Path

import pytest

from manyhands.cli.gateway import served_name
from manyhands.errors import ModelError
from manyhands.weights import names
from manyhands.weights.names import HubId, parse_hub_id


def test_files_and_folders_are_called_by_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Tiny.Q4_K_M.gguf").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, label in (("Tiny.Q4_K_M.gguf", "Tiny.Q4_K_M"), (str(tmp_path / "folder"), "folder"), ("tales", "tales")):
        assert names.is_here(name) and names.label(name) == label == served_name(name)
    for name in ("org/name", "hf:org/name:file.gguf", "absent.gguf", ""):
        assert not names.is_here(name) and names.label(name) == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("org/name", HubId("org/name", "main", None)),
        ("hf:org/name@v1", HubId("org/name", "v1", None)),
        ("hf:org/name:a-Q4_0.gguf", HubId("org/name", "main", "a-Q4_0.gguf")),
        ("org/name@refs/pr/3:a.gguf", HubId("org/name", "refs/pr/3", "a.gguf")),
        ("hf:org/name:Q4_0/a-Q4_0.gguf", HubId("org/name", "main", "Q4_0/a-Q4_0.gguf")),
        ("org/name@v1:Q4_0/a-00002-of-00003.gguf", HubId("org/name", "v1", "Q4_0/a-00001-of-00003.gguf")),
    ],
)
def test_hub_ids_name_a_repository_or_one_file_of_it(name: str, meant: HubId) -> None:
    assert parse_hub_id(name) == meant


def test_all_parts_of_a_model_on_the_hub_have_one_label() -> None:
    """Nodes that were given different ones host the same model."""
    called = {names.label(f"hf:org/name:Q4_0/a-0000{number}-of-00003.gguf") for number in (1, 2, 3)}
    assert called == {"hf:org/name:Q4_0/a-00001-of-00003.gguf"}


@pytest.mark.parametrize("name", ["org/name:a-00004-of-00003.gguf", "org/name:x/a-00000-of-00001.gguf"])
def test_numbers_of_no_part_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"refused: by its name it is part \d of \d"):
        parse_hub_id(name)
