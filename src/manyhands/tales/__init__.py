"""The bundled model *tales* and its drafter: trained by tools/train_tales.py, described in CARD.md. Knows no torch."""

from pathlib import Path
from typing import Final

from manyhands.errors import ModelError

NAME: Final = "tales"
ABOUT: Final = "continues stories and answers no questions"  # CARD.md in half a line, for who is about to ask it
_DATA = Path(__file__).parent / "data"


def model_path() -> Path:
    """The checkpoint folder of tales. Raises ModelError if the package was built without it."""
    return _folder("main")


def drafter_path() -> Path:
    """The checkpoint folder of its drafter, whose tokenizer and embedding are those of tales. Raises ModelError as
    `model_path`."""
    return _folder("drafter")


def _folder(role: str) -> Path:
    folder = _DATA / role
    if not (folder / "model.safetensors").exists():
        raise ModelError(f"tales is not in this installation ({folder}): train it with python -m tools.train_tales")
    return folder
