"""manyhands.engine.layout: structs that C and Python both write down."""

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manyhands.engine import layout, library
from manyhands.errors import ModelError


class Layout:
    """mh_layout of a library whose figures are `change`d."""

    def __init__(self, change: Callable[[list[int]], list[int]]) -> None:
        figures = (ctypes.c_int64 * 64)()
        count = library.load().mh_layout(figures, 64)
        self.figures = change(list(figures)[:count])

    def __call__(self, out: Any, room: int) -> int:
        if room >= len(self.figures):
            out[: len(self.figures)] = self.figures
        return len(self.figures)


class Names:
    """mh_types or mh_kinds of a library with other names."""

    def __init__(self, names: str) -> None:
        self.names = names

    def __call__(self) -> bytes:
        return self.names.encode()


def known() -> list[str]:
    """The names of the kinds of operations in the library, by number."""
    names: bytes = library.load().mh_kinds()
    return names.decode().split(", ")


def fake(
    change: Callable[[list[int]], list[int]] = list,
    types: str = ", ".join(library.TYPES).upper(),
    kinds: Sequence[str] = (),
) -> ctypes.CDLL:
    names = {"mh_types": Names(types), "mh_kinds": Names(", ".join(kinds or known()))}
    functions = {"mh_layout": Layout(change), **names, "mh_version": lambda: library.VERSION}
    return cast(ctypes.CDLL, SimpleNamespace(**functions))


def difference(other: ctypes.CDLL) -> str:
    return layout.difference(other, library.POSITION + 1, vars(library))


def test_the_library_has_the_structs_that_python_has() -> None:
    assert difference(library.load()) == ""


def test_every_figure_is_compared() -> None:
    count = len(Layout(list).figures)
    for index in range(count):
        changed = fake(lambda figures, index=index: [f + (i == index) for i, f in enumerate(figures)])  # type: ignore[misc]
        assert " is " in difference(changed), index


def test_fields_that_changed_places_are_named() -> None:
    changed = fake(lambda f: [*f[:5], f[6], f[5], *f[7:]])
    assert difference(changed) == "Segment.num_blocks is 16, not 8, Segment.start is 8, not 16"


@pytest.mark.parametrize("change", [lambda f: f[:-1], lambda f: [*f, 1]], ids=["fewer", "more"])
def test_another_number_of_figures_is_told(change: Callable[[list[int]], list[int]]) -> None:
    assert "figures, not" in difference(fake(change))


def test_types_that_changed_places_are_named() -> None:
    """Their number stays, and the bytes of some matrices too: C would read the codes of one type as those of the other."""
    names = list(library.TYPES)
    names[-2], names[-3] = names[-3], names[-2]
    wrong = difference(fake(types=", ".join(names).upper()))
    assert wrong.startswith("types is bf16 f16") and "w3s w4t w2s, not bf16" in wrong
    assert difference(fake()) == ""


def test_kinds_that_changed_places_are_named() -> None:
    """Their number stays: C would compute one kind with the numbers of the other."""
    names = known()
    names[-1], names[-2] = names[-2], names[-1]
    wrong = difference(fake(kinds=names))
    assert all(f"kind {name} is {number}, not" in wrong for number, name in enumerate(names) if name in names[-2:])
    assert "kind NOVELTY is 0, not None" in difference(fake(kinds=["NOVELTY", *names[1:]]))


def test_a_library_of_another_layout_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = fake(lambda f: [f[0] + 8, *f[1:]])
    monkeypatch.setattr(ctypes, "CDLL", lambda _: changed)
    with pytest.raises(ModelError, match=r"does not fit this version .*sizeof Tensor is 24, not 16.*install manyhands"):
        library.load.__wrapped__()
