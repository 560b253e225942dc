"""No module is imported on the loop of a node that has links: cli/ahead.py names them all, and one that hosts loads no more.

Nor does the cyclic collector walk the libraries' objects there, nor does anything wait for a disk.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import manyhands
from bench.colony import complete

# Notes each import that finds an event loop running after a Node was entered, how many objects each full run of the
# collector walks there, and who waits for a disk; prints them when the command ends.
WATCHED = """
import asyncio, gc, json, os, sys, traceback
from importlib.machinery import PathFinder
from manyhands.node import Node
late = []
class Finder:
    def find_spec(name, path=None, target=None):
        if entered and asyncio._get_running_loop() is not None and PathFinder.find_spec(name, path) is not None:
            late.append(name)
entered, walked, synced = [], [], []
sync = os.fsync
def watched_sync(file):
    if entered and asyncio._get_running_loop() is not None:
        synced.append(traceback.format_stack()[-6:])
    sync(file)
os.fsync = watched_sync
def collects(phase, told):
    if phase == "start" and told["generation"] == 2 and entered and asyncio._get_running_loop() is not None:
        walked.append(len(gc.get_objects()))
gc.callbacks.append(collects)
enter = Node.__aenter__
async def watched(self):
    entered.append(self)
    return await enter(self)
Node.__aenter__ = watched
sys.meta_path.insert(0, Finder)
from manyhands.cli import main
try:
    main()
finally:
    print(json.dumps({"event": "imports", "late": late, "nodes": len(entered), "walked": walked, "synced": synced,
        "idle": [name for name in ("jinja2", "manyhands.origin.origin", "manyhands.net.iroh.transport") if name in sys.modules]
    }), flush=True)
"""


@pytest.mark.parametrize("command", ["up", "serve", "serve without api"])
def test_a_node_with_links_imports_nothing_on_its_loop(llama: Path, tmp_path: Path, command: str) -> None:
    where = ["--listen", "127.0.0.1:0", "--name", "alone", "--threads", "1", "--json", "--while-stdin"]
    layers = ["--layers", "0-5"] if command != "up" else []
    api = ["--api", "127.0.0.1:0"] if command != "serve without api" else []
    line = [sys.executable, "-c", WATCHED, command.split()[0], str(llama), *layers, *where, *api]
    process = subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MANYHANDS_HOME": str(tmp_path / "home")},
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        said = []
        for text in process.stdout:
            said.append(json.loads(text))
            if said[-1]["event"] == ("api" if api else "serving"):
                if api:
                    url = said[-1].get("api") or said[-1]["url"]
                    asyncio.run(complete(url, "a", 4, model=said[-1].get("model", llama.name)))
                else:
                    with manyhands.connect(said[-1]["ticket"], str(llama)) as client:
                        assert client.generate("a", max_tokens=4, ignore_eos=True).completion_tokens == 4
                process.stdin.close()
    assert said[-1]["event"] == "imports", said
    assert said[-1]["nodes"] == 1
    assert not said[-1]["late"], said[-1]["late"]
    assert not said[-1]["synced"], said[-1]["synced"]
    assert said[-1]["walked"] and max(said[-1]["walked"]) < 60_000, said[-1]["walked"]  # the libraries' are 100,000
    if not api:
        assert not said[-1]["idle"], said[-1]["idle"]
