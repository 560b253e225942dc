"""The pages say what is so: links lead somewhere, commands parse, names exist, marked snippets run, tables are complete.

A Python fence marked `run` is executed in an empty folder (`run slow`: in the slow ring); `json answer` is compared with
what the command prints.
"""

import ast
import asyncio
import dataclasses
import json
import re
import shlex
import struct
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from manyhands.cli import app
from manyhands.cli.show import as_object
from manyhands.config_file import SECTIONS
from manyhands.core import SamplingParams
from manyhands.errors import ManyhandsError
from manyhands.net.tls import TlsPolicy
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.wire import header
from manyhands.wire.message import LANES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND: Any = typer.main.get_command(app)


class Block(NamedTuple):
    """A fenced block: its language with marks ("python run slow"), and its text."""

    page: str
    line: int
    info: list[str]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text("utf8")
        for match in FENCE.finditer(text):
            yield Block(page.name, text.count("\n", 0, match.start()) + 1, match[1].split(), match[2])


def snippets() -> list[Any]:
    marked = [block for block in blocks() if block.info[:2] == ["python", "run"]]
    return [pytest.param(b, id=str(b), marks=[pytest.mark.slow] if "slow" in b.info else []) for b in marked]


def command_lines() -> list[Any]:
    """Every `manyhands ...` line of the shell blocks, with its continuation lines."""
    found = []
    for block in blocks():
        if block.info[:1] == ["sh"]:
            lines = block.text.replace("\\\n", " ").splitlines()
            wanted = [line.strip() for line in lines if re.match(r"\s*(\.venv/bin/)?manyhands\s", line)]
            exports = "export MANYHANDS_TICKET=" in block.text
            found += [pytest.param(line, exports, id=f"{block}: {line[:60]}") for line in wanted]
    return found


