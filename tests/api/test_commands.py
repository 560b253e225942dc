"""manyhands workers, jobs and benchmark: against a gateway on loopback, as people and programs see them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from manyhands.api.http.hosts import OWNER_HEADER
from manyhands.cli import benchmark, jobs, workers
from manyhands.cli.benchmark import Outcome, summary
from manyhands.cli.client import GatewayError
from manyhands.cli.lines import rows_within
from manyhands.cli.owner import owner_file
from manyhands.errors import BadRequest, LinkClosed
from manyhands.plain import one_line
from tests.api.observed import Observed, observed, served

app = typer.Typer(rich_markup_mode=None)
app.add_typer(workers.app, name="workers")
app.command("jobs")(jobs.jobs)
app.command("benchmark")(benchmark.benchmark)

Run = Callable[..., Result]


def play(folder: Path, steps: Callable[[Run, Observed], None]) -> None:
    """Run `steps` in a thread, with `run("workers", ...)` as the command line."""

    async def main() -> None:
        async with observed(folder) as scene, served(scene) as client:
            home, secret = folder.parent / "home", client.headers[OWNER_HEADER]

            def run(*arguments: str) -> Result:
                env = {"MANYHANDS_API": str(client.base_url), "COLUMNS": "200", "MANYHANDS_HOME": str(home)}
                return CliRunner().invoke(app, list(arguments), env=env)

            with owner_file(home, client.base_url.port or 80, secret):
                await asyncio.to_thread(steps, run, scene)

    asyncio.run(main())


def said(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_an_operator_sees_and_moves_nodes(folder: Path) -> None:
    def steps(run: Run, scene: Observed) -> None:
        table = run("workers").stdout
        assert "n0 (0-2)  ->  n1 (3-5)" in table and "tiny: 0-5 (spare)" in table and scene.node(1)[:8] in table
        assert said(run("workers", "evict", "n1", "--json"))["status"] == "evicted"
        told = said(run("workers", "--json"))
        assert {w["name"]: w["status"] for w in told["workers"]} == {"n0": "active", "n1": "evicted", "n2": "active"}
        assert "evicted" in run("workers").stdout
        assert "may be used again" in run("workers", "readmit", "n1").stdout
        refused = run("workers", "reassign", "n1", "0-2", "--force")
        assert isinstance(refused.exception, GatewayError) and refused.exception.http_status == 409
        refused = run("workers", "evict", "n/../1")
        assert isinstance(refused.exception, GatewayError) and refused.exception.http_status == 404

    play(folder, steps)


def test_a_benchmark_tells_figures_and_jobs_remember_it(folder: Path) -> None:
    def steps(run: Run, scene: Observed) -> None:
        assert "no route" not in run("workers").stdout
        told = said(run("benchmark", "-n", "3", "-m", "5", "--json"))
        assert (told["requests"], told["succeeded"], told["tokens"], told["errors"]) == (3, 3, 15, [])
        assert told["mean_latency_s"] >= told["mean_ttft_s"] > 0
        result = run("benchmark", "-n", "1", "-m", "2")
        assert "1 of 1" in result.stdout
        listed = said(run("jobs", "-n", "2", "--json"))["jobs"]
        assert [job["completion_tokens"] for job in listed] == [2, 5]
        assert "n0 > n1" in run("jobs").stdout
        for index in range(3):
            scene.swarm.origin.routes.evicted.add(scene.node(index))
        unknown = run("benchmark", "-n", "2", "--model", "tiny2", "--json")
        assert isinstance(unknown.exception, GatewayError) and not unknown.stdout, "and not once for each prompt"
        assert "model 'tiny2' is not served here; there is tiny" in str(unknown.exception)
        failed = run("benchmark", "-n", "2", "--json")
        assert failed.exit_code == 1
        assert json.loads(failed.stdout)["errors"] == ["shard_unavailable"] * 2
        assert "no route now" in run("workers").stdout

    play(folder, steps)


def test_no_gateway_is_one_line() -> None:
    result = CliRunner().invoke(app, ["workers", "--api", "http://127.0.0.1:9"])
    assert isinstance(result.exception, LinkClosed) and "start one" in str(result.exception)
    for address, hint in (
        ("127.0.0.1:8000", ": write http://127.0.0.1:8000"),
        ("[::1]:80", ": write http://[::1]:80"),
        ("file:///etc/passwd", ""),
        ("http://", ""),
    ):
        result = CliRunner().invoke(app, ["jobs", "--api", address])
        assert isinstance(result.exception, BadRequest)
        assert str(result.exception).endswith(f"of the form http://127.0.0.1:8000{hint}")


def test_figures_of_a_run() -> None:
    good = Outcome(2.0, 10, 0.5, 6.0)
    told = summary([good, Outcome(4.0, 20, 1.5, 8.0), Outcome(9.0, error="rate_limited")])
    assert (told["success_rate"], told["mean_latency_s"], told["mean_ttft_s"]) == (0.6667, 3.0, 1.0)
    assert (told["tokens_per_s"], told["mean_decode_tokens_per_s"]) == (5.0, 7.0)
    assert told["errors"] == ["rate_limited"]
    assert summary([Outcome(1.0, error="internal")])["mean_latency_s"] is None


def test_figures_of_a_run_fit_a_narrow_terminal() -> None:
    cells = benchmark._cells(summary([Outcome(120.5, 1000, 10.5, 6.0)] * 1000))
    wide, narrow = (rows_within(width, benchmark.HEADINGS, [cells], benchmark.NUM_FIRST) for width in (80, 40))
    assert [len(text.split("\n")) for text in wide] == [1, 1] and wide[0].split()[-1] == "tokens"
    heading, row = narrow
    first, below = row.split("\n")
    assert max(len(heading), len(first)) <= 40 and heading.split() == "answered mean latency first token".split()
    assert below.strip() == "tokens/s 8.3 · while decoding 6.0 · tokens 1000000"


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "[red]", "\u202eevil", "[/]"])
@pytest.mark.parametrize("width", [None, 40])
def test_names_of_others_do_nothing_to_a_terminal(name: str, width: int | None) -> None:
    worker = {"name": name, "worker_id": name, "status": name, "sessions": 0, "rtt_ms": None, "address": name}
    cells = workers._cells(
        {**worker, "spans": [{"model": name, "layers": name, "is_spare": True, "free_positions": 0}]}
    )
    text = "".join(rows_within(width, workers.HEADINGS, [cells], workers.NUM_FIRST))
    assert text.replace("\n", "", 1 if width else 0).isprintable()
    assert all(each.isprintable() for each in cells) and cells[0] == one_line(name)


def test_a_gateway_that_was_asked_for_nothing_says_why_it_lists_no_node(folder: Path) -> None:
    def steps(run: Run, scene: Observed) -> None:
        assert "none yet" not in run("workers").stdout
        scene.gateway.origins.clear()
        assert (
            run("workers").stdout.splitlines()[1].startswith("none yet: a gateway asks nodes once a model is asked for")
        )

    play(folder, steps)
