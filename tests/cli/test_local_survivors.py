"""`manyhands local` without a spare: survivors of a death load the lost layers, and the text is the same (L9-19)."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROMPT = ["-p", "Once upon a time", "--max-tokens", "60", "--seed", "4", "-t", "0.8"]


def told(*options: str, nodes: int = 3, **settings: str) -> dict[str, Any]:
    """What `local tales` of so many node processes says, as JSON."""
    command = [
        sys.executable,
        "-m",
        "manyhands.cli",
        "local",
        "tales",
        "--nodes",
        str(nodes),
        "--threads",
        "1",
        *PROMPT,
    ]
    done = subprocess.run(
        [*command, *options, "--json"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.nightly
def test_survivors_take_the_layers_of_a_node_that_is_killed() -> None:
    """lattice9's demonstration: three workers, one dies, the stream goes on over two. Twice, so that one node holds all."""
    calm = told()
    one = told("--kill", "1@10")
    (repair,) = one["repairs"]
    assert repair["lost"] == ["node-1"] and {*repair["replacement"]} <= {"node-0", "node-2"}
    assert one["text"] == calm["text"] and "reshard" in {event["kind"] for event in one["events"]}
    two = told("--kill", "1@10", "--kill", "2@30")
    assert two["text"] == calm["text"] and len(two["repairs"]) == 2


def test_where_all_processes_have_ended_nothing_is_waited_for() -> None:
    """Patience of an hour is for nodes that may come back; a process of this swarm does not."""
    done = told("--fallback", "--kill", "0@10", nodes=1, MANYHANDS_REQUEST_PATIENCE_S="3600")
    (repair,) = done["repairs"]
    assert {*repair["lost"]} == {"node-0"} and repair["replacement"] == ["fallback"]
    assert len(done["token_ids"]) == 60 and done["routing"]["is_fallback"]