def slugs(page: Path) -> set[str]:
    """What GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text("utf8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in slugs(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("block", snippets())
def test_snippets_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    code = compile("\n" * block.line + block.text, block.page, "exec")
    exec(code, {"__name__": "__main__"})  # our own pages


@pytest.mark.parametrize("line, has_ticket", command_lines())
def test_commands_parse(line: str, has_ticket: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_TICKET", raising=False)
    if has_ticket:
        monkeypatch.setenv("MANYHANDS_TICKET", "mh1")
    given = shlex.split(re.split(r"\s[|&>]", line)[0])[1:]
    # A model's name is checked when it is parsed.
    words = ["tales" if word in ("MODEL", "FOLDER") else word for word in given]
    command, name = COMMAND, "manyhands"
    while True:
        with command.make_context(name, list(words)) as context:
            if not hasattr(command, "resolve_command"):
                return
            rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
            if not rest and command.invoke_without_command:
                return
            name, command, words = command.resolve_command(context, rest)


def leaves(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaves(inner, f"{path} {name}".strip())
    else:
        yield path, command


@pytest.mark.parametrize("path, command", [pytest.param(*leaf, id=leaf[0]) for leaf in leaves(COMMAND)])
def test_every_option_is_described(path: str, command: Any) -> None:
    page = (ROOT / "docs" / "cli.md").read_text("utf8")
    assert path in page
    for parameter in command.params:
        for name in parameter.opts:
            if name.startswith("--") and not getattr(parameter, "hidden", False):
                assert f"`{name}`" in page or f" {name} " in page, f"{path} {name}"


def options_of(command: Any) -> set[str]:
    """Every long option of a command and of those below it."""
    inner = getattr(command, "commands", {}).values()
    return {name for parameter in command.params for name in parameter.opts + parameter.secondary_opts}.union(
        {"--help"}, *(options_of(each) for each in inner)
    )


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_options_that_are_named_exist(page: Path) -> None:
    """In code spans and commands: options of `manyhands`, or of a script in bench/ or tools/."""
    scripts = [file.read_text("utf8") for folder in ("bench", "tools") for file in (ROOT / folder).glob("*.py")]
    scripts.append((ROOT / "src" / "manyhands" / "engine" / "golden.py").read_text("utf8"))
    known = options_of(COMMAND) | set(re.findall(r"\"(--[a-z][a-z-]+)\"", "".join(scripts)))
    text = page.read_text("utf8")
    code = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    code += [block.text for block in blocks() if block.page == page.name and block.info[:1] == ["sh"]]
    ours = [part for part in code if not re.search(r"pip |ruff|mypy", part)]
    named = {name for part in ours for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", part)}
    assert named <= known, f"{page.name}: {sorted(named - known)}"


def test_make_targets_and_modules_exist() -> None:
    made = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text("utf8")
        assert set(re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE)) <= made
        for module in re.findall(r"python -m bench\.(\w+)", text):
            assert module == "NAME" or (ROOT / "bench" / f"{module}.py").exists(), module
        if page.name != "CHANGELOG.md":
            for path in re.findall(r"(?<![\w/.])((?:examples|tests|bench|tools)/[\w/.-]*\w)(?!\*)\b", text):
                assert (ROOT / path).exists() or path == "bench/nightly.json", f"{page.name}: {path}"


def test_files_named_in_contributing_exist() -> None:
    """The twenty questions of where something is, and every file that a recipe names."""
    page = (ROOT / "CONTRIBUTING.md").read_text("utf8")
    rows = re.findall(r"^\| (\d+) [^|]+\| (.+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    assert all("`" in answer for _, answer in rows)
    named = re.findall(r"`((?:src|docs|tests|tools|bench|\.ci|\.github)/[\w./-]*)`", page)
    assert len(named) > 60
    for path in named:
        assert "NAME" in path or (ROOT / path).exists(), path


def test_every_benchmark_with_a_verdict_is_in_the_table() -> None:
    table = (ROOT / "docs/benchmarks.md").read_text()
    scripts = {path.stem for path in (ROOT / "bench").glob("*.py") if "finish(" in path.read_text()} - {"report"}
    assert not {name for name in scripts if f"`python -m bench.{name}" not in table}


def test_workflows_call_targets_that_exist() -> None:
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    files = [ROOT / ".ci" / "run", ROOT / ".pre-commit-config.yaml", *(ROOT / ".github").rglob("*.yml")]
    called = [
        target for file in files for target in re.findall(r"^[^#\n]*\bmake ([\w-]+)", file.read_text(), re.MULTILINE)
    ]
    assert {"check", "test", "nightly"} <= set(called) <= made
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for file in files[1:]:
        for module in re.findall(r"python -m ([\w.]+)", file.read_text()):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), f"{file.name}: {module}"


def defined(tree: ast.Module) -> set[str]:
    """Names of a module: functions, classes, Class.method."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_code_exist(page: Path) -> None:
    for file, name in re.findall(r"`([\w/]+\.py):([A-Za-z_][\w.]*)`", page.read_text("utf8")):
        path = ROOT / "src" / "manyhands" / file
        assert path.exists(), f"{page.name}: {file}"
        assert name in defined(ast.parse(path.read_text("utf8"))), f"{page.name}: {file}:{name}"


def test_the_header_is_laid_out_as_described() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text("utf8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", page, re.MULTILINE)
    assert [name for _, _, name in rows] == [n if n != "num_rows" else "count" for n in header.Header._fields]
    sizes = [int(size) for _, size, _ in rows]
    assert [int(offset) for offset, _, _ in rows] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == header.HEADER_BYTES == struct.calcsize("<4BI16s7I2B")
    assert f"{header.HEADER_BYTES} bytes" in page
    for kind, message in header.KINDS.items():
        assert re.search(rf"^\| ([\d, ]*\b)?{kind}\b[\d, ]* \| .*{message.__name__}", page, re.MULTILINE), message


@pytest.mark.parametrize("config", [*SECTIONS.values(), TlsPolicy, SamplingParams], ids=lambda c: c.__name__)
def test_every_described_field_exists(config: Any) -> None:
    """The table below a heading with the dataclass's name: its rows are fields, and all of them."""
    page = (ROOT / "docs" / "configuration.md").read_text("utf8")
    (part,) = [part for part in page.split("\n## ") if re.match(rf"[^\n]*\b{config.__name__}:", part)]
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", part, re.MULTILINE)]
    named = [name for row in rows for name in row]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(config))


