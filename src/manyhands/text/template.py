"""A checkpoint's chat template, rendered within bounds. Pure; without a tokenizer.

A template is an untrusted program, run on a client's words. Jinja's sandbox keeps it away from the process; the bounds
here keep it from using the process up: `RenderBudget` counts passes of loops and macros, looks at the clock at each, and limits
what one operation may build. What these cannot see, say one filter over a long range, is for the caller's process limits:
`is_simple` says which templates use only operations whose cost these bounds hold.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from datetime import datetime
from functools import wraps
from itertools import islice
from threading import Lock
from types import CodeType
from typing import Any, Final, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from manyhands.errors import BadRequest
from manyhands.text.render_budget import RenderBudget, TooCostly

Object = dict[str, Any]
# Compiling takes a second or two at most.
MAX_TEMPLATE: Final = 1 << 17  # characters; gpt-oss has 17,000
MAX_NODES: Final = 1 << 15  # names, constants, operations, tags; gpt-oss has some 3,000
MAX_KEPT: Final = (
    128  # compiled templates, some megabytes each at the limits: two of each model that a gateway serves, and more
)
# Names under which the bounds reach a compiled template; no template can spell them.
_PASS, _JOIN, _WEIGH = "pass_5f1c0e", "join_5f1c0e", "weigh_5f1c0e"
# Operations whose result is no longer than what goes in, or a constant more.
_SIMPLE_FILTERS = frozenset(
    "trim length count tojson first last list string default d upper lower items dictsort safe e escape int float "
    "capitalize title map selectattr rejectattr select reject unique sort reverse abs round".split()
)
_SIMPLE_NODES: Final = 1 << 12  # that a simple template has at most: no clock is looked at for a slice, or a comparison
# Filters that look at the items of a list, or at the characters of a text, one by one.
_WALKING: Final = frozenset("map select reject selectattr rejectattr sort unique dictsort".split())
_PER_CHARACTER: Final = 64  # comparisons for each character that a value may have
_SIMPLE_CALLS = frozenset(
    "raise_exception strftime_now namespace dict split rsplit strip lstrip rstrip startswith endswith items keys values "
    "get upper lower title capitalize index find rfind removeprefix removesuffix isdigit".split()
)


class _Generation(Extension):
    """{% generation %} marks what a model wrote, for training; here it is its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace whose names cannot reach into the interpreter."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no name {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # what it holds may be other namespaces, each twice


