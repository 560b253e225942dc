"""How a text of GGUF's "gpt2" tokenizers is cut before bytes are paired: regular expressions by `tokenizer.ggml.pre`."""

from collections.abc import Mapping
from typing import Final

_CONTRACTIONS: Final = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE: Final = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2: Final = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREES: Final = r"\p{N}{1,3}"
_LLAMA3: Final = _ANY_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2: Final = _ANY_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35: Final = (
    _ANY_CASE + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As llama.cpp has them: without combining marks, and of letters only a to z and A to Z have a case.
_CASED: Final = (
    r"[^\r\n\p{L}\p{N}]?(?:(?=\p{L})[^a-z])*(?:(?=\p{L})[^A-Z])+",
    r"[^\r\n\p{L}\p{N}]?(?:(?=\p{L})[^a-z])+(?:(?=\p{L})[^A-Z])*",
)
_HAN: Final = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}]"
)
_SLASHES: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3: Final = (
    _THREES,
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# As llama.cpp cuts: digits in threes, counted from the last; the first ones stay with what is before them. Of many digits each
# three looks at all that follow.
_THREES_FROM_LAST: Final = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\P{N}+\z"
# As llama.cpp has them: from U+8C48 on, where the publisher's begin at U+F900, which decomposes to that.
_ASIAN: Final = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}"
    r"\x{E40}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{1100}-\x{11FF}]+"
)
# Letters with a case, as DeepSeek's first tokenizers list them.
_LISTED: Final = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}"
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}"
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}"
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}"
    r"\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}"
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}"
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}"
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
LINES: Final = r"[^\n]+|\n+"  # of gemma4, too
_CJK: Final = r"(?:(?!\s)[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}])+"
# Of BLOOM: whatever is no space and none of its marks, in one piece.
_UNMARKED: Final = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
# tokenizer.ggml.pre -> the expressions that cut a text, one after the other.
PRE_TOKENIZERS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("lfm2", "midm-2.0", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), (_LLAMA3,)),
    "jais-2": (
        _ANY_CASE
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        + "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
        + r"|\s",
    ),
    "minicpm5": (_THREES, _ANY_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+" + _TAIL),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo", "solar-open", "grok-2"), (_QWEN2,)
    ),
    "laguna": (LINES, _QWEN2),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        (
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]"
            r"|\s+(?!\S)|\s+",
        ),
    ),
    "qwen35": (_QWEN35,),
    "seed-coder": (_ANY_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "exaone4",
            "trillion",
            "mellum",
            "a.x-4.0",
            "gigachat",
            "granite-docling",
        ),
        (_GPT2,),
    ),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        _CJK,
        r"\p{N}",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_LISTED}]+",
        r"\s?(?:(?!\s)[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}])+",
        r"\s+\z",
        _CJK,
        r"\p{N}+",
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK3),
    "afmoe": (_THREES_FROM_LAST, _ASIAN, _DEEPSEEK3[2]),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        (_THREES_FROM_LAST, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+" + rf"{_ANY_CASE}?|{_THREES}{_SLASHES}"),
    ),
    "exaone-moe": (
        _ANY_CASE + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "kimi-k2": (rf"{_HAN}+|[^\r\n\p{{L}}\p{{N}}]?(?:(?!{_HAN})\p{{L}})+{_ANY_CASE}?|{_THREES}" + _TAIL,),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_UNMARKED,)),
    "viking": (_UNMARKED, r"\p{N}"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "tekken": (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}{_SLASHES}",),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"),
        (rf"{_CASED[0]}{_ANY_CASE}?|{_CASED[1]}{_ANY_CASE}?|\p{{N}}{{1,3}}{_SLASHES}",),
    ),
}
# Those that take a text no more than its length.
PLAIN_SPLITS: Final = frozenset((LINES, *(cut for cuts in PRE_TOKENIZERS.values() for cut in cuts))) - {
    _THREES_FROM_LAST
}
