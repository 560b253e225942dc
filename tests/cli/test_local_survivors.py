"""`manyhands local` without a spare: survivors of a death load the lost layers, and the text is the same (L9-19)."""

import json
import subprocess
import sys
from typing import Any

import pytest

PROMPT = ["-p", "Once upon a time", "--max-tokens", "60", "--seed", "4", "-t", "0.8"]


def told(*options: str) -> dict[str, Any]:
    """What `local tales` of three node processes says, as JSON."""
    command = [sys.executable, "-m", "manyhands.cli", "local", "tales", "--nodes", "3", "--threads", "1", *PROMPT]
    done = subprocess.run([*command, *options, "--json"], capture_output=True, text=True, timeout=300, check=False)
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