def test_keys_that_are_named_exist() -> None:
    """`[section] key` on any page, and `section.key` in the right column of "Names in other systems"."""
    page = (ROOT / "docs" / "configuration.md").read_text("utf8")
    mapping = re.findall(r"^\| .* \| (.*) \|$", page[page.index("## Names in other systems") :], re.MULTILINE)
    named = re.findall(r"`([a-z]+)\.(\w+)`", "".join(mapping))
    for text in (p.read_text("utf8") for p in PAGES):
        named += re.findall(r"`\[([a-z]+)\] (\w+)", text)
    assert len(named) > 20
    for section, key in named:
        assert key in {field.name for field in dataclasses.fields(SECTIONS[section])}, f"[{section}] {key}"


PLAIN = {
    r"nobody|whoever|(some|any|every)body": "no node, a peer, every member, its holder ...",
    r"liars?|lied": "untrusted node, a peer that sent wrong bytes ...",
    r"strangers?|knock\w*": "unknown peer, client without the secret ...",
    r"the books": "statistics",
}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_words_are_plain(page: Path) -> None:
    """The field's terms."""
    text = re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text("utf8")))
    for words, better in PLAIN.items():
        assert not (found := re.search(rf"\b({words})\b", text, re.IGNORECASE)), f"{page.name}: {found[0]}: {better}"


def test_words_of_the_code_and_its_tests_are_plain() -> None:
    """Docstrings, comments, messages and names. The text of the bundled model's stories is not ours to judge."""
    for path in sorted([*(ROOT / "src" / "manyhands").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        for words, better in PLAIN.items() if path.name != "test_docs.py" else ():
            found = re.search(rf"(?<![a-z])({words})(?![a-z])", path.read_text("utf8"), re.IGNORECASE)
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}: {better}"


@pytest.mark.parametrize("config", [*SECTIONS.values(), TlsPolicy, SamplingParams], ids=lambda c: c.__name__)
def test_every_field_is_described(config: Any) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf8")
    for field in dataclasses.fields(config):
        assert f"`{field.name}`" in page, field.name


def test_every_dependency_has_its_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text("utf8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    for line in project["dependencies"]:
        name = re.match(r"[\w-]+", line)
        assert name and f"| {name[0]} |" in page, line


def test_a_release_lists_each_change_once() -> None:
    """Two entries with the same first line are one: a merge kept those of both sides."""
    for release in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        counted = Counter(line for line in release.splitlines() if line.startswith("- "))
        assert [line for line, count in counted.items() if count > 1] == []


def test_lanes_and_errors_are_described() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text("utf8")
    for lane, kinds in LANES.items():
        assert f"| {lane} | {', '.join(kind.__name__ for kind in kinds)} |" in page
    errors = [ManyhandsError]
    while errors:
        error = errors.pop()
        errors += error.__subclasses__()
        assert error.__module__ != "manyhands.errors" or f"`{error.code}`" in page, error


def test_an_answer_has_the_documented_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    folder = make_tiny("llama", tmp_path / "tiny", layers=2)
    (documented,) = [json.loads(block.text) for block in blocks() if block.info == ["json", "answer"]]

    async def main() -> dict[str, Any]:
        faults = Faults()
        async with memory_swarm(folder, "0-0,1-1", spares=["0-1"], wrap=faults.wrap) as swarm:
            faults.at("decode", swarm.hops[1], lambda: faults.die(swarm.hops[1]), skip=1)
            return as_object(await swarm.origin.complete(swarm.origin.request("Hi", SamplingParams(max_tokens=4))), 1.0)

    said = json.loads(json.dumps(asyncio.run(main())))
    assert form(said) == form(documented)
    assert [e["kind"] for e in said["events"]] == [e["kind"] for e in documented["events"]]


def form(value: Any) -> Any:
    """Keys and types; lists by their first item, numbers alike."""
    if isinstance(value, dict):
        return {key: form(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [form(value[0])]
    return "number" if isinstance(value, int | float) else type(value).__name__
