"""What draws the tokens of a model on its last hop."""

from collections.abc import Callable
from pathlib import Path

from manyhands.core import SamplingParams
from manyhands.origin.sampler import Sampler
from manyhands.program.families import read_program


def sampling(folder: Path, has_head: bool) -> Callable[[SamplingParams], Sampler]:
    """Makes the sampler of a request to the model in `folder`. Raises ModelError.

    Without the head nothing is drawn, and end tokens are not looked up.
    """
    eos = frozenset[int]()
    if has_head:
        from manyhands.text.generation_config import load_eos_ids
        from manyhands.text.tokenizer import load_tokenizer

        eos = load_eos_ids(folder, load_tokenizer(folder))
    vocab_size = read_program(folder).vocab  # of the head: a config may count padding too
    return lambda params: Sampler(params, vocab_size, eos)
