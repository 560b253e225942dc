"""The tokenizer in a GGUF header as the files that transformers writes: tokenizer.json and what stands beside it. Pure.

Three kinds are read: "gpt2", byte pairs over bytes, cut first by regular expressions that `tokenizer.ggml.pre` names;
"llama", pieces of sentencepiece with scores, merged best score first, unknown characters as bytes; and "gemma4", such pieces
with merges. Ids are those of llama.cpp, which normalises nothing.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, Final

from manyhands.checkpoint.gguf import Gguf
from manyhands.checkpoint.gguf_pre_tokenizers import LINES, PRE_TOKENIZERS
from manyhands.checkpoint.tokenizer_json import bpe, byte_pairs, splits, whole
from manyhands.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_WHOLE_FIRST: Final = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2 midm-2.0 minicpm5 tekken glm4 glm5".split()
)  # a known word is one token
_BEGUN: Final = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2 midm-2.0 tekken".split()
)  # bos, where the file does not say
_ENDS: Final = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] "
    "<|end_of_text|> <end_of_utterance> <|flush|> <|calls|> [EOS] <eos> <turn|> <|tool_response> [e~[ "
    "<\uff5cend\u2581of\u2581sentence\uff5c> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> "
    "<REPO> <reponame> <|file_sep|>"
).split()  # tokens that end an answer, whatever else the file calls them
_END_IF_CONTROL: Final = "</s>"  # Gemma's is a tag of HTML
_SAMPLING: Final = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_NAMED_ENDS: Final = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Where a model's name has one of these, white space behind special tokens is dropped, except behind _PHI3_KEEPS.
_PHI3: Final = ("phi-3", "phi3")
_PHI3_KEEPS: Final = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_files(gguf: Gguf) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json. Raises ModelError naming what is not known."""
    return _Vocabulary(gguf).files()


