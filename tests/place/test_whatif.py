"""What more machines would change, and the process that a gateway asks."""

import json
import pickle
import subprocess
import sys

from manyhands.place.machines import Fleet, Machine, parse_what_if
from manyhands.place.plan import Task
from manyhands.place.shape import ModelShape
from manyhands.place.whatif import WhatIf, answer, compare

SHAPE = ModelShape("m", "bf16", (10_000_000,) * 8, 5_000_000, (64,) * 8, 128, 4096, process_bytes=1_000_000)


def question(memory: int, *added: str) -> WhatIf:
    desk = Machine("desk", memory, 0.002, ends_s=0.001)
    return WhatIf(Task(SHAPE, Fleet((desk,), "desk")), tuple(parse_what_if(text, desk) for text in added))


def test_both_plans_and_a_sentence() -> None:
    told = compare(question(200_000_000, "fast:1GB@0.5ms*8"))
    assert told["after"]["tokens_per_s"] > told["before"]["tokens_per_s"]
    assert told["advice"][-1].startswith("fast would give") and told["machines"][1]["is_new"]
    assert (
        compare(question(200_000_000, "slow:1GB@900ms"))["advice"][-1] == "slow would not be used: it is faster without"
    )


def test_a_machine_that_makes_it_possible_and_one_that_does_not() -> None:
    told = compare(question(30_000_000, "nas:1GB@5ms"))
    assert told["before"] is None and told["after"]["hops"] and told["advice"][-1] == "nas would make it possible"
    told = compare(question(30_000_000, "nas:12MB@5ms"))
    assert told["after"] is None and told["missing"]["needs_bytes"] > 0
    assert told["advice"][-1] == "nas would not be enough"


def test_the_process_answers_as_the_function_and_says_what_is_wrong() -> None:
    for asked in (question(200_000_000, "nas:1GB@5ms"), question(200_000_000, "desk:1GB@5ms")):
        ran = subprocess.run(
            [sys.executable, "-m", "manyhands.place.whatif"], input=pickle.dumps(asked), capture_output=True, check=True
        )
        assert json.loads(ran.stdout) == answer(asked)
    assert answer(asked) == {"error": "machine desk is listed twice: give each its own name"}