class _Generator(CodeGenerator):
    """Computes nothing ahead: {{ "x" | center(10 ** 9) }} would cost its gigabyte, and no budget, while it is compiled."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Tracker(_Generator, TrackingCodeGenerator):
    """Finds the variables that a template takes from outside, and computes nothing ahead either."""

    def __init__(self, environment: "_Environment") -> None:
        super().__init__(environment)
        self.optimizer = None


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with every loop, macro and growing operation under the render's budget."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})
    code_generator_class = _Generator

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = self._to_json
        self.filters |= {name: self._counted(name, given) for name, given in self.filters.items()}
        self.globals |= {"raise_exception": _raise, "strftime_now": _now, "namespace": _Namespace}
        self.budget = RenderBudget()  # of the render that runs: one at a time

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_TEMPLATE:
            raise TemplateError(f"it has {len(source)} characters; at most {MAX_TEMPLATE} are read")
        tree = super()._parse(source, name, filename)
        every = [tree, *islice(tree.find_all(nodes.Node), MAX_NODES)]
        if len(every) > MAX_NODES:
            raise TemplateError(f"it has more than {MAX_NODES} names, constants, operations and tags")
        _join_within_bounds(every)
        blocks: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for block in blocks:
            count = nodes.Call(nodes.Name(_PASS, "load"), [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(count))
            if isinstance(block, nodes.For) and block.test is not None:  # runs also for what it drops
                block.test = nodes.And(count, block.test)
        return tree

    def _counted(self, name: str, given: Callable[..., Any]) -> Callable[..., Any]:
        """A filter under the render's budget: those that look at items one by one take a pass for each."""
        at = int(hasattr(given, "jinja_pass_arg"))  # before the value the environment is passed, or the context

        @wraps(given)
        def counted(*args: Any, **kwargs: Any) -> Any:
            is_walked = name in _WALKING and isinstance(args[at], Sized)
            if is_walked:
                self.budget.take(len(args[at]))
            self.budget.look()
            made = given(*args, **kwargs)
            self.budget.check(len(made) if isinstance(made, str) else 0)
            return made

        return counted

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.look()
        if operator == "**" and _magnitude(left) ** min(_magnitude(right), 64) > 1 << 64:
            raise TooCostly(f"{left!r:.20} ** {right!r:.20} is out of bounds")
        if operator == "%" and isinstance(left, str):
            widths = sum(int(width) for width in re.findall(r"\d{1,18}", left))
            self.budget.check(len(left) + widths + left.count("%") * self.budget.spread(right)[0])
            if "*" in left:
                raise TooCostly("a text's width cannot be a variable")
        if operator == "+" and _is_long(left) and _is_long(right):
            self.budget.weigh([left, right])
        if operator == "*":
            self.budget.check(_product(left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        text = getattr(__obj, "__self__", None)  # of a text's method
        if text is __self.budget:  # our own call
            return __obj(*args)
        __self.budget.look()
        if __obj is dict or (isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs)):
            __self.budget.weigh([args, kwargs])
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and not isinstance(value, bool):
                __self.budget.check(abs(value))  # center(10**9), indent(10**9)
            if isinstance(value, str) and isinstance(
                text, str
            ):  # of rfind, and of lstrip the time grows by both lengths
                __self.budget.check(len(value) * len(text) / _PER_CHARACTER)
        return super().call(__context, __obj, *args, **kwargs)

    def concat(self, pieces: Iterable[str], /) -> str:
        """What a macro says, or a block that is set to a variable."""
        made = list(pieces)
        self.budget.look()
        self.budget.check(sum(map(len, made)))
        return "".join(made)

    def _to_json(self, value: Any, ensure_ascii: bool = False, indent: Any = None, **form: Any) -> str:
        """JSON without the escapes of HTML that Jinja's own filter makes. `form`: separators, sort_keys."""
        if isinstance(indent, int) and indent > 16:
            raise TooCostly(f"tojson is indented by {indent}; at most 16")
        if indent:
            size, depth = self.budget.spread(value)
            self.budget.check(size * depth)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **form)


def _join_within_bounds(every: Iterable[nodes.Node]) -> None:
    """Replace `a ~ b` by a call of RenderBudget.join, wherever it stands below one of `every` node of a tree, and a list, a
    tuple or an object by one of RenderBudget.weigh."""
    for parent in every:
        for name, value in parent.iter_fields():
            if isinstance(value, list):
                value[:] = map(_joined, value)  # in place: a call has the list of the operation that it replaces
            elif isinstance(value, nodes.Node):
                setattr(parent, name, _joined(value))


def _joined(node: Any) -> Any:
    is_held = isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    if not is_held and not isinstance(node, nodes.Concat):
        return node
    name = nodes.Name(_WEIGH if is_held else _JOIN, "load")
    call = nodes.Call(name, [node] if is_held else node.nodes, [], None, None, lineno=node.lineno)
    call.environment = name.environment = node.environment
    return call


def _magnitude(value: Any) -> float:
    return abs(value) if isinstance(value, int | float) else 0.0


