"""The folder on this machine that a model's name is, where it needs no hub. Loads no client of one."""

from pathlib import Path

from manyhands import tales
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.errors import ModelError
from manyhands.weights.catalogue import SHORT_NAMES
from manyhands.weights.names import gguf_file, model_folder


def folder_named(name: str, home: Path) -> Path | None:
    """The folder that `name` is, or that the GGUF model of this name has in `home`; None for a hub id. Raises ModelError."""
    if name == "tales":
        return Path(tales.model_path())
    if (file := gguf_file(name, home)) is not None:
        try:
            return gguf_folder(file, home)
        except ModelError as error:
            if name not in SHORT_NAMES or isinstance(error.__cause__, OSError):
                raise
            raise ModelError(
                f"{error}; `manyhands rm {name}` removes it, and it is fetched again when needed"
            ) from error
    return model_folder(name)
