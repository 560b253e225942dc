"""A ticket as a QR code, for a screen that a phone looks at: rows of modules, and lines of a terminal. No I/O."""

from typing import Final

from manyhands.errors import BadRequest

QUIET: Final = 4  # modules of margin that a reader wants (ISO/IEC 18004)
MAX_CHARS: Final = 2000
# Dark on light whatever the colours of the terminal: black on bright white.
_PAPER, _PLAIN = "\x1b[30;107m", "\x1b[0m"
_CELLS: Final = {("0", "0"): " ", ("1", "0"): "▀", ("0", "1"): "▄", ("1", "1"): "█"}


def qr_rows(text: str) -> list[str]:
    """The modules with their margin, a character each: 1 is dark. Raises BadRequest beyond MAX_CHARS."""
    import segno

    if len(text) > MAX_CHARS:
        raise BadRequest(f"{len(text)} characters; a QR code that a camera reads from a screen has at most {MAX_CHARS}")
    made = segno.make(text, error="l", micro=False)
    return ["".join("1" if module else "0" for module in row) for row in made.matrix_iter(border=QUIET)]


def qr_lines(rows: list[str], *, is_coloured: bool) -> list[str]:
    """Lines for a terminal, two rows each. `is_coloured`: with escape codes for dark on light; else dark is ink."""
    pairs = zip(rows[::2], [*rows[1::2], "0" * len(rows[0])], strict=False)
    lines = ["".join(_CELLS[pair] for pair in zip(upper, lower, strict=True)) for upper, lower in pairs]
    return [f"{_PAPER}{line}{_PLAIN}" for line in lines] if is_coloured else lines
