"""manyhands.toml and the environment: who wins, and what a slip of the pen is told."""

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from manyhands.cli import app
from manyhands.cli.configured import CONFIGURED
from manyhands.cli.tls import policy_of
from manyhands.config import SCOPES, RequestConfig, SwarmConfig, WorkerConfig, home_from_env
from manyhands.config_file import _KINDS, NAME, SECTIONS, _checked, find_file, read_file, read_settings, variable
from manyhands.core import NodeId
from manyhands.errors import BadRequest
from manyhands.net.tls import TlsPolicy
from manyhands.swarm import record
from tests.test_docs import leaves


def home(path: Path) -> dict[str, str]:
    return {"MANYHANDS_HOME": str(path / "home")}


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / NAME).write_text(text)
    return folder / NAME


def test_without_anything_all_is_default(tmp_path: Path) -> None:
    found = read_settings(home(tmp_path), tmp_path)
    assert found.file is None and found.worker == WorkerConfig()
    assert {setting.source for setting in found.all} == {"default"}
    assert len(found.all) == sum(len(fields(kind)) for kind in SECTIONS.values())


def test_the_environment_beats_the_file_and_the_file_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, "[worker]\nmax_sessions = 3\nlog_bytes = 0\n[request]\nopen_timeout_s = 7\nstandby = true\n")
    found = read_settings({**home(tmp_path), "MANYHANDS_WORKER_MAX_SESSIONS": "9"}, tmp_path)
    assert (found.worker.max_sessions, found.worker.log_bytes, found.worker.cache_tokens) == (9, 0, 65536)
    assert found.request.standby and found.request.open_timeout_s == 7.0
    sources = [found.get("worker", key).source for key in ("max_sessions", "log_bytes", "cache_tokens")]
    assert sources == ["MANYHANDS_WORKER_MAX_SESSIONS", str(file), "default"]


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    env, work = home(tmp_path), tmp_path / "work"
    assert find_file(env, work) is None
    at_home = write(tmp_path / "home", "")
    assert find_file(env, work) == at_home
    here = write(work, "")
    assert find_file(env, work) == here
    named = write(tmp_path / "named", "")
    assert find_file({**env, "MANYHANDS_CONFIG": str(named)}, work) == named
    with pytest.raises(BadRequest, match="MANYHANDS_CONFIG names /nowhere, which is no file"):
        find_file({**env, "MANYHANDS_CONFIG": "/nowhere"}, work)


def test_texts_of_variables_become_what_the_key_is(tmp_path: Path) -> None:
    env = {
        **home(tmp_path),
        "MANYHANDS_REQUEST_STANDBY": "Yes",
        "MANYHANDS_SWARM_DENY": f"{'a' * 64}, {'b' * 64}",
        "MANYHANDS_NODE_THREADS": "2",
        "MANYHANDS_TICKET": "mh1x",
        "MANYHANDS_API": "",  # empty is as if it were not there
    }
    found = read_settings(env, tmp_path)
    assert found.request.standby and found.node.threads == 2
    assert found.swarm.deny == ("a" * 64, "b" * 64) and found.swarm.ticket == "mh1x"
    assert found.get("api", "url").source == "default"


