"""The fields of /tokenize and /detokenize, as pydantic models (docs/openai.md)."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field as Limits
from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

from manyhands.api.openai.fields_chat import Ids
from manyhands.api.openai.schema import FIRST, MAX_ITEMS, STRICT, Label, Message, Shown, Text

ModelName = Annotated[Label, Shown("one of /v1/models or an alias; may be left out where one is served", refused=[1])]


class Tokenize(TypedDict, total=False):
    """POST /tokenize: llama.cpp's fields and vLLM's."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    model: ModelName
    content: Annotated[Text, Shown("a text; either this, `prompt` or `messages`", ["hi", ""], [5])]
    prompt: Annotated[Text, Shown("the same, by vLLM's name", ["hi"], [5])]
    messages: Annotated[
        list[Message], FIRST, Limits(min_length=1, max_length=MAX_ITEMS), Shown("a conversation, by the chat template")
    ]
    add_special: Annotated[bool, Shown("with the tokens that begin a text; default false", [True], [1])]
    add_special_tokens: Annotated[bool, Shown("the same, by vLLM's name; default true with `prompt`", [False], [1])]
    parse_special: Annotated[
        Literal[True], Shown("only `true`: special tokens in the text are read as such", [True], [False])
    ]
    with_pieces: Annotated[bool, Shown("each token as `{id, piece}`", [True], [1])]


class Detokenize(TypedDict):
    """POST /detokenize."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    model: NotRequired[ModelName]
    tokens: Annotated[Ids, Shown("token ids", [[65, 66]], [[], [-1], ["a"], [99999]])]
