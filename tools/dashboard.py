"""The page's build and its sources belong together: src/manyhands/dashboard/build.json says from which sources it was built.

    python -m tools.dashboard            check, as the tests do: the hashes agree, the files are small
    python -m tools.dashboard --write    after `npm run build` (`make dashboard`): compresses what was built

The check needs no npm: it hashes dashboard/ and the built files, which are stored compressed: 0.15 MB of an installation.
"""

import argparse
import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ROOT / "dashboard"
BUILT: Final = ROOT / "src" / "manyhands" / "dashboard"
RECORD: Final = "build.json"
MAX_COMPRESSED_BYTES: Final = 200_000
# What a build is made of; tests/ and documents are not.
NAMES: Final = (
    "index.html",
    "package.json",
    "package-lock.json",
    "svelte.config.js",
    "tsconfig.json",
    "vite.config.ts",
)


def sources() -> list[Path]:
    """The files that a build is made of."""
    found = [SOURCES / name for name in NAMES]
    return found + sorted(path for name in ("public", "src") for path in (SOURCES / name).rglob("*") if path.is_file())


def sources_hash() -> str:
    """SHA-256 over names and contents."""
    total = hashlib.sha256()
    for path in sources():
        content = path.read_bytes()
        total.update(f"{path.relative_to(SOURCES).as_posix()} {len(content)}\n".encode() + content)
    return total.hexdigest()


def built() -> dict[str, str]:
    """SHA-256 of every built file, by its name in the folder."""
    files = sorted(path for path in BUILT.rglob("*") if path.is_file() and path.name != RECORD)
    return {path.relative_to(BUILT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def compressed_bytes() -> int:
    """Of all built files, as they are sent."""
    return sum((BUILT / name).stat().st_size for name in built())


def problems() -> list[str]:
    """What does not hold, one line each."""
    found = []
    record = json.loads((BUILT / RECORD).read_text("utf8"))
    if record["sources"] != sources_hash():
        found.append("dashboard/ has changed since src/manyhands/dashboard was built: run `make dashboard`")
    if record["files"] != built():
        found.append("files in src/manyhands/dashboard are not those that were built: run `make dashboard`")
    if (size := compressed_bytes()) > MAX_COMPRESSED_BYTES:
        found.append(f"the page has {size} bytes compressed; at most {MAX_COMPRESSED_BYTES} go into the wheel")
    return found


def pack() -> None:
    """Store every file that was built as gzip, under its name with .gz."""
    for path in (BUILT / name for name in built() if not name.endswith(".gz")):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
        path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.dashboard", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the hashes of what has just been built")
    if parser.parse_args().write:
        pack()
        record = {"sources": sources_hash(), "files": built()}
        (BUILT / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")
    found = problems()
    print("\n".join(found) if found else f"the page has {compressed_bytes()} bytes compressed")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
