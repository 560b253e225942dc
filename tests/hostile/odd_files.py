"""Files that a command must not wait for, nor read whole."""

from pathlib import Path


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)