@pytest.mark.parametrize(
    "text, said",
    [
        ("[worker]\nmax_session = 5", r"\[worker\] max_session = 5 is unknown; did you mean max_sessions\?"),
        ("[worker]\nnonsense = 5", r"is unknown; there are cache_bytes, cache_tokens"),
        ("[wroker]\nmax_sessions = 5", r"\[wroker\] is unknown; did you mean \[worker\]\?"),
        ("max_sessions = 5", r"max_sessions = 5 \(outside of any section\) is unknown"),
        ("worker = 5", r"worker is a section: write \[worker\]"),
        ('[worker]\nmax_sessions = "5"', r"\[worker\] max_sessions = '5'; it must be a whole number"),
        ("[worker]\nmax_sessions = true", r"max_sessions = True; it must be a whole number"),
        ("[worker]\nmax_sessions = 1.5", r"it must be a whole number"),
        ("[worker]\nmax_sessions = 2024-01-01", r"it must be a whole number"),
        ("[worker]\nmax_sessions = 0", r"manyhands.toml: \[worker\] max_sessions is 0; it must be at least 1"),
        ("[request]\nstandby = 1", r"it must be true or false"),
        ("[request]\nopen_timeout_s = inf", r"\[request\] open_timeout_s is inf; it must be more than 0"),
        ('[swarm]\nallow = "x"', r"it must be a list of texts"),
        ("[swarm]\nallow = [1]", r"it must be a list of texts"),
        ('[swarm]\ndeny = ["x"]', r"deny has 'x', which is not a node id"),
        ('[swarm]\nscope = "all"', r"scope is 'all'; it must be one of off, lan, trusted, public"),
        ('[swarm]\ndirectory = "chord"', r"directory is 'chord'; it must be one of gossip, dht, static"),
        ('[swarm]\nnodes = ["10.0.0.1:7 5-"]', r'nodes has .*; it must be "HOST:PORT" or "HOST:PORT LAYERS"'),
        ("[worker", r"is not TOML"),
    ],
)
def test_mistakes_of_a_file_are_one_line(text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, text)
    with pytest.raises(BadRequest, match=said) as caught:
        read_settings(home(tmp_path), tmp_path)
    assert NAME in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("MANYHANDS_WORKER_MAX_SESSION", "5", "MANYHANDS_WORKER_MAX_SESSION is unknown; did you mean MANYHANDS_WORKER"),
        ("MANYHANDS_WORKER_MAX_SESSIONS", "many", "MANYHANDS_WORKER_MAX_SESSIONS is 'many'; it must be a whole number"),
        ("MANYHANDS_WORKER_MAX_SESSIONS", "0", r"MANYHANDS_WORKER_MAX_SESSIONS: \[worker\] max_sessions is 0"),
        ("MANYHANDS_TIKET", "mh1", r"MANYHANDS_TIKET is unknown; did you mean MANYHANDS_TICKET\?"),
        ("MANYHANDS_HOM", "x", r"MANYHANDS_HOM is unknown; did you mean MANYHANDS_HOME\?"),
        ("MANYHANDS_WORKERS_MAX_SESSIONS", "5", r"did you mean MANYHANDS_WORKER_MAX_SESSIONS\?"),
        ("MANYHANDS_WORKER_MAX_SESSIONS", "9" * 30, "it must be at most 4294967295"),
        ("MANYHANDS_REQUEST_STANDBY", "maybe", "it must be one of 1, true, yes"),
        ("MANYHANDS_REQUEST_PATIENCE_S", "nan", "patience_s is nan"),
    ],
)
def test_mistakes_of_the_environment_are_one_line(name: str, value: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=said):
        read_settings({**home(tmp_path), name: value}, tmp_path)


def test_variables_of_others_are_left_alone(tmp_path: Path) -> None:
    read_settings({**home(tmp_path), "MANYHANDS_BASE": "x", "MANYHANDS_TEST": "x", "MANYHAND_TICKET": "x"}, tmp_path)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """Notepad writes one, and no editor shows it."""
    (tmp_path / NAME).write_bytes(b"\xef\xbb\xbf[worker]\r\nmax_sessions = 5\r\n")
    assert read_settings(home(tmp_path), tmp_path).worker.max_sessions == 5


@pytest.mark.parametrize("what", ["folder", "link"])
def test_a_file_that_is_none_is_not_passed_over(what: str, tmp_path: Path) -> None:
    """Its settings would be missed without a word."""
    if what == "folder":
        (tmp_path / NAME).mkdir()
    else:
        (tmp_path / NAME).symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadRequest, match=f"{NAME} cannot be read"):
        read_settings(home(tmp_path), tmp_path)


def test_a_tilde_in_the_homes_name_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quoted, or set by systemd, it reaches us as it is: a folder named ~ was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MANYHANDS_HOME", "~/swarm")
    assert home_from_env() == tmp_path / "swarm"


def test_numbers_beyond_all_measure(tmp_path: Path) -> None:
    write(tmp_path, f"[request]\npatience_s = 1{'0' * 400}")
    with pytest.raises(BadRequest, match=r"'patience_s' is an integer of 1329 bits; at most 64 are read"):
        read_settings(home(tmp_path), tmp_path)
    write(tmp_path, "[worker]\nevict_after_s = nan")
    with pytest.raises(BadRequest, match="evict_after_s is nan"):
        read_settings(home(tmp_path), tmp_path)


def test_a_secret_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    write(tmp_path, "[swarm]\nticket = 12345678")
    with pytest.raises(BadRequest, match=r"ticket = \(hidden\); it must be a text") as caught:
        read_settings(home(tmp_path), tmp_path)
    assert "1234" not in str(caught.value)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be read: No such file"):
        read_file(tmp_path / "absent")
    (tmp_path / "big").write_text("#" * (1 << 18) + "#")
    with pytest.raises(BadRequest, match="at most 262144"):
        read_file(tmp_path / "big")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(BadRequest, match="is not TOML"):
        read_file(tmp_path / "binary")


VALUES: Any = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(st.sampled_from(sorted(_KINDS, key=str)), VALUES)
def test_any_value_of_a_file_is_of_the_type_wanted_or_one_line(kind: Any, value: Any) -> None:
    try:
        checked = _checked("file: [x] y", kind, value)
    except BadRequest as error:
        assert "\n" not in str(error) and str(error).startswith("file: [x] y; it must be")
    else:
        wanted = {tuple[str, ...]: tuple, int | None: int}.get(kind, kind)
        assert type(checked) is wanted


