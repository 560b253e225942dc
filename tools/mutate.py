"""Do the tests notice if a wire is cut? Each mutation changes one place of a copy of the tree; the tests named must fail.

    python -m tools.mutate [--only NAME ...] [--list]

A mutation that the tests pass is a survivor: the last line on stdout is JSON with all outcomes, and the exit code is 1 if one
survived, or if tests fail without any mutation. Part of `make nightly`; tests/tools/test_mutate.py holds the list to the code.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
LIMIT_S: Final = 600.0  # of one run of tests; a mutation that makes them hang is noticed too


class Mutation(NamedTuple):
    """Replace `old`, which stands once in `file` (below src/manyhands), by `new`; `tests` (files below tests, or tests of one,
    FILE::NAME) must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS: Final = (
    Mutation(
        "nothing is learnt from live sessions",
        "origin/routes.py",
        "self._learned.observe(hop.offer.node,",
        "(lambda *_: None)(hop.offer.node,",
        ("member/test_live_routes.py",),
    ),
    Mutation(
        "routes ignore round trips",
        "origin/routes.py",
        "self._learned.observe_own_rtts(me, own, now)",
        "pass",
        ("member/test_live_routes.py",),
    ),
    Mutation(
        "routes ignore the size of the lease",
        "route/permit.py",
        "offer.info.free_tokens >= terms.num_tokens and ",
        "",
        ("member/test_live_routes.py", "route/test_policies.py"),
    ),
    Mutation(
        "origins do not say the size of the lease",
        "origin/routes.py",
        "is_trusted, num_tokens, key, apart=apart)",
        "is_trusted, key=key, apart=apart)",
        ("member/test_live_routes.py",),
    ),
    Mutation(
        "spans say that they are idle",
        "worker/engine.py",
        "SpanLoad(num_sessions, len(self.waiting()),",
        "SpanLoad(0, 0,",
        ("member/test_live_routes.py",),
    ),
    Mutation(
        "steps are never held for others",
        "worker/batch.py",
        "max((t for t in expected if t <= horizon), default=held_since)",
        "held_since",
        ("worker/test_shared_steps.py",),
    ),
    Mutation(
        "standbys compete with live sessions",
        "worker/engine.py",
        "return ready or standbys",
        "return ready + standbys",
        ("worker/test_shared_steps.py",),
    ),
    Mutation(
        "all requests choose alike",
        "origin/routes.py",
        "secrets.token_bytes(8)",
        'b""',
        ("member/test_rules.py",),
    ),
    Mutation(
        "a request's rules do not reach the route",
        "origin/routes.py",
        "replace(self.terms(num_tokens, rules), current=current,",
        "replace(self.terms(num_tokens, Rules()), current=current,",
        ("member/test_rules.py",),
    ),
    Mutation(
        "repairs do not keep to a request's rules",
        "origin/request_routes.py",
        "self._routes.permitted(await self._routes.offers(excluded), self.rules)",
        "await self._routes.offers(excluded)",
        ("member/test_switch.py",),
    ),
    Mutation(
        "a request's scope keeps no node out",
        "route/permit.py",
        "if terms.admits is None or terms.admits(o)]",
        "]",
        ("member/test_rules.py",),
    ),
    Mutation(
        "layers that are kept to trusted nodes go to others",
        "route/permit.py",
        "terms.trusts is None or terms.trusts(offer)",
        "True",
        ("member/test_rules.py",),
    ),
    Mutation(
        "what hops state does not bound what is usual",
        "origin/loop.py",
        "Pace(config, lambda: session.route.stated_s)",
        "Pace(config)",
        ("test_kill_matrix.py::test_hn_48_a_hop_that_is_slow_from_its_first_step_is_replaced",),
    ),
    Mutation(
        "a spare costs by the hop",
        "route/chain.py",
        "(spans.layer + spare * spans.is_spare)",
        "spans.layer",
        ("route/test_search.py",),
    ),
    Mutation(
        "a step goes to whichever place of its hop there is",
        "worker/places.py",
        "return found if found is not None and found.opened.epoch == epoch else None",
        "return found",
        ("worker/test_serve.py::test_a_place_is_found_in_its_epoch_alone",),
    ),
    Mutation(
        "a lease has what was asked for, whatever the hops grant",
        "origin/route.py",
        "capacity = min(self.asked, *(hop.granted for hop in self.hops))",
        "capacity = self.asked",
        ("origin/test_growth.py::test_what_a_hop_states_changes_no_text",),
    ),
    Mutation(
        "a lease grows beyond what is free",
        "worker/leases.py",
        "min(positions - leased, tokens - self._most_leased(place[1]), free)",
        "positions - leased",
        ("worker/test_extend.py::test_a_lease_grows_as_far_as_there_is_room",),
    ),
    Mutation(
        "requests do not wait for a node that has been restarted",
        "origin/opener.py",
        "any(_should_serve(offer, lease) for",
        "any(False for",
        ("origin/test_own_layers.py",),
    ),
    Mutation(
        "requests do not wait for layers",
        "origin/routes.py",
        "return self._missing_since + patience_s",
        "return -math.inf",
        ("origin/test_own_layers.py",),
    ),
    Mutation(
        "private spans are told to others",
        "worker/worker.py",
        "for host in self.hosts if not host.is_private]",
        "for host in self.hosts]",
        ("origin/test_own_layers.py",),
    ),
    Mutation(
        "a wrong code is not counted",
        "net/pairing/code.py",
        "self.failures += 1",
        "pass",
        ("net/pairing/test_code.py", "hostile/test_pairing.py"),
    ),
    Mutation(
        "a dead code looks at proofs",
        "net/pairing/code.py",
        "        if not self.is_live(now):\n            return False\n        if is_right",
        "        if is_right",
        ("net/pairing/test_code.py",),
    ),
    Mutation(
        "the joiner does not ask for the host's proof",
        "net/pairing/exchange.py",
        'if not hmac.compare_digest(proof, self._keys.proof(b"B")):',
        "if False:",
        ("net/pairing/test_exchange.py",),
    ),
    Mutation(
        "one source has every exchange",
        "net/pairing/queue.py",
        "if key in self.waiting and under_way[source] < most]",
        "if key in self.waiting and under_way[source] < 99 * most]",
        ("net/pairing/test_queue.py",),
    ),
)


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """The text of the file with the mutation. Raises ValueError unless what it replaces stands there exactly once."""
    text = (root / "src/manyhands" / mutation.file).read_text("utf8")
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name}: {mutation.old!r} stands {text.count(mutation.old)} times in {mutation.file}"
        )
    return text.replace(mutation.old, mutation.new)


