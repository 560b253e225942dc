"""How models write function calls: which dialect a chat template teaches.

hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>  any number, text may precede     (qwen, hermes)
llama3    {"name": "f", "parameters": {...}}                        the whole message, or a list of them; perhaps after
                                                                   <|python_tag|>
mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]      text may precede
mistral11 [TOOL_CALLS]f[ARGS]{...}                                  any number, text may precede
qwen3     <tool_call><function=f><parameter=k>v</parameter></function></tool_call>             (qwen3-coder, qwen3.5)
harmony   <|channel|>commentary to=functions.f<|message|>{...}       a message of its own, see channels.py        (gpt-oss)
seed      <seed:tool_call><function=f><parameter=k>v</parameter></function></seed:tool_call>                   (seed-oss)
minimax   <minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke></minimax:tool_call> (minimax-m2)
muse      <atem:invoke name="f"><atem:parameter name="k">v</atem:parameter></atem:invoke>  in a message to f, see recipients.py
glm       <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>                 (glm-4.5 and later)
glm4      <|assistant|>f, a line break, {...}   any number, each a message: the prompt has the first mark    (glm-4-0414)
gemma4    <|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>                      any number, text may precede   (gemma 4)
olmo3     <function_calls>f(k="v")</function_calls>                            any number, each in its line   (olmo 3)
deepseek  <|calls begin><|call begin>function<|sep>f ```json {...} ```<|call end><|calls end>  in a section  (v3, r1)
deepseek31 the same without the word function and the fence                                                  (v3.1)
kimi      <|section begin|><|call begin|>functions.f:0<|argument begin|>{...}<|call end|><|section end|>         (kimi k2)
granite   <|tool_call|>[{"name": "f", "arguments": {...}}, ...]     text may precede                      (granite 3)
phi4      <|tool_call|>[{"name": "f", "arguments": {...}}]<|/tool_call|>                                 (phi-4-mini)
hunyuan   <tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>                                  (hunyuan-a13b)
command   <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}]<|END_ACTION|>  (command r7b, a)
inkling   {"name": "f", "args": {...}}                         in a block, see blocks.py: each behind its name       (inkling)
kimi3     <|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>
          <|close|>call<|sep|>                                        in a section, see sections.py                (kimi k3)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from manyhands.text.calls import JsonCall, NamedCall
from manyhands.text.literals import GEMMA4_NOTATION, PYTHON_NOTATION, LiteralCall, Notation
from manyhands.text.reasoning import (
    CALL_BLOCK,
    CHANNEL,
    CLOSE,
    OPEN,
    SEP,
    START,
    Heads,
    find_heads,
    template_of,
    variables_of,
)
from manyhands.text.tagged import TaggedCall
from manyhands.text.tags import ATEM_TAGS, GLM_TAGS, KIMI3_TAGS, MINIMAX_TAGS, QWEN3_TAGS, SEED_TAGS, Tags

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How calls are written. `marker` opens one call or several, `close` ends them ("": none).

    `forms`: what stands before the arguments, the first as the model is taught it, with {name}, {n} (a number) and {id} (up to
    64 characters); `tail`: what stands behind them. None where values stand between `tags`, or are literals of a `notation`.
    """

    name: str
    marker: str  # "": the message begins with a call
    close: str
    forms: tuple[str, ...] = ()
    tail: str = ""
    lead: str = ""  # between `marker` and the first call
    trail: str = ""  # between the last call and `close`
    between: str | None = None  # between calls behind one `marker`; None: each has its own
    apart: str = ""  # between calls that each have their own
    end: str = ""  # the mark that ends one of several calls
    skipped: str = ""  # what may stand between and around calls
    begins: str = "{"  # with what a call begins behind its marker ("": with its name)
    after: Literal["start", "gap", "text"] = "gap"  # where the reader is after a call
    tags: Tags | None = None
    notation: Notation | None = None
    is_compact: bool = False  # arguments are written without spaces
    is_put: bool = False  # a reader of heads puts `marker` before a call: it is no text
    is_begun: bool = False  # the prompt ends with the first `marker`; no white space stands between one and a call

    @property
    def marks(self) -> frozenset[str]:
        """All the markers, which a tokenizer may have as special tokens."""
        inner = {mark for form in self.forms for mark in re.findall(r"<[^<>]+>|\[\w+\]", form)}
        values = self.tags.all if self.tags else self.notation.marks if self.notation else frozenset[str]()
        return frozenset({self.marker, self.close, self.end, *inner, *values} - {""})

    def new_call(self, functions: Mapping[str, Schema]) -> JsonCall | NamedCall | TaggedCall | LiteralCall:
        """A reader of the next call."""
        if self.notation is not None:
            return LiteralCall(self.notation, functions)
        if self.tags is not None:
            return TaggedCall(self.tags, functions)
        return JsonCall() if self.begins == "{" else NamedCall(self.forms, functions)


