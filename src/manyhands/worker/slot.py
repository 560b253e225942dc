"""Which span of a device copies a cache: one at a time, in turn. Pure."""

from collections.abc import Callable


class CopySlot:
    """One copy at a time on a device: a step waits there for one copy, however many spans have some to make."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[Callable[[], None], None] = {}  # in order

    def __repr__(self) -> str:
        return f"<CopySlot {'taken' if self._is_taken else 'free'}, {len(self._waiting)} wait>"

    def take(self, who: Callable[[], None]) -> bool:
        """Whether it is `who`'s turn, which has the slot until `free`. Else `who` is called when that comes; it keeps its turn
        until it takes it, or leaves."""
        self._waiting[who] = None
        if self._is_taken or next(iter(self._waiting)) is not who:
            return False
        del self._waiting[who]
        self._is_taken = True
        return True

    def leave(self, who: Callable[[], None]) -> None:
        """Take `who` out of those that wait: it has nothing to copy any more."""
        if who in self._waiting:
            del self._waiting[who]
            self._call_next()

    def free(self) -> None:
        """The copy has ended, or was not made."""
        self._is_taken = False
        self._call_next()

    def _call_next(self) -> None:
        if self._waiting and not self._is_taken:
            next(iter(self._waiting))()
