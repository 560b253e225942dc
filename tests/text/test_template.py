"""manyhands.text.template: what transformers renders, and what an untrusted template cannot use up."""

import time
import tracemalloc
from typing import Any

import pytest

from manyhands.errors import BadRequest
from manyhands.text.prompt import Tokenizer, render_chat, render_text
from manyhands.text.render_budget import RenderBudget, TooCostly
from manyhands.text.template import MAX_NODES, MAX_TEMPLATE, compile_template, find_variables
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
        render_chat(tokenizer, HI, budget=RenderBudget(passes=50_000, seconds=60.0, size=1 << 20))
    assert "chat template" in str(refused.value) and "\n" not in str(refused.value)


def test_the_clock_is_looked_at_while_a_value_is_counted() -> None:
    """To count a list of 16 million items took ten seconds, and a gigabyte, before the two seconds were over."""
    looks = iter(range(100))
    budget = RenderBudget(seconds=8.5, clock=lambda: float(next(looks)))
    with pytest.raises(TooCostly, match=r"more than 8\.5 s"):
        budget.weigh([0] * 100_000)
    assert next(looks) == 10  # nine in all: not after all of the list


def test_the_bounds_are_those_that_were_asked_for() -> None:
    template = compile_template("{% for i in range(10) %}{{ i }}{% endfor %}")
    assert template.render(HI, {}, RenderBudget(passes=10)) == "0123456789"
    with pytest.raises(TooCostly, match="more than 9 passes"):
        template.render(HI, {}, RenderBudget(passes=9))
    now = iter([0.0, 0.5, 0.5, 1.5])
    with pytest.raises(TooCostly, match="more than 1 s"):
        template.render(HI, {}, RenderBudget(seconds=1.0, clock=lambda: next(now)))


@pytest.mark.parametrize(
    "operation",
    [
        "x | sort",
        "x | unique | list",
        "x | map('upper') | list",
        "x | title",
        "x.title()",
        "x.split('a')",
        "x.rfind(z)",
    ],
)
def test_operations_outside_of_loops_are_within_the_budget_too(operation: str) -> None:
    """300 sorts of 40,000 characters, of a simple template, took 12 s on the event loop: only loops looked at the clock."""
    source = "{% set x = 'abcdefgh' %}" + "{% set x = x + x %}" * 12 + "{% set z = 'ab' + x[:15000] %}"
    template = compile_template(source + f"{{% set y = {operation} %}}" * 300)
    assert template.is_simple
    began = time.thread_time()
    with pytest.raises(TooCostly):
        template.render(HI, {}, RenderBudget(passes=4096, seconds=0.005, size=1 << 17))
    assert time.thread_time() - began < 0.1


DOUBLED = {
    "a block": "{% set x %}{{ x }}{{ x }}{% endset %}",
    "what a macro says": "{% macro f() %}{{ x }}{{ x }}{% endmacro %}{% set x = f() %}",
    "a list": "{% set x = [x, x] %}",
    "a tuple": "{% set x = (x, x) %}",
    "an object": "{% set x = {'a': x, 'b': x} %}",
    "a call of dict": "{% set x = dict(a=x, b=x) %}",
    "a sum of lists": "{% set x = [x] + [x] %}",
    "arguments": "{% macro g() %}{% set n.x = varargs %}{% endmacro %}{% set y = g(n.x, n.x) %}{% set x = n.x %}",
    "escapes": "{% set x = ('\"' ~ x) | tojson %}",
    "a format": "{% set x = '%(a)s%(a)s' % {'a': x} %}",
}


@pytest.mark.parametrize("how", DOUBLED)
@pytest.mark.parametrize("end", ["{{ x }}", "{{ x | tojson | length }}", "{{ x == [x] }}", ""])
def test_values_that_double_are_bounded(how: str, end: str) -> None:
    """Lists within lists, of 450 characters, took 14 s and a gigabyte on the event loop; a block, as much as there was."""
    template = compile_template("{% set n = namespace(x='abcdefgh') %}{% set x = n.x %}" + DOUBLED[how] * 26 + end)
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(TooCostly):
            template.render(HI, {}, RenderBudget(passes=4096, seconds=0.005, size=1 << 17))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20 and time.thread_time() - began < 0.2
    finally:
        tracemalloc.stop()


