"""The folder on this machine that a model's name is, where it needs no hub. Loads no client of one."""

from pathlib import Path

from manyhands import tales
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.weights.names import gguf_file, model_folder


def folder_named(name: str, home: Path) -> Path | None:
    """The folder that `name` is, or that a GGUF file of this name has in `home`; None for a hub id. Raises ModelError."""
    if name == "tales":
        return Path(tales.model_path())
    if (file := gguf_file(name, home)) is not None:
        return gguf_folder(file, home)
    return model_folder(name)


def check_servable(name: str, home: Path, *, with_text: bool) -> None:
    """For what is about to say that it serves: raise ModelError if `name` is a model of this disk of which no layer can be
    served or, `with_text`, that cannot be asked for want of a tokenizer. Blocking.
    """
    from manyhands.checkpoint.folder import read_entries
    from manyhands.program.families import read_program
    from manyhands.text.tokenizer import load_tokenizer

    if (folder := folder_named(name, home)) is None:
        return
    read_program(folder)
    read_entries(folder)
    if with_text:
        load_tokenizer(folder)