def passes(copy: Path, tests: tuple[str, ...]) -> bool:
    """Whether the tests pass on the source tree in `copy`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *(f"tests/{test}" for test in tests)]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    try:
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.mutate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutations whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    asked = parser.parse_args()
    chosen = [m for m in MUTATIONS if not asked.only or any(word in m.name for word in asked.only)]
    if asked.list:
        print(*(mutation.name for mutation in chosen), sep="\n")
        return 0
    began, outcomes = time.monotonic(), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("bench", "tools", "docs", "pyproject.toml"):
            (copy / name).symlink_to(ROOT / name)
        needed = tuple(sorted({test for mutation in chosen for test in mutation.tests}))
        if not passes(copy, needed):
            outcomes["none"] = "tests fail without a mutation"
        for mutation in chosen if not outcomes else ():
            path = copy / "src/manyhands" / mutation.file
            plain = path.read_text("utf8")
            path.write_text(mutated(mutation), "utf8")
            outcomes[mutation.name] = "survived" if passes(copy, mutation.tests) else "killed"
            path.write_text(plain, "utf8")
            print(f"{outcomes[mutation.name]:<9} {mutation.name}", flush=True)
    holds = all(outcome == "killed" for outcome in outcomes.values())
    print(json.dumps({"seconds": round(time.monotonic() - began), "mutations": outcomes, "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
