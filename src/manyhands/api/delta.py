"""What one token adds to a choice (choice.py), once thoughts and calls are told from content."""

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.origin import Token
from manyhands.text.tools import Content, Piece


class Delta(NamedTuple):
    """What one token adds: any of these may be empty."""

    reasoning: str = ""
    pieces: Sequence[Piece] = ()
    token: Token | None = None
    is_progress: bool = False  # no token: more of the prompt has been computed

    @property
    def text(self) -> str | None:
        """What it adds to the content, if it adds nothing else."""
        if self.reasoning or len(self.pieces) > 1:
            return None
        if not self.pieces:
            return ""
        piece = self.pieces[0]
        return piece.text if isinstance(piece, Content) else None
