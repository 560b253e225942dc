"""What the name of a model may be: "tales", a folder, a GGUF file, or a hub id. Looks at the disk, at nothing in it."""

from pathlib import Path

from manyhands.checkpoint.gguf import SUFFIX


def gguf_file(name: str) -> Path | None:
    """The GGUF file here that `name` is, if it is one."""
    path = Path(name).expanduser()
    return path if name.endswith(SUFFIX) and path.is_file() else None


def model_folder(name: str) -> Path | None:
    """The checkpoint folder here that `name` is, if it is one; not "tales"."""
    path = Path(name).expanduser()
    return path if name not in ("", "tales") and path.is_dir() else None


def is_here(name: str) -> bool:
    """Whether no hub is needed for this model."""
    return name == "tales" or model_folder(name) is not None or gguf_file(name) is not None


def label(name: str) -> str:
    """What a model is called in records and in the API: a folder or file by its own name, else what the user typed."""
    if (file := gguf_file(name)) is not None:
        return file.resolve().name.removesuffix(SUFFIX)
    folder = model_folder(name)
    return name if folder is None else folder.resolve().name
