"""What an origin holds of a model: tokenizer, sizes, and the ends unless the edges have them."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folded import folded
from manyhands.checkpoint.folder import read_config
from manyhands.core import EndsAt, Precision
from manyhands.text.apart import bounded
from manyhands.text.generation_config import load_eos_ids, load_recommended
from manyhands.text.prompt import encode_prompt, learn_templates, render_chat
from manyhands.text.tokenizer import load_tokenizer
from manyhands.worker.loading import UNSEEN, Loading
from manyhands.worker.runner import describe, load_ends

Messages = Sequence[Mapping[str, Any]]


class OriginModel:
    """A model as its origin holds it: tokenizer and, unless the edges have them, the ends. Blocking to make.

    `num_threads`: compute threads of the ends, default all cores. `loading` is told how far that is. Raises ModelError.
    """

    def __init__(
        self,
        folder: Path,
        precision: Precision,
        ends: EndsAt = "origin",
        num_threads: int | None = None,
        loading: Loading = UNSEEN,
    ) -> None:
        self.folder, self.precision, self.ends_at = folder, precision, ends
        facts = describe(folder, precision)
        self.num_layers, self.vocab_size, self.hidden_size = facts.num_layers, facts.vocab_size, facts.hidden_size
        self.context_length, self.arithmetic = facts.context_length, facts.arithmetic
        manifest = loading.manifest(folder)
        self.id = manifest.id
        matrices = folded(manifest.tensors, parse_config(read_config(folder)))
        self.num_parameters = sum(math.prod(each.shape) for each in matrices)
        self.tokenizer = load_tokenizer(folder)
        self._bounded = bounded(self.tokenizer)
        self.eos_ids = load_eos_ids(folder, self.tokenizer)
        self.recommended = load_recommended(folder)
        most = num_threads or os.cpu_count() or 1
        self.ends = load_ends(folder, precision, most, manifest, loading=loading) if ends == "origin" else None

    def encode(self, prompt: str | Messages) -> tuple[int, ...]:
        """Ids of a text, or of a conversation by the chat template. Raises BadRequest.

        Blocking: half a second for the first conversation where the template is large, or for any prompt where the tokenizer
        is not plain; ten seconds of CPU time at most, in a process.
        """
        if isinstance(prompt, str):
            return tuple(encode_prompt(self._bounded, prompt))
        learn_templates(self.tokenizer)
        return tuple(render_chat(self._bounded, prompt))
