"""What an origin holds of a model: tokenizer, sizes, and the ends unless the edges have them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.checkpoint.manifest import build_manifest
from manyhands.config import home_from_env
from manyhands.core import EndsAt, Precision
from manyhands.model.admit import admit
from manyhands.model.ends import Ends
from manyhands.model.load import context_length, read_config
from manyhands.model.prove import proven_class
from manyhands.text.prompt import encode_prompt, load_eos_ids, render_chat
from manyhands.text.tokenizer import load_tokenizer

Messages = Sequence[Mapping[str, Any]]


class OriginModel:
    """A model as its origin holds it: tokenizer and, unless the edges have them, the ends. Blocking to make.

    Raises ModelError.
    """

    def __init__(self, folder: Path, precision: Precision, ends: EndsAt = "origin") -> None:
        self.folder, self.precision, self.ends_at = folder, precision, ends
        self.config = read_config(folder)
        admit(self.config, home_from_env())
        self.num_layers = int(self.config.num_hidden_layers)
        self.context_length = context_length(self.config)
        self.arithmetic = proven_class(precision, home_from_env())
        manifest = build_manifest(folder)
        self.id = manifest.id
        self.tokenizer = load_tokenizer(folder)
        self.eos_ids = load_eos_ids(folder, self.tokenizer)
        self.ends = Ends(folder, precision, manifest=manifest) if ends == "origin" else None

    def encode(self, prompt: str | Messages) -> tuple[int, ...]:
        """Ids of a text, or of a conversation by the chat template. Raises BadRequest."""
        if isinstance(prompt, str):
            return tuple(encode_prompt(self.tokenizer, prompt))
        return tuple(render_chat(self.tokenizer, prompt))
