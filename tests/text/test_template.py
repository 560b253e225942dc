"""manyhands.text.template: what transformers renders, and what an untrusted template cannot use up."""

from typing import Any

import pytest

from manyhands.errors import BadRequest
from manyhands.text.prompt import Tokenizer, render_chat, render_text
from manyhands.text.template import RenderBudget, TooCostly, compile_template
from tests.text.test_detokenize import byte_level
from tests.text.test_templates import FAMILIES

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "What is é + 1? <b>"},
    {"role": "assistant", "content": "Two.\n", "reasoning_content": "one and one"},
    {"role": "user", "content": "  And now?  "},
]
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


TOLD = ("deepseek-v3", "deepseek-v3.1", "phi-4-mini")  # families whose templates take no `tools`


@pytest.fixture
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.mark.parametrize("tools", [[], [TOOL]])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_rendered_as_transformers_does(family: str, tools: list[Any], tokenizer: Tokenizer) -> None:
    if tools and family in TOLD:
        pytest.skip("its functions are told in the system message: tests/text/test_templates.py")
    tokenizer.chat_template = FAMILIES[family][0]
    known: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, "enable_thinking": False}
    wanted = tokenizer.apply_chat_template(TALK, tools=tools or None, **known)
    assert render_text(tokenizer, TALK, tools, RenderBudget(), enable_thinking=False) == wanted


_PARTS = "{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"


@pytest.mark.parametrize("is_text", ["m['content'] is string", "m.content is not iterable or m.content is string"])
def test_a_template_that_also_takes_images_is_given_text(is_text: str, tokenizer: Tokenizer) -> None:
    """As those of gemma3 and of qwen's models for images do."""
    body = f"{{% if {is_text} %}}{{{{ m.content | trim }}}}{{% else %}}{_PARTS}{{% endif %}}"
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>" + body + "{% endfor %}"
    wanted = "<user>What is é + 1? <b><assistant>Two.<user>And now?"
    assert render_text(tokenizer, TALK, (), RenderBudget()) == wanted


def test_generation_blocks_loop_controls_and_named_templates(tokenizer: Tokenizer) -> None:
    body = "{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}"
    body += "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokenizer.chat_template = {"default": body, "tool_use": "tools {{ messages[-1].content }}"}
    assert render_text(tokenizer, HI * 2, (), RenderBudget()) == "hi"
    assert render_text(tokenizer, HI, [TOOL], RenderBudget()) == "tools hi"


LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP,
        "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 3000000000 }}",
        "{{ 3000000000 * 'a' }}",
        "{{ [0] * 3000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ '%*d' % (3000000000, 1) }}",
        "{{ 'a'.center(3000000000) }}",
        "{{ 'a'.ljust(width=3000000000) }}",
        "{{ {} | tojson(indent=3000000000) }}",
        "{% set n = namespace(a='aaaaaaaa') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
        "{% set n = namespace(a='aaaaaaaa') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
        "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
        "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
    ],
)
def test_what_would_not_end_or_not_fit_is_refused(template: str, tokenizer: Tokenizer) -> None:
    """F18: 1e10 passes took minutes on the event loop, and a MemoryError was a 500."""
    tokenizer.chat_template = template
    with pytest.raises(BadRequest) as refused:
        render_chat(tokenizer, HI, budget=RenderBudget(passes=50_000, seconds=60.0))
    assert "chat template" in str(refused.value) and "\n" not in str(refused.value)


def test_the_bounds_are_those_that_were_asked_for() -> None:
    template = compile_template("{% for i in range(10) %}{{ i }}{% endfor %}")
    assert template.render(HI, {}, RenderBudget(passes=10)) == "0123456789"
    with pytest.raises(TooCostly, match="more than 9 passes"):
        template.render(HI, {}, RenderBudget(passes=9))
    now = iter([0.0, 0.5, 0.5, 1.5])
    with pytest.raises(TooCostly, match="more than 1 s"):
        template.render(HI, {}, RenderBudget(seconds=1.0, clock=lambda: next(now)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_templates_are_simple(family: str) -> None:
    """But for those with filters whose cost no bound sees: they are rendered in a process."""
    template = FAMILIES[family][0]
    assert compile_template(template).is_simple == ("replace" not in template and "join(" not in template)


@pytest.mark.parametrize(
    "template",
    [LOOP, "{{ 'a' * 2 }}", "{{ 2 ** 2 }}", "{{ 'a'.center(9) }}", "{{ messages | join(messages[0].content) }}"],
)  # fmt: skip
def test_what_its_bounds_cannot_see_is_not_simple(template: str) -> None:
    assert not compile_template(template).is_simple


@pytest.mark.parametrize("name", ["__class__", "_x"])
def test_a_namespace_has_no_private_names(name: str) -> None:
    with pytest.raises(Exception, match=r"namespace|unsafe|access"):
        compile_template(f"{{% set n = namespace() %}}{{% set n.{name} = 1 %}}{{{{ n.{name} }}}}").render(
            HI, {}, RenderBudget()
        )