class _Vocabulary:
    def __init__(self, gguf: Gguf) -> None:
        self._gguf = gguf
        self._kind = self._fact("model", str)
        if self._kind not in ("gpt2", "llama", "gemma4"):
            known = "gpt2 (byte pairs), llama (sentencepiece) and gemma4"
            raise self._refused(f"its tokenizer is {self._kind!r:.40}; read are {known}")
        tokens: list[str] = self._fact("tokens", list)
        self._tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
        self._types = self._numbers("token_type", [_NORMAL] * len(self._tokens))
        self._ids = {token: id for id, token in enumerate(self._tokens)}
        if len(self._ids) < len(self._tokens):
            id = next(id for id, token in enumerate(self._tokens) if self._ids[token] != id)
            twice = f"the token {self._tokens[id]!r:.60} twice, as {id} and {self._ids[self._tokens[id]]}"
            raise self._refused(f"its vocabulary has {twice}: convert it again")
        for end in self._ids.keys() & set(_ENDS):
            self._types[self._ids[end]] = _CONTROL  # some files call them normal
        self._pre = self._fact("pre", str, "default")
        if self._kind == "gpt2" and self._pre not in PRE_TOKENIZERS:
            raise self._refused(
                f"its pre-tokenizer is {self._pre!r:.40}; known are {', '.join(sorted(PRE_TOKENIZERS))}"
            )

    def _refused(self, what: str) -> ModelError:
        return ModelError(f"{self._gguf.file} refused: {what}")

    def _fact(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._gguf.facts.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, kind):
            raise self._refused(f"tokenizer.ggml.{name} is {'absent' if value is None else 'no ' + kind.__name__}")
        return value

    def _numbers(self, name: str, default: Sequence[float] | None = None) -> list[Any]:
        found = self._gguf.facts.get(f"tokenizer.ggml.{name}")
        if found is None and default is not None:
            return list(default)
        if found is None or isinstance(found, str | list | int | float) or len(found) != len(self._tokens):
            raise self._refused(f"tokenizer.ggml.{name} is not one number for each of the {len(self._tokens)} tokens")
        numbers: list[Any] = found.tolist()
        if any(map(math.isnan, numbers)):
            raise self._refused(f"tokenizer.ggml.{name} holds what is no number: convert it again")
        return numbers

    def _special(self, name: str, default: int | None = None) -> str | None:
        """The token that the key `name` names by its id."""
        id = self._gguf.one(f"tokenizer.ggml.{name}_token_id", default)
        if id is None or id == 0xFFFFFFFF:
            return None
        if type(id) is not int or not 0 <= id < len(self._tokens):
            raise self._refused(f"tokenizer.ggml.{name}_token_id is {id!r:.40}, of {len(self._tokens)} tokens")
        return self._tokens[id]

    def _recommended(self) -> dict[str, Any]:
        """How the file's publisher recommends to draw, by the names of generation_config.json."""
        stated = {name: self._gguf.one(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
        return {
            name: float(f"{value:.7g}") if isinstance(value, float) else value  # they are fp32: 0.6, not 0.60000002
            for name, value in stated.items()
            if value is not None
        }

    def files(self) -> dict[str, bytes]:
        is_spm = self._kind == "llama"
        bos, eos = self._special("bos", 1 if is_spm else None), self._special("eos", 2 if is_spm else None)
        named = {
            "bos_token": bos,
            "eos_token": eos,
            "unk_token": self._special("unknown", 0 if is_spm else None),
            "pad_token": self._special("padding"),
        }
        config: dict[str, Any] = {name: token for name, token in named.items() if token is not None}
        if (template := self._template()) is not None:
            config["chat_template"] = template
        ends = {token for token in (eos, *map(self._special, _NAMED_ENDS)) if token is not None}
        ends |= self._ids.keys() & set(_ENDS)
        if _END_IF_CONTROL in self._ids and self._types[self._ids[_END_IF_CONTROL]] == _CONTROL:
            ends.add(_END_IF_CONTROL)
        made = {
            "tokenizer.json": self._tokenizer(bos, eos, is_spm),
            "tokenizer_config.json": config,
            "generation_config.json": {"eos_token_id": sorted(self._ids[token] for token in ends)}
            | self._recommended(),
        }
        return {
            name: json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() for name, body in made.items()
        }

    def _template(self) -> Any:
        """The chat template; several by name where there are others beside it."""
        facts = self._gguf.facts
        prefix = "tokenizer.chat_template."
        found = {"default": facts.get("tokenizer.chat_template")}
        found |= {key.removeprefix(prefix): value for key, value in facts.items() if key.startswith(prefix)}
        texts = {name: text for name, text in found.items() if isinstance(text, str)}
        if list(texts) == ["default"]:
            return texts["default"]
        return [{"name": name, "template": text} for name, text in texts.items()] or None

    def _tokenizer(self, bos: str | None, eos: str | None, is_spm: bool) -> dict[str, Any]:
        begins = self._fact("add_bos_token", bool, is_spm or self._pre in _BEGUN) or self._kind == "gemma4"
        ends = self._fact("add_eos_token", bool, False)
        read = {"llama": self._sentencepiece, "gpt2": self._byte_pairs, "gemma4": self._gemma4}
        parts = read[self._kind]()
        return whole(parts, self._added(), self._ids, bos if begins else None, eos if ends else None)

    def _added(self) -> list[dict[str, Any]]:
        """Tokens that are matched in a text before it is cut."""
        plain = {"single_word": False, "lstrip": False, "normalized": False}
        name = self._gguf.facts.get("general.name")
        strips = isinstance(name, str) and any(part in name.lower() for part in _PHI3)
        return [
            {
                "id": id,
                "content": token,
                **plain,
                "rstrip": strips and token not in _PHI3_KEEPS,
                "special": kind != _USER,
            }
            for id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind in (_CONTROL, _USER, _UNKNOWN)
        ]

    def _byte_pairs(self) -> dict[str, Any]:
        merges = list(self._stored_merges())
        return byte_pairs(PRE_TOKENIZERS[self._pre], self._ids, merges, whole_first=self._pre in _WHOLE_FIRST)

    def _stored_merges(self) -> dict[tuple[str, str], None]:
        """In order; of one that occurs twice the first place counts."""
        merges: dict[tuple[str, str], None] = {}
        for merge in self._fact("merges", list):
            left, _, right = merge[1:].partition(" ")  # the first character may be a space
            left = merge[:1] + left
            if not {left, right, left + right} <= self._ids.keys():
                raise self._refused(f"its merge {merge!r:.60} is not of two tokens that make a third: convert it again")
            merges[left, right] = None
        return merges

    def _gemma4(self) -> dict[str, Any]:
        """Lines are merged whole, and newlines to one token where there is one, also if the file's merges do not make it."""
        newlines = {token for token in self._ids if not token.strip("\n")}
        if newlines != {"\n" * count for count in range(1, len(newlines) + 1)}:
            raise self._refused("its tokens of newlines are not 1, 2, 3 and so on of them long")
        made = {(left, right): None for _, left, right in splits(sorted(newlines), self._gguf.file)}
        merges = list(self._stored_merges() | made)  # what has a place keeps it
        return {
            "normalizer": _replace(" ", "▁"),
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": LINES}, "behavior": "Isolated", "invert": False},
            "decoder": {
                "type": "Sequence",
                "decoders": [_replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}],
            },
            "model": bpe(self._ids, merges, unk_token=None, fuse_unk=False, byte_fallback=True, ignore_merges=False),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        if self._fact("remove_extra_whitespaces", bool, False):
            raise self._refused("its tokenizer removes extra spaces, which is not known here")
        prefixed = self._fact("add_space_prefix", bool, True)
        prefix = [{"type": "Prepend", "prepend": "▁"}] if prefixed else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
        unknown = self._special("unknown", 0)
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prefix, _replace(" ", "▁")]},
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [_replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
            },
            "model": bpe(
                self._ids,
                self._merges(),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=_BYTE in self._types,
                ignore_merges=False,
            ),
        }

    def _merges(self) -> list[tuple[str, str]]:
        """Every way to make a piece of two others, best score first."""
        scores = self._numbers("scores")
        pieces = {t: id for id, t in enumerate(self._tokens) if self._types[id] in (_NORMAL, _USER, _UNUSED)}
        made = [(scores[pieces[token]], left, right) for token, left, right in splits(pieces, self._gguf.file)]
        made.sort(key=lambda merge: -merge[0])
        if len(made) > 1 and made[0][0] == made[-1][0]:
            raise self._refused(
                f"its pieces all have the score {made[0][0]}, none goes before another: convert it again"
            )
        return [(left, right) for _, left, right in made]


def _replace(what: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": what}, "content": by}
