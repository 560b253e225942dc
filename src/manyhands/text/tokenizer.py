"""A checkpoint's tokenizer by `tokenizers` alone: tokenizer.json, and what tokenizer_config.json and templates say beside it.

Where there is no tokenizer.json, it is made of tekken.json or tiktoken.model (checkpoint/ranked_tokenizer.py). Nothing is
fetched, no code of the folder runs. Files that only transformers can convert (sentencepiece) are refused with the remedy.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from manyhands.checkpoint.folder import RANKED, TOKENIZER
from manyhands.checkpoint.plain_file import MAX_SMALL_BYTES, read_small
from manyhands.checkpoint.ranked_tokenizer import from_tekken, from_tiktoken
from manyhands.errors import BadRequest, ModelError
from manyhands.text.tokenizer_parts import check_decoder, check_normalizers

NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATES: Final = ("default", "tool_use")  # those that are used, of several by name
_LONGEST_RANKED: Final = 64 << 20  # of a tekken.json (15 to 20 MB) or tiktoken.model (3 MB)
_LONGEST_BESIDE: Final = 16 << 20  # bytes of any file beside it
_SURROGATE: Final = re.compile("[\ud800-\udfff]")  # half a character, or a byte of an argument that is not UTF-8
_GPT2: Final = ("GPT2Tokenizer", "GPT2TokenizerFast")
# Families whose tokenizer is that class where no file names one (transformers' tokenization_auto.py), of those that are served.
_OF_GPT2: Final = frozenset("gpt2 gpt_neo gptj codegen opt phi starcoder2 jais2 hyperclovax_vision_v2".split())
_GPT2_NAMED: Final = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_WITHOUT_FORM: Final = frozenset({"biogpt"})  # whose tokenizer is code in transformers, and writes no tokenizer.json
_CONVERTIBLE: Final = ("*.model", "vocab.json", "vocab.txt", "*.tiktoken")


class TextTokenizer:
    """Text to ids and back. `backend_tokenizer` is the tokenizers.Tokenizer, with all special tokens in it.

    `named`: what the checkpoint calls bos_token, eos_token and so on; `chat_template`: a template, or several
    by name ("default", "tool_use"), or None.
    """

    def __init__(
        self,
        backend: Any,
        named: Mapping[str, str],
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        self.backend_tokenizer, self.chat_template = backend, chat_template
        self.special_tokens_map = dict(named)

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if there is one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if there is one."""
        return self._named_id("eos_token")

    @property
    def special_ids(self) -> dict[str, int]:
        """The tokens that `decode` can skip, whatever names them, with their ids."""
        return {
            token.content: id
            for id, token in self.backend_tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that are matched in a text before it is split, special or not, with their ids."""
        return {token.content: id for id, token in self.backend_tokenizer.get_added_tokens_decoder().items()}

    def get_vocab(self) -> dict[str, int]:
        """All tokens, as the vocabulary spells them, with their ids."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with the tokens before and behind it that tokenizer.json adds (add_bos_token is not read).

        Raises BadRequest for a text that the tokenizer has no ids for.
        """
        try:
            ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            if lone := _SURROGATE.search(text):
                raise BadRequest(
                    f"the text is no Unicode at character {lone.start()} ({lone[0]!a}): send it in UTF-8"
                ) from error
            raise BadRequest(
                f"this model's tokenizer cannot read the text ({_failure(error)}): send less, or other characters"
            ) from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        text: str = self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        found: int | None = None if token is None else self.backend_tokenizer.token_to_id(token)
        return found


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a checkpoint folder. Raises ModelError, naming the folder and the remedy, if there is none."""
    path = next((folder / name for name in (TOKENIZER, *RANKED) if (folder / name).is_file()), None)
    if path is None:
        raise ModelError(_absent(folder))
    try:
        config = _object(folder / "tokenizer_config.json")
        text, named = _tokenizer_json(path, config)
        stated = (config.get("added_tokens_decoder") or {}).values()
        check_normalizers(text, sum(len(each["content"]) for each in stated if each.get("normalized")))
        backend = Tokenizer.from_str(text)
        made = _load(folder, backend, config, named)
        backend.encode("")  # what stands before and behind a text may have no ids
        return made
    except ModelError:
        raise
    except BaseException as error:
        raise ModelError(f"cannot read the tokenizer in {folder} ({_failure(error)}): fetch its files again") from error


def _failure(error: BaseException) -> str:
    """What the tokenizers library says; anything else that is not an Exception goes on. It raises bare Exception for what it
    refuses, and a BaseException that has no public name (pyo3_runtime.PanicException) where it fails itself."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return str(error).strip().partition("\n")[0][:200]


def _absent(folder: Path) -> str:
    other = next((path.name for pattern in _CONVERTIBLE for path in folder.glob(pattern)), None)
    if other is None:
        return f"no tokenizer in {folder}: fetch tokenizer.json of this model into it"
    if (family := _object(folder / "config.json").get("model_type")) in _WITHOUT_FORM:
        return (
            f"no tokenizer.json in {folder}, only {other}: transformers makes none for {family}, whose tokenizer is code, so "
            "it is served only with a tokenizer.json that you have made"
        )
    return (
        f"no tokenizer.json in {folder}, only {other}: convert it once where transformers is installed, "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder), or fetch tokenizer.json of this model"
    )


def _tokenizer_json(path: Path, config: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """What is in a tokenizer.json, or would be if there were one; and what the file calls bos_token and so on."""
    if path.name == TOKENIZER:
        return _read(path, MAX_SMALL_BYTES), {}
    raw = _read(path, _LONGEST_RANKED).encode()
    made, named = (
        (from_tiktoken(raw, config, str(path)), {}) if path.suffix == ".model" else from_tekken(raw, str(path))
    )
    return json.dumps(made), named


def _load(folder: Path, backend: Any, config: Mapping[str, Any], usual: Mapping[str, str]) -> TextTokenizer:
    check_decoder(backend)
    backend.no_truncation()
    backend.no_padding()
    stated = {
        **{name: text for name, text in _of_class(folder, backend, config).items() if name not in config},
        **usual,
        **_object(folder / "special_tokens_map.json"),
        **{k: v for k, v in config.items() if v is not None},
    }
    named = {name: content for name in NAMED if (content := _content(stated.get(name))) is not None}
    further = stated.get("extra_special_tokens") or stated.get("additional_special_tokens") or []
    further = list(further.values()) if isinstance(further, dict) else further
    extra = [content for token in further if (content := _content(token)) is not None]
    _add(backend, config.get("added_tokens_decoder") or {}, [*named.values(), *extra])
    _make_special(backend, named.values())
    return TextTokenizer(backend, named, _templates(folder, config))


def _of_class(folder: Path, backend: Any, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Special tokens that the tokenizer's class in transformers has where no file names them, as of GPT-2: its own."""
    about = _object(folder / "config.json")
    kind = config.get("tokenizer_class") or about.get("tokenizer_class")
    is_gpt2 = kind in _GPT2 or (kind is None and about.get("model_type") in _OF_GPT2)
    return _GPT2_NAMED if is_gpt2 and backend.token_to_id(_GPT2_NAMED["eos_token"]) is not None else {}


def _content(token: object) -> str | None:
    """A special token as configs write it: a text, or an object of its content and how it is matched."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _add(backend: Any, decoder: Mapping[str, Any], special: Sequence[str]) -> None:
    """What the config adds to tokenizer.json, or says otherwise of its tokens, in the order of ids; then special tokens that
    are nowhere yet."""
    known = {repr(token) for token in _added(backend)}
    stated = [_token(token) for _, token in sorted(decoder.items(), key=lambda item: int(item[0]))]
    changed = [token for token in stated if repr(token) not in known]
    for token in changed:
        token.special |= token.content in special
    backend.add_tokens(changed)
    contents = {token.content for token in _added(backend)}
    backend.add_special_tokens([AddedToken(text, special=True) for text in special if text not in contents])


def _make_special(backend: Any, named: Collection[str]) -> None:
    """Added tokens that the config calls eos_token and so on are special, also where tokenizer.json does not say so."""
    plain = [token for token in _added(backend) if token.content in named and not token.special]
    for token in plain:
        token.special = True
    backend.add_tokens(plain)


def _added(backend: Any) -> Collection[AddedToken]:
    found: Collection[AddedToken] = backend.get_added_tokens_decoder().values()
    return found


def _token(stated: Mapping[str, Any]) -> AddedToken:
    form = {name: bool(stated.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(stated["content"], **form)


def _templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Files of templates if there are any; else what tokenizer_config.json or chat_template.json says."""
    found = dict(_template_files(folder))
    if found:
        return found["default"] if list(found) == ["default"] else found
    stated = config.get("chat_template") or _object(folder / "chat_template.json").get("chat_template")
    if isinstance(stated, list):
        stated = {str(each["name"]): each["template"] for each in stated}
    if isinstance(stated, dict):
        return {name: str(stated[name]) for name in TEMPLATES if name in stated}
    return stated if isinstance(stated, str) else None


def _template_files(folder: Path) -> Iterator[tuple[str, str]]:
    single = folder / "chat_template.jinja"
    if single.is_file():
        yield "default", _read(single, _LONGEST_BESIDE)
    for name in TEMPLATES:
        further = folder / "additional_chat_templates" / f"{name}.jinja"
        if further.is_file():
            yield name, _read(further, _LONGEST_BESIDE)


def _read(path: Path, longest: int) -> str:
    return read_small(path, longest).decode()


def _object(path: Path) -> dict[str, Any]:
    """The object in a file; {} if there is no such file."""
    if not path.is_file():
        return {}
    loaded = json.loads(_read(path, _LONGEST_BESIDE))
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} holds a {type(loaded).__name__}, not an object: fetch it again")
    return loaded