def test_namespaces_within_namespaces_are_not_written_out() -> None:
    source = "{% set x = namespace() %}" + "{% set x = namespace(a=x, b=x) %}" * 26
    assert compile_template(source + "{{ x }}").render(HI, {}, RenderBudget()) == "<namespace>"


def test_lines_of_json_are_bounded_with_their_indents() -> None:
    template = compile_template("{{ messages | tojson(indent=16) }}")
    assert template.is_simple
    deep: Any = [1] * 4000
    for _ in range(60):
        deep = [deep]
    with pytest.raises(TooCostly, match="more than 131072"):
        template.render([{"role": "user", "content": deep}], {}, RenderBudget(size=1 << 17))


def test_a_filter_that_is_named_to_map_must_be_simple_too() -> None:
    assert compile_template("{{ messages | map(attribute='role') | map('upper') | list }}").is_simple
    for source in ("{{ messages | map('center', 9) | list }}", "{{ messages | map(messages[0].role) | list }}"):
        assert not compile_template(source).is_simple


def test_slices_of_which_no_clock_is_looked_at_are_few() -> None:
    source = "{% set x = messages[0].content %}" + "{% set y = x[::-1] %}" * 400
    assert compile_template(source).is_simple and not compile_template(source * 3).is_simple


def test_a_pass_is_taken_for_each_item_that_a_filter_looks_at() -> None:
    template = compile_template("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}")
    assert template.render(list(HI) * 9, {}, RenderBudget(passes=9)) == "9"
    with pytest.raises(TooCostly, match="more than 8 passes"):
        template.render(list(HI) * 9, {}, RenderBudget(passes=8))


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


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' | center(10000000000) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ 'a\nb' | indent(10000000000) }}",
        "{% if 'x' | center(10000000000) %}y{% endif %}",
        "{% set a = 'x' | center(10000000000) %}",
    ],
)
def test_nothing_is_computed_while_a_template_is_compiled(source: str) -> None:
    """Filters of constants were, on the gateway's event loop, without a budget: gigabytes of 30 characters."""
    assert not compile_template(source).is_simple
    assert find_variables(f"{source}{{{{ from_outside }}}}") == {"from_outside"}


@pytest.mark.parametrize(
    "source",
    [
        "{% if",
        "{{ a | no_such_filter }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "a + " * 5000 + "a }}",
        "{% for i in a %}" * 25 + "{% endfor %}" * 25,
        "{% if a %}" * 200 + "{% endif %}" * 200,
        "{{ " + "9" * 5000 + " }}",
    ],
    ids=lambda source: source[:16],
)
def test_what_is_no_template_is_refused_in_one_line(source: str) -> None:
    """It was called a bug in the gateway."""
    with pytest.raises(
        BadRequest, match=r"^the chat template of this model cannot be read \(.{1,200}\): use /v1/comp.*t$"
    ):
        compile_template(source)
    assert find_variables(source) <= {"a"}


def test_templates_have_a_length_and_a_number_of_parts() -> None:
    """35 kB of a ~ b took minutes: for each all others were walked over."""
    assert compile_template("x" * MAX_TEMPLATE).render([], {}, RenderBudget()) == "x" * MAX_TEMPLATE
    with pytest.raises(BadRequest, match=f"it has {MAX_TEMPLATE + 1} characters; at most {MAX_TEMPLATE}"):
        compile_template("x" * (MAX_TEMPLATE + 1))
    joins = "{{ a ~ b ~ (c ~ a) }}" * (MAX_NODES // 10)
    assert compile_template(joins).render([], {"a": 1, "b": 2, "c": 3}, RenderBudget()) == "1231" * (MAX_NODES // 10)
    with pytest.raises(BadRequest, match=f"more than {MAX_NODES} names"):
        compile_template("{{a-b}}" * (MAX_NODES // 3 + 1))
    assert find_variables("{{a-b}}" * (MAX_NODES // 3 + 1)) == frozenset()
