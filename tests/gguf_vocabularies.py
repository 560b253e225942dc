"""Small vocabularies as GGUF metadata, in which every cut of a text shows, and texts that are hard to cut."""

import random
from typing import Any, Final

import numpy as np

from manyhands.checkpoint.gguf_pre_tokenizers import PRE_TOKENIZERS
from manyhands.checkpoint.tokenizer_json import byte_symbols

PRES: Final = sorted(PRE_TOKENIZERS)
WORDS: Final = (
    "Hello the then them theory camelCase HTTPServer don's n't 're 've I'm I'LL 've's café naïve 漢字 漢漢 日本語 हिन्दी "
    "привет ПРИВЕТ мир 12 123 1234 999 ½² ... .... !? ?! -- == >= <=> ^^ || $$ (( )) ); {} //n /* 🙂🙂 x1 a1b2 É\u0301 ÀÉ"
).split()
SPACES: Final = ("  ", "   ", "    ", "\n\n", "\n\n\n", "\r\n", "\t\t", " \n", "\n ", ".\n", ",\n", "./", ".\n/")
HARD: Final = (
    "", " ", "  ", "\n", "\n\n\n  x", "Hello World", "don't we'll I'M THEY'RE", "3.14159 1,000,000 2024-01-01",
    "naïve café résumé Å",
    "漢字かな交じり文。日本語！", "العربية مرحبا", "हिन्दी नमस्ते", "🙂👩‍👩‍👧‍👦🏳️‍🌈", "e\u0301 n\u0303 A\u030a",
    "\u00a0nbsp\u2003em\u3000ideo", "<|im_start|>user\nhi<|im_end|>\n", "def f(x):\n\treturn x**2  # c\n\n\nclass A: pass",
    "a" * 300, " " * 50 + "x", "\t\t\tx\r\n\r\ny", "½ ² Ⅳ ٣ ①", "x\u200by\ufeffz", "$100 €50 £3 <=> ^^ ~~ |||",
    "https://example.com/?q=a&b=c#d", "mixedCASE camelCaseWord SNAKE_CASE", "'s 't 're", "end with spaces   ", "Ünïcödé",
    "\x00\x01\x7f", "ﬁ ligature ™ ®", "한국어 텍스트", "ไทย ภาษา", "1\n2\r\n3\u2028x", "100%!!??...", '"a" “b” ‘x’',
    "<s>x</s>", "▁under ▁",
)  # fmt: skip


def texts() -> list[str]:
    """The same on every machine: hard ones, then mixtures of what is hard."""
    draw = random.Random(1)
    pool = [
        chr(c) for c in [*range(32, 127), 9, 10, 13, 0xA0, 0x301, 0x4E2D, 0x1F642, 0xE9, 0x130, 0x2019, 0x660, 0xBD]
    ]
    pool += [*WORDS, *(" " + word for word in WORDS), *SPACES, "<|im_end|>", "<|im_start|>"]
    return [*HARD, *("".join(draw.choice(pool) for _ in range(draw.randint(1, 40))) for _ in range(1000))]


def byte_pairs(pre: str) -> dict[str, Any]:
    """A "gpt2" vocabulary: bytes, and words made of them from the left."""
    symbols = byte_symbols()
    tokens, merges = list(symbols), list[str]()
    for word in [*WORDS, *(" " + word for word in WORDS), *SPACES]:
        spelled = [symbols[byte] for byte in word.encode()]
        for at in range(1, len(spelled)):
            left, right = "".join(spelled[:at]), spelled[at]
            if left + right not in tokens:
                tokens.append(left + right)
                merges.append(f"{left} {right}")
    special = ["<|im_start|>", "<|im_end|>", "<|user|>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *special],
        "tokenizer.ggml.token_type": np.array([1] * len(tokens) + [3, 3, 4], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }


def sentencepiece(prefixed: bool) -> dict[str, Any]:
    """A "llama" vocabulary: special tokens, bytes, characters, and every beginning of a word."""
    tokens, types = ["<unk>", "<s>", "</s>"], [2, 3, 3]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [6] * 256
    known = set[str]()
    for word in [*(f"▁{word}" for word in WORDS), *WORDS, "▁▁▁▁", "\n\n"]:
        for piece in [*word, *(word[:at] for at in range(2, len(word) + 1))]:
            if piece not in known:
                known.add(piece)
                tokens.append(piece)
                types.append(1)
    tokens += ["<|im_start|>", "<|im_end|>", "<|user|>"]
    types += [3, 3, 4]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
        "tokenizer.ggml.add_space_prefix": prefixed,
    }


def gemma4() -> dict[str, Any]:
    """A "gemma4" vocabulary: special tokens, bytes, characters, beginnings of words, and up to 31 newlines.

    Merges make pieces from the left alone, so that they would not make one token of four newlines.
    """
    tokens, types, merges = ["<pad>", "<eos>", "<bos>", "<unk>"], [3, 3, 3, 2], list[str]()
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [6] * 256
    known = set[str]()
    for word in [*(f"▁{word}" for word in WORDS), *WORDS, "▁▁▁▁", "\n" * 31]:
        for at in range(1, len(word) + 1):
            for piece in (word[:at], word[at - 1]):
                if piece not in known:
                    known.add(piece)
                    tokens.append(piece)
                    types.append(1)
            if at > 1:
                merges.append(f"{word[: at - 1]} {word[at - 1]}")
    tokens += ["<|im_start|>", "<|im_end|>", "<|user|>"]
    types += [3, 3, 4]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
