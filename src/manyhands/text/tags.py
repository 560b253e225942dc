"""How dialects write calls whose values stand between tags (tagged.py).

qwen3   <function=f> <parameter=k> v </parameter> ... </function>
seed    the same, but that line breaks around a value are its own
minimax <invoke name="f"> <parameter name="k">v</parameter> ... </invoke>
atem    the same with <atem:invoke name="f">; the name may stand behind a namespace: f.f
kimi3   <|open|>call tool="f" index="1"<|sep|> <|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|> ...
glm     f <arg_key>k</arg_key> <arg_value>v</arg_value> ... </tool_call>
"""

from dataclasses import dataclass
from typing import Final

from manyhands.text.reasoning import CLOSE, OPEN, SEP


@dataclass(frozen=True, slots=True)
class Tags:
    """How a dialect writes a call. Any of `ends` ends one: the first as the model is taught it, unless `begin` is "" (then the
    mark that ends calls does). `gap` is written before `value_open`. `is_padded`: line breaks around a value are not its own.
    `has_namespace`: a name may stand behind that of a namespace and a dot. `head_end` is written behind `name_end`, {n} being a
    number, `line` behind each tag. `is_typed`: of each value its type is written too; both are
    attributes, and escaped.
    """

    begin: str
    name_end: str
    key_open: str
    key_close: str
    value_open: str
    value_close: str
    ends: tuple[str, ...]
    gap: str = ""
    is_padded: bool = False
    has_namespace: bool = False
    head_end: str = "\n"
    line: str = "\n"
    is_typed: bool = False

    @property
    def all(self) -> frozenset[str]:
        return frozenset({self.key_open, self.value_open, self.value_close, *self.ends} - {""})


_FUNCTION, _PARAMETER = ("<function=", ">"), ("<parameter=", ">", "", "</parameter>")
QWEN3_TAGS: Final = Tags(*_FUNCTION, *_PARAMETER, ("</function>", "</tool_call>"), "\n", is_padded=True)
SEED_TAGS: Final = Tags(*_FUNCTION, *_PARAMETER, ("</function>", "</seed:tool_call>"))
MINIMAX_TAGS: Final = Tags(
    '<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", ("</invoke>", "</minimax:tool_call>")
)
ATEM_TAGS: Final = Tags(
    '<atem:invoke name="',
    '">',
    '<atem:parameter name="',
    '">',
    "",
    "</atem:parameter>",
    ("</atem:invoke>", "</atem:function_calls>"),
    has_namespace=True,
)
KIMI3_TAGS: Final = Tags(
    f'{OPEN}call tool="',
    '"',
    f'{OPEN}argument key="',
    '"',
    SEP,
    f"{CLOSE}argument{SEP}",
    (f"{CLOSE}call{SEP}", f"{CLOSE}tools{SEP}"),
    head_end=f' index="{{n}}"{SEP}',
    line="",
    is_typed=True,
)
GLM_TAGS: Final = Tags("", "<", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", ("</tool_call>",), "\n")
