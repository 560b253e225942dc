"""Text and messages to ids, and what a checkpoint says of its tokenizer. Stands at the beginning of a token's path."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from manyhands.errors import BadRequest, ModelError

# Any of these holds a vocabulary. transformers would invent an empty one for a folder that has only a config.json.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")

Tokenizer = Any  # a transformers tokenizer: they share no type that says more


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder, never from the network and never running code from the folder.

    Raises ModelError, naming the folder and the remedy, if it is missing, damaged or needs code of its own.
    """
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        raise ModelError(f"no tokenizer in {folder}: fetch tokenizer.json (or tokenizer.model) of this model into it")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"cannot read the tokenizer in {folder} ({reason}): fetch its files again") from error


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a plain prompt, with the special tokens (bos) that the tokenizer itself adds; never empty.

    Raises BadRequest for an empty prompt if the model has no token to begin with.
    """
    ids = [int(token) for token in tokenizer.encode(text)]
    if ids:
        return ids
    if tokenizer.bos_token_id is None:
        raise BadRequest("the prompt is empty and this model has no begin token: give at least one character")
    return [int(tokenizer.bos_token_id)]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    **variables: Any,
) -> list[int]:
    """Return the ids of a conversation in the model's own chat template, ready for the assistant's answer.

    The template places the special tokens; `tools` and `variables` (enable_thinking, say) are its inputs. Raises
    BadRequest if there is no template, no message, or if the template refuses the messages (for instance roles that must
    alternate).
    """
    if not messages:
        raise BadRequest("messages is empty: send at least one message")
    if not tokenizer.chat_template:
        raise BadRequest("this model has no chat template: use /v1/completions with a plain prompt, or a chat model")
    conversation = [dict(message) for message in messages]
    known = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, "tools": list(tools) or None}
    try:
        ids = tokenizer.apply_chat_template(conversation, **known, **variables)
    except (
        TemplateError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RecursionError,
    ) as error:
        reason = " ".join(str(error).split())[
            :300
        ]  # what it raises itself, or content of a type that it does not expect
        raise BadRequest(f"the chat template of this model refuses these messages: {reason}") from error
    return [int(token) for token in ids]


def eos_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, tokenizer: Tokenizer
) -> frozenset[int]:
    """Return every id that ends a text.

    The tokenizer's own, and those of generation_config.json or, where it names none, of config.json (the precedence of
    transformers' `generate`). A multimodal config may name them under "text_config". Empty if nobody names one.
    """
    stated = _read_eos(generation_config or {}) or _read_eos(config) or _read_eos(config.get("text_config") or {})
    own = tokenizer.eos_token_id
    return stated if own is None else stated | {int(own)}


def load_eos_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return `eos_ids` of a checkpoint folder. Raises ModelError if one of its two config files is damaged."""
    return eos_ids(_read_json(folder / "config.json"), _read_json(folder / "generation_config.json"), tokenizer)


def _read_eos(config: Mapping[str, Any]) -> frozenset[int]:
    """Read "eos_token_id": absent, null, one id, or a list of ids."""
    stated = config.get("eos_token_id")
    if stated is None:
        return frozenset()
    return frozenset(stated) if isinstance(stated, list) else frozenset([stated])


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, {} if there is no such file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}): fetch it again") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} holds a {type(loaded).__name__}, not an object: fetch it again")
    return loaded
