"""The names by which a model may be asked for: its own, an alias ([api] aliases), and either with Ollama's `:latest`. Pure."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

from manyhands.plain import one_line

ANY: Final = "*"  # the alias of whatever is not known otherwise
LATEST: Final = ":latest"
SHOWN: Final = 400  # characters of a list of names: members make them up


@dataclass(frozen=True, slots=True)
class ModelNames:
    """`aliases`: (alias, model). `offered`: models whose own names go before aliases, though they are not loaded."""

    aliases: tuple[tuple[str, str], ...] = ()
    offered: frozenset[str] = frozenset()

    @classmethod
    def of(cls, given: Iterable[str]) -> "ModelNames":
        """From NAME=MODEL, as the configuration has them (and has checked)."""
        return cls(tuple((alias, model) for alias, _, model in (text.partition("=") for text in given)))

    def find(self, name: str, served: Container[str]) -> str:
        """The model that `name` means; `name` itself where it means none."""
        known = dict(self.aliases)
        for form in (name, name.removesuffix(LATEST)):
            if form in served or form in self.offered:
                return form
            if form in known:
                return known[form]
        return known.get(ANY, name)

    def of_model(self, model: str) -> list[str]:
        """The aliases of one model."""
        return [alias for alias, meant in self.aliases if meant == model and alias != ANY]


def listed(names: Iterable[str]) -> str:
    """Names of models as an error lists them."""
    return one_line(", ".join(names), SHOWN) or "none"


NO_NAMES: Final = ModelNames()
