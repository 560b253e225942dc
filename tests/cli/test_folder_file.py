"""A manyhands.toml that came with the working folder: what it says of others is told, and it gets no key of the user's."""

from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from manyhands.cli import app
from manyhands.config_file import NAME, SECTIONS, variable

KEY = "mhk_mine"


class Listener:
    """A gateway of another's, which keeps what it is shown."""

    def __init__(self) -> None:
        shown: list[str | None] = []
        self.shown = shown

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shown.append(self.headers["authorization"])
                self.send_error(404)

            do_DELETE = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That commands are run in; the user's home is another one."""
    (tmp_path / "work").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def run(folder: Path, *arguments: str, **env: str) -> Any:
    names = {variable(section, field.name): None for section, kind in SECTIONS.items() for field in fields(kind)}
    home = {"MANYHANDS_HOME": str(folder.parent / "home"), "MANYHANDS_CONFIG": None}
    return CliRunner().invoke(app, arguments, env={**names, **home, **env})


def test_a_key_of_the_user_s_does_not_go_where_the_folder_s_file_says(folder: Path, listener: Listener) -> None:
    (folder / NAME).write_text(f'[api]\nurl = "{listener.url}"\n')
    for given in ({"MANYHANDS_API_KEY": KEY}, {}):
        told = run(folder, "jobs", *(() if given else ("--api-key", KEY)), **given)
        assert f"your key is not sent to {listener.url}, which {folder / NAME} alone names" in told.stderr
    assert run(folder, "workers", "evict", "x", MANYHANDS_API_KEY=KEY).stderr.count("your key is not sent") == 1
    assert listener.shown == [None] * 3


def test_a_key_goes_where_its_owner_says(folder: Path, listener: Listener) -> None:
    """The gateway on the command line or in a variable; the file that has both; the user's own file, wherever that is."""
    table = f'[api]\nurl = "{listener.url}"\n'
    (folder / NAME).write_text(table)
    run(folder, "jobs", "--api", listener.url, MANYHANDS_API_KEY=KEY)
    run(folder, "jobs", MANYHANDS_API=listener.url, MANYHANDS_API_KEY=KEY)
    run(folder, "jobs", MANYHANDS_CONFIG=str(folder / NAME), MANYHANDS_API_KEY=KEY)
    run(folder, "jobs", MANYHANDS_HOME=str(folder), MANYHANDS_API_KEY=KEY)
    (folder / NAME).write_text(f'{table}key = "{KEY}"\n')
    assert run(folder, "jobs").stderr == ""
    (folder / NAME).rename(folder.parent / "home" / NAME)
    run(folder, "jobs", MANYHANDS_API_KEY=KEY)
    assert listener.shown == [f"Bearer {KEY}"] * 6


@pytest.mark.parametrize(
    "table, arguments, said",
    [
        ('[api]\nurl = "http://192.0.2.1:1"', ("jobs", "-n", "x"), ""),  # refused before anything is asked
        ('[api]\nurl = "ftp://gateway.example"', ("jobs",), "[api] url = ftp://gateway.example"),
        ('[api]\nurl = "http://[::1"', ("status",), "[api] url = http://[::1"),
        ('[api]\nurl = "ftp://localhost:1"', ("jobs",), ""),
        ('[api]\nurl = "ftp://gateway.example"', ("jobs", "--api", "ftp://mine"), ""),
        ('[api]\nurl = "ftp://gateway.example"', ("workers", "readmit", "x"), "[api] url = ftp://gateway.example"),
        ('[swarm]\nticket = "mh1x"', ("chat",), "[swarm] ticket"),
        ('[swarm]\nticket = "mh1x"', ("infer", "-p", "x"), "[swarm] ticket"),
        ('[swarm]\nticket = "mh1x"', ("infer", "-p", "x", "--ticket", "mh1y"), ""),
        ('[swarm]\nticket = "mh1x"\n[api]\ninsecure = true', ("join",), "[api] insecure, [swarm] ticket"),
        ('[api]\nlisten = "0.0.0.0:8000"\n[swarm]\nticket = "mh1x"', ("up", "tales"), "[api] listen, [swarm] ticket"),
        ('[api]\nlisten = "127.0.0.1:8000"\n[swarm]\nticket = "mh1x"', ("up", "tales"), "sets [swarm] ticket;"),
        ("[worker]\nmax_sessions = 3\n[request]\npatience_s = 1", ("chat", "--api", "ftp://mine"), ""),
    ],
)  # fmt: skip
def test_what_a_command_takes_from_the_folder_s_file_about_others_is_one_line(
    table: str, arguments: tuple[str, ...], said: str, folder: Path
) -> None:
    """Each of these commands ends with an error of its own then: no gateway is asked, no ticket is one."""
    (folder / NAME).write_text(f"{table}\n")
    told = run(folder, *arguments)
    assert told.exit_code != 0
    if not said:
        assert "note" not in told.stderr
        return
    lines = [line for line in told.stderr.splitlines() if line.startswith("note: ")]
    assert len(lines) == 1 and said in lines[0] and str(folder / NAME) in lines[0] and "MANYHANDS_CONFIG" in lines[0]
    named = run(folder, *arguments, MANYHANDS_CONFIG=str(folder / NAME))
    assert named.exit_code != 0 and "note" not in named.stderr, "the user named it"