def _is_long(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _product(left: Any, right: Any) -> float:
    """The length of a text or list repeated; of a product of numbers, as many digits as it may have."""
    if _is_long(left) or _is_long(right):
        long, count = (left, right) if _is_long(left) else (right, left)
        return float(len(long)) * max(_magnitude(count), 0.0)
    return sum(value.bit_length() for value in (left, right) if isinstance(value, int))


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class TemplateCode(NamedTuple):
    """What a template is compiled to. `variables`: those that it takes from outside."""

    code: CodeType
    is_simple: bool  # it uses only operations whose cost a RenderBudget sees
    variables: frozenset[str]


def compile_code(source: str) -> TemplateCode | str:
    """A template's code, or why it cannot be read. A second or two at the limits, of which the interpreter's lock is held for
    half: large ones are compiled in a process (apart.py)."""
    try:
        environment = _Environment()
        tree = environment._parse(source, None, None)
        tracker = _Tracker(environment)
        tracker.visit(tree)
        variables = frozenset(tracker.undeclared_identifiers - {_PASS, _JOIN, _WEIGH})
        return TemplateCode(environment.compile(tree), _is_simple(tree), variables)
    except Exception as error:  # it is compiled to Python, which raises many things for what is too deep or too wide
        return " ".join(str(error).split())[:200] or type(error).__name__


class ChatTemplate:
    """One compiled template."""

    def __init__(self, made: TemplateCode) -> None:
        self._environment = _Environment()
        given = self._environment.make_globals(None)
        self._template = self._environment.template_class.from_code(self._environment, made.code, given, None)
        self.is_simple, self.variables = made.is_simple, made.variables

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], budget: RenderBudget) -> str:
        """The text of a conversation. Raises TooCostly, TemplateError, and whatever a template's operations do."""
        self._environment.budget = budget
        own = {_PASS: budget.take, _JOIN: budget.join, _WEIGH: budget.weigh}
        pieces, size = [], 0
        known = {"add_generation_prompt": True, "documents": None, **variables, **own}
        for piece in self._template.generate(messages=list(map(_with_thoughts, messages)), **known):
            size += len(piece)
            budget.check(size)
            pieces.append(piece)
        return "".join(pieces)


_kept: Final = dict[str, ChatTemplate | str]()  # by source, the one asked for last behind the others
_keeping: Final = Lock()


def is_read(source: str) -> bool:
    """Whether a template is kept, and need not be compiled."""
    return source in _kept


def keep_template(source: str, made: TemplateCode | ChatTemplate | str) -> ChatTemplate | str:
    """Keep what a template was compiled to, or why it cannot be; of more than MAX_KEPT, what was not asked for longest goes."""
    read = ChatTemplate(made) if isinstance(made, TemplateCode) else made
    with _keeping:
        _kept[source] = _kept.pop(source, read)
        while len(_kept) > MAX_KEPT:
            del _kept[next(iter(_kept))]
        return _kept[source]


def _read(source: str) -> ChatTemplate | str:
    found = _kept.get(source)
    return keep_template(source, compile_code(source) if found is None else found)


def compile_template(source: str) -> ChatTemplate:
    """A ChatTemplate, made once. Raises BadRequest for what is none, or more than is read."""
    made = _read(source)
    if isinstance(made, str):
        raise BadRequest(
            f"the chat template of this model cannot be read ({made}): use /v1/completions with a plain prompt"
        )
    return made


def find_variables(source: str) -> frozenset[str]:
    """The variables that a template takes from outside; none if it is no template that can be read."""
    made = _read(source)
    return frozenset() if isinstance(made, str) else made.variables


def _with_thoughts(message: Mapping[str, Any]) -> Object:
    """A message whose thoughts stand under each name that templates read: the standard one, and gpt-oss's."""
    thoughts = message.get("reasoning_content")
    return dict(message) if thoughts is None else {"thinking": thoughts, **message}


def _is_simple(tree: nodes.Template) -> bool:
    """Whether it uses only operations whose cost a RenderBudget sees."""
    if next(islice(tree.find_all(nodes.Node), _SIMPLE_NODES, None), None) is not None:
        return False
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    filters = [node.name for node in tree.find_all(nodes.Filter)]
    calls = [_called(node.node) for node in tree.find_all(nodes.Call)]
    others = (nodes.Mul, nodes.Pow, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.FilterBlock)
    mapped = [given for node in tree.find_all(nodes.Filter) if node.name == "map" for given in node.args[:1]]
    return (
        set(filters) <= _SIMPLE_FILTERS
        and all(isinstance(given, nodes.Const) and given.value in _SIMPLE_FILTERS for given in mapped)
        and set(calls) <= _SIMPLE_CALLS | macros | {_PASS, _JOIN, _WEIGH}
        and next(tree.find_all(others), None) is None
    )


def _called(node: nodes.Node) -> str:
    """The name of what a Call calls; "" if it has none."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.name if isinstance(node, nodes.Name) else ""