_OBJECT, _ID_ARGS = '{"name": "{name}", "arguments": ', "{name}[CALL_ID]{id}[ARGS]"
HERMES = Dialect("hermes", "<tool_call>", "</tool_call>", (_OBJECT,), "}", "\n", "\n", apart="\n")
LLAMA3 = Dialect("llama3", "", "", ('{"name": "{name}", "parameters": ',), "}", skipped=";,]", after="start")
MISTRAL = Dialect("mistral", "[TOOL_CALLS]", "", (_OBJECT,), "}", "[", "]", ", ", skipped="[,]")
MISTRAL11 = Dialect("mistral11", "[TOOL_CALLS]", "", ("{name}[ARGS]", _ID_ARGS), begins="", after="text")
QWEN3 = Dialect("qwen3", "<tool_call>", "</tool_call>", lead="\n", apart="\n", begins="<function=", tags=QWEN3_TAGS)
SEED = replace(QWEN3, name="seed", marker="<seed:tool_call>", close="</seed:tool_call>", tags=SEED_TAGS)
MINIMAX = Dialect(
    "minimax",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    lead="\n",
    between="",
    begins=MINIMAX_TAGS.begin,
    tags=MINIMAX_TAGS,
)
MUSE = replace(
    MINIMAX,
    name="muse",
    marker=START,
    close="</atem:function_calls>",
    lead="<atem:function_calls>\n",
    begins=ATEM_TAGS.begin,
    tags=ATEM_TAGS,
    is_put=True,
)
GLM = Dialect("glm", "<tool_call>", "</tool_call>", apart="\n", begins="", after="text", tags=GLM_TAGS)
GLM4 = Dialect("glm4", "<|assistant|>", "", ("{name}\n",), begins="", after="text", is_begun=True)
GEMMA4 = Dialect("gemma4", "<|tool_call>", "<tool_call|>", begins="call:", notation=GEMMA4_NOTATION)
OLMO3 = Dialect(
    "olmo3",
    "<function_calls>",
    "</function_calls>",
    between="\n",
    skipped="[,]",
    begins="",
    notation=PYTHON_NOTATION,
)
HARMONY = Dialect("harmony", CHANNEL, "", ("{name}[ARGS]",), begins="", after="text", is_put=True)
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED, _PLAIN = f"{_BEGIN}function{_SEP}{{name}}\n```json\n", f"{_BEGIN}{{name}}{_SEP}"
DEEPSEEK31 = Dialect(
    "deepseek31",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    (_PLAIN, _FENCED),
    _END,
    between="",
    end=_END,
    skipped="`",
    begins=_BEGIN,
)
DEEPSEEK = replace(DEEPSEEK31, name="deepseek", forms=(_FENCED, _PLAIN), tail=f"\n```{_END}", between="\n")
KIMI = Dialect(
    "kimi",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    tuple(f"<|tool_call_begin|>{name}:{{n}}<|tool_call_argument_begin|>" for name in ("functions.{name}", "{name}")),
    "<|tool_call_end|>",
    between="",
    end="<|tool_call_end|>",
    begins="<|tool_call_begin|>",
)
KIMI3 = Dialect(
    "kimi3",
    f"{OPEN}tools{SEP}",
    f"{CLOSE}tools{SEP}",
    between="",
    begins=KIMI3_TAGS.begin,
    tags=KIMI3_TAGS,
    is_put=True,
)
INKLING = Dialect(
    "inkling", CALL_BLOCK, "", ('{"name":"{name}","args":',), "}", after="text", is_compact=True, is_put=True
)
GRANITE = replace(MISTRAL, name="granite", marker="<|tool_call|>")
PHI4 = replace(GRANITE, name="phi4", close="<|/tool_call|>")
HUNYUAN = replace(PHI4, name="hunyuan", marker="<tool_calls>", close="</tool_calls>")
COMMAND = Dialect(
    "command",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    ('{"tool_call_id": "{n}", "tool_name": "{name}", "parameters": ',),
    "}",
    "[\n    ",
    "\n]",
    ",\n    ",
    skipped="[,]",
)
PYTHON_TAG = "<|python_tag|>"
# By what heads of messages say, and what a template names that teaches calls.
_HEADED: Mapping[Heads, tuple[Dialect, str]] = {
    "channels": (HARMONY, "functions."),
    "recipients": (MUSE, MUSE.lead.strip()),
    "blocks": (INKLING, INKLING.marker),
    "sections": (KIMI3, "argument"),
}


def find_dialect(tokenizer: Any) -> Dialect | None:
    """The dialect of a model, by its chat template; None if it can be told of no tools, or writes calls as we cannot read."""
    template = template_of(tokenizer)
    if DEEPSEEK.marker in template:
        return DEEPSEEK if "```json" in template else DEEPSEEK31
    if "<|/tool|>" in template:  # the published one takes them of the system message
        return PHI4
    if "tools" not in variables_of(tokenizer):
        return None
    if (heads := find_heads(tokenizer)) is not None and (known := _HEADED[heads])[1] in template:
        return known[0]
    if HERMES.marker in template:
        return QWEN3 if "<function=" in template else GLM if "<arg_key>" in template else HERMES
    for dialect in (SEED, MINIMAX, GEMMA4, OLMO3, KIMI, GRANITE, HUNYUAN, COMMAND):
        if dialect.marker in template:
            return dialect
    if "<|observation|>" in template and "metadata" in template:
        return GLM4
    if MISTRAL.marker in template:
        return MISTRAL11 if "[ARGS]" in template else MISTRAL
    is_llama3 = "ipython" in template or PYTHON_TAG in template
    return LLAMA3 if is_llama3 and "<function=" not in template else None  # functionary has a form of its own
