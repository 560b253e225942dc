"""What a model's name means, and what the model is called where others see it."""

from pathlib import Path

import pytest

from manyhands.cli.gateway import served_name
from manyhands.errors import ModelError
from manyhands.weights import names
from manyhands.weights.names import HubId, parse_hub_id
from manyhands.weights.selection import meant_file
from tests.swarm.records import info_of, record_of


def test_files_and_folders_are_called_by_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Tiny.Q4_K_M.gguf").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, label in (("Tiny.Q4_K_M.gguf", "Tiny.Q4_K_M"), (str(tmp_path / "folder"), "folder"), ("tales", "tales")):
        assert names.is_here(name) and names.label(name) == label == served_name(name)
    for name in ("org/name", "hf:org/name:file.gguf", "absent.gguf", ""):
        assert not names.is_here(name) and names.label(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "hf:org/name:" + "directory/" * 4 + "a" * 200 + ".gguf",
        "org/name@" + "\u00e9" * 150,
        "org/n\u00a0me",
        "a\nb\udcff",
    ],
)
def test_what_a_model_is_called_can_stand_in_a_record(name: str) -> None:
    """A record states 255 bytes that are printable; a hub id may have 1,000 characters, a path any."""
    called = names.label(name)
    assert record_of(info=info_of(model_name=called)).info and names.label(called) == called != name
    assert names.label("org/" + "a" * 251) == "org/" + "a" * 251


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("org/name", HubId("org/name", "main", None)),
        ("hf:org/name@v1", HubId("org/name", "v1", None)),
        ("hf:org/name:a-Q4_0.gguf", HubId("org/name", "main", "a-Q4_0.gguf")),
        ("org/name@refs/pr/3:a.gguf", HubId("org/name", "refs/pr/3", "a.gguf")),
        ("hf:org/name:Q4_0/a-Q4_0.gguf", HubId("org/name", "main", "Q4_0/a-Q4_0.gguf")),
        ("hf:org/name:Q4_K_M", HubId("org/name", "main", "Q4_K_M")),
        ("org/name@v1:UD-Q4_K_XL", HubId("org/name", "v1", "UD-Q4_K_XL")),
        ("org/name@v1:Q4_0/a-00002-of-00003.gguf", HubId("org/name", "v1", "Q4_0/a-00001-of-00003.gguf")),
    ],
)
def test_hub_ids_name_a_repository_or_one_file_of_it(name: str, meant: HubId) -> None:
    assert parse_hub_id(name) == meant


def test_all_parts_of_a_model_on_the_hub_have_one_label() -> None:
    """Nodes that were given different ones host the same model."""
    called = {names.label(f"hf:org/name:Q4_0/a-0000{number}-of-00003.gguf") for number in (1, 2, 3)}
    assert called == {"hf:org/name:Q4_0/a-00001-of-00003.gguf"}


FILES = [
    "README.md",
    "Tiny-Q4_K_M.gguf",
    "Tiny-Q4_K_S.gguf",
    "Tiny.q8_0.gguf",
    "UD/Tiny-UD-Q4_K_XL-00001-of-00002.gguf",
    "UD/Tiny-UD-Q4_K_XL-00002-of-00002.gguf",
    "BF16/Tiny.gguf",
    "mmproj-Tiny-Q8_0.gguf",
    "mmproj-BF16.gguf",
]


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("Q4_K_M", "Tiny-Q4_K_M.gguf"),
        ("q4_k_s", "Tiny-Q4_K_S.gguf"),
        ("Q8_0", "Tiny.q8_0.gguf"),
        ("Q4_K_XL", "UD/Tiny-UD-Q4_K_XL-00001-of-00002.gguf"),
        ("UD-Q4_K_XL", "UD/Tiny-UD-Q4_K_XL-00001-of-00002.gguf"),
        ("BF16", "BF16/Tiny.gguf"),
        ("other.gguf", "other.gguf"),  # whose absence is told where it is looked for
    ],
)
def test_a_quantisation_means_the_one_model_that_has_it_in_its_name(wanted: str, file: str) -> None:
    assert meant_file(FILES, wanted, "org/name@12345678") == file


@pytest.mark.parametrize("wanted", ["Q4_K", "Q4", "K", "Q5_K_M", "mmproj", "00001", "gguf"])
def test_a_part_of_a_word_means_nothing(wanted: str) -> None:
    with pytest.raises(
        ModelError, match=f"org/name@1 has no GGUF model {wanted}; there are BF16/Tiny.gguf, Tiny-Q4_K_M"
    ):
        meant_file(FILES, wanted, "org/name@1")


def test_a_quantisation_of_several_models_is_refused_with_their_names() -> None:
    with pytest.raises(ModelError, match=r"has 2 GGUF models Q4_K_M: name the file; there are A-Q4_K_M.gguf, B-Q4_K_M"):
        meant_file(["B-Q4_K_M.gguf", "A-Q4_K_M.gguf"], "Q4_K_M", "org/name@1")
    with pytest.raises(ModelError, match="has no GGUF model Q4_K_M; it has no GGUF file"):
        meant_file(["model.safetensors"], "Q4_K_M", "org/name@1")
    with pytest.raises(ModelError, match=r"there are m00.gguf, .*m11.gguf and 8 more"):
        meant_file([f"m{i:02}.gguf" for i in range(20)], "Q4_K_M", "org/name@1")


@pytest.mark.parametrize("name", ["org/name:a-00004-of-00003.gguf", "org/name:x/a-00000-of-00001.gguf"])
def test_numbers_of_no_part_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"refused: by its name it is part \d of \d"):
        parse_hub_id(name)
