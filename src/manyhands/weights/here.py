"""The folder on this machine that a model's name is, where it needs no hub. Loads no client of one."""

from pathlib import Path

from manyhands import tales
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.weights.names import gguf_file, model_folder


def folder_named(name: str, home: Path) -> Path | None:
    """The folder that `name` is, or that the GGUF model of this name has in `home`; None for a hub id. Raises ModelError."""
    if name == "tales":
        return Path(tales.model_path())
    if (file := gguf_file(name, home)) is not None:
        return gguf_folder(file, home)
    return model_folder(name)