@given(st.sampled_from([(s, f.name) for s, kind in SECTIONS.items() for f in fields(kind)]), st.text())
def test_any_text_of_a_variable_is_a_value_or_one_line(where: tuple[str, str], text: str) -> None:
    env = {"MANYHANDS_HOME": "/nowhere", variable(*where): text}
    try:
        read_settings(env, Path("/nowhere"))
    except BadRequest as error:
        assert str(error).splitlines()[0].startswith(variable(*where))


def test_every_default_of_an_option_stands_for_a_real_option() -> None:
    command: Any = typer.main.get_command(app)
    for path, parameters in CONFIGURED.items():
        inner = command
        for word in path.split():
            inner = inner.commands[word]
        assert set(parameters) <= {parameter.name for parameter in inner.params}, path
        for section, key in parameters.values():
            assert key in {field.name for field in fields(SECTIONS[section])}


def run(folder: Path, *arguments: str, **env: str) -> Any:
    names = {variable(s, f.name): None for s, kind in SECTIONS.items() for f in fields(kind)}
    return CliRunner().invoke(app, arguments, env={**names, **home(folder), **env})


def test_config_shows_what_is_in_force_and_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, '[worker]\nmax_sessions = 3\n[swarm]\nticket = "mh1secret"\n')
    shown = run(tmp_path, "config", MANYHANDS_API_KEY="mhk_secret").stdout
    assert "secret" not in shown.replace("(hidden)", "")
    tables = tomllib.loads(shown)
    assert tables["worker"]["max_sessions"] == 3 and "ticket" not in tables["swarm"]
    (tmp_path / NAME).write_text(shown)  # what it prints is a file that it reads
    told = json.loads(run(tmp_path, "config", "--json").stdout)
    assert told["file"] == str(tmp_path / NAME)
    assert {s["source"] for s in told["settings"] if s["key"] == "max_sessions"} == {str(tmp_path / NAME)}


ASK_A_GATEWAY = [
    ("jobs",),
    ("status",),
    ("chat",),
    ("infer", "-p", "x"),
    ("plan", "tales", "--swarm"),
    ("page",),
    ("code",),
    ("switch", "on"),
]


@pytest.mark.parametrize("command", ASK_A_GATEWAY, ids=lambda command: command[0])
def test_options_beat_environment_and_file(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command says which gateway it tried."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, '[api]\nurl = "http://127.0.0.1:1"\n')
    assert "127.0.0.1:1 " in str(run(tmp_path, *command).exception)
    assert "127.0.0.1:2 " in str(run(tmp_path, *command, MANYHANDS_API="http://127.0.0.1:2").exception)
    told = run(tmp_path, *command, "--api", "http://127.0.0.1:3", MANYHANDS_API="http://127.0.0.1:2")
    assert "127.0.0.1:3 " in str(told.exception)


def test_an_option_that_a_setting_s_variable_gives_is_given_by_the_file_too() -> None:
    """`chat` and `infer` asked the default gateway, whatever [api] url said."""
    settings = {variable(s, field.name): (s, field.name) for s, kind in SECTIONS.items() for field in fields(kind)}
    found = set()
    for path, command in leaves(typer.main.get_command(app)):
        for parameter in command.params:
            if where := settings.get(parameter.envvar):
                found.add(where)
                assert CONFIGURED.get(path, {}).get(parameter.name) == where, f"{path} {parameter.name}"
    assert found == {("swarm", "ticket"), ("api", "url"), ("api", "key")}


def test_a_broken_file_stops_commands_but_not_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "[worker]\nmax_session = 3\n")
    assert isinstance(run(tmp_path, "jobs").exception, BadRequest)
    assert isinstance(run(tmp_path, "config").exception, BadRequest)
    assert run(tmp_path, "--help").exit_code == 0


def test_whom_links_let_in() -> None:
    friend, foe = "a" * 64, "b" * 64
    assert policy_of(SwarmConfig()) == TlsPolicy()
    policy = policy_of(SwarmConfig(scope="trusted", allow=(friend, foe), deny=(foe,)))
    assert [policy.admits(NodeId(node)) for node in (friend, foe, "c" * 64)] == [True, False, False]
    with pytest.raises(BadRequest, match="scope is off"):
        policy_of(SwarmConfig(scope="off"))


def test_scopes_are_those_of_the_swarm() -> None:
    assert set(SCOPES) == set(record.SCOPES)


def test_credits_that_no_hop_grants_is_refused_at_start() -> None:
    assert RequestConfig(credits=64).credits == 64
    with pytest.raises(BadRequest, match="credits is 65 steps; hops grant at most 64"):
        RequestConfig(credits=65)


def test_draft_is_one_of_its_values() -> None:
    with pytest.raises(BadRequest, match="draft is 'always'; it is one of auto, off"):
        RequestConfig(draft="always")
