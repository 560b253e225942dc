"""The six characters that let a machine on the same network join, and when they stop doing so. Pure: time is an argument.

A code is drawn evenly from 27^6 = 387,420,489. One caller in an exchange tries one code, and MAX_FAILURES wrong ones end
it, so who guesses at a code gets in with 3 in 387 million. It lives CODE_S; a person shows a new one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from manyhands.errors import BadRequest

# No I, L, O, S, Z, 0, 1, 5, 8: each looks like another one. Capitals; what is typed may be small letters.
ALPHABET: Final = "ABCDEFGHJKMNPQRTUVWXY234679"
LENGTH: Final = 6
CODE_S: Final = 600.0
MAX_FAILURES: Final = 3
MAX_TYPED: Final = 64
# The remedy where no code will do.
TICKET_WAY: Final = "with the ticket: manyhands join mh1... (`up` prints the line, `manyhands ticket qr` shows it)"


def draw_code(below: Callable[[int], int]) -> str:
    """A new code. `below(n)` draws evenly from 0 to n - 1 (secrets.randbelow)."""
    return "".join(ALPHABET[below(len(ALPHABET))] for _ in range(LENGTH))


def shown_code(code: str) -> str:
    """As people read it: ABC-DEF."""
    return f"{code[: LENGTH // 2]}-{code[LENGTH // 2 :]}"


def read_code(typed: str) -> str:
    """The code that a person typed: small letters, spaces and hyphens are fine. Raises BadRequest for what can be none.

    The message quotes nothing that was typed: it may be most of a code.
    """
    if len(typed) > MAX_TYPED:
        raise BadRequest(f"that is no code: {len(typed)} characters; a code has {LENGTH}, as in ABC-DEF")
    code = "".join(c for c in typed.upper() if not c.isspace() and c != "-")
    if len(code) != LENGTH:
        raise BadRequest(f"that is no code: it has {len(code)} letters and digits; a code has {LENGTH}, as in ABC-DEF")
    if not set(code) <= set(ALPHABET):
        raise BadRequest("that is no code: codes never hold I, L, O, S, Z, 0, 1, 5 or 8; look at it once more")
    return code


def is_code(typed: str) -> bool:
    """Whether `typed` can be a code, right or wrong."""
    try:
        read_code(typed)
    except BadRequest:
        return False
    return True


@dataclass(slots=True)
class JoinCode:
    """One code that is shown. `until` is a time of the clock that its user has; `failures` counts wrong codes tried."""

    text: str = field(repr=False)
    until: float
    failures: int = 0
    is_withdrawn: bool = False

    def is_live(self, now: float) -> bool:
        """Whether it still opens anything."""
        return not self.is_withdrawn and self.failures < MAX_FAILURES and now < self.until

    @property
    def tries_left(self) -> int:
        return 0 if self.is_withdrawn else max(0, MAX_FAILURES - self.failures)

    def admit(self, is_right: Callable[[], bool], now: float) -> bool:
        """Whether a caller that shows its proof may have the ticket. A wrong proof counts as a failure.

        A dead code looks at no proof, so exchanges that began while it was live give no further guess.
        """
        if not self.is_live(now):
            return False
        if is_right():
            return True
        self.failures += 1
        return False
