"""manyhands jobs: the lines, on wide and narrow terminals."""

from typing import Any

import pytest

from manyhands.cli.jobs import HEADINGS, job_lines, jobs, rules_of
from manyhands.origin.lossy import Loss
from manyhands.origin.request_routes import Routing
from manyhands.route.offer import Rules


def job(**changes: Any) -> dict[str, Any]:
    hops = [{"name": name} for name in ("desk", "laptop", "nas")]
    timings = {"ttft_ms": 412.0, "decode_tokens_per_s": 71.04}
    told = {"id": "0123456789abcdef", "created_unix_s": 100.0, "model": "tales", "api": "completions", "status": "done"}
    told |= {"error": None, "finish_reason": "length", "prompt_tokens": 512, "completion_tokens": 128}
    routing = Routing().as_object()
    return {**told, "timings": timings, "hops": hops, "repairs": [], "routing": routing, **changes}


NEW: dict[str, Any] = {
    "status": "running",
    "finish_reason": None,
    "hops": [],
    "timings": {"ttft_ms": None, "decode_tokens_per_s": None},
}
BAD: dict[str, Any] = {
    "status": "failed",
    "error": "shard_unavailable",
    "repairs": [{}],
    "model": "an-org/a-model-with-a-long-name-x",
}


def test_a_pipe_gets_one_line_for_each_job() -> None:
    heading, first, new, bad = job_lines([job(), job(**NEW), job(**BAD)], 460.0, None)
    assert heading.split() == [word for name in HEADINGS for word in name.split()]
    assert (
        first.split() == "01234567 6 min tales length 512+128 412 ms 71.0 completions - - desk > laptop > nas".split()
    )
    assert new.split()[-3:] == ["-", "-", "-"] and "running" in new
    assert "shard_unavailable" in bad and "a-model-with-a-long-name-x" in bad


@pytest.mark.parametrize("width", [80, 100])
def test_no_heading_is_cut_on_a_narrow_terminal(width: int) -> None:
    lines = job_lines([job(), job(**NEW), job(**BAD), job(model="smollm2", repairs=[{}, {}])], 460.0, width)
    heading, *texts = lines
    assert all(len(line) <= width for text in lines for line in text.split("\n"))
    assert heading.split() == "job age model status tokens first tokens/s".split()
    assert [text.split("\n")[1].strip() for text in texts] == [
        "api completions · route desk > laptop > nas",
        "api completions",
        "api completions · repairs 1 · route desk > laptop > nas",
        "api completions · repairs 2 · route desk > laptop > nas",
    ]
    assert job_lines([], 0.0, width)[0].split()[0] == "job"


def test_what_was_asked_of_a_route_and_what_came_of_it_is_shown() -> None:
    """Each policy is visibly engaged (features F22, F25, F66); what is usual is not said."""
    rules = Rules("greedy", allow_self=False, sticky=True, scope="lan", own_first=2, trusted_last=1, max_hops=4)
    routing = Routing(rules, path="star", is_kept=True, is_fallback=True, loss=Loss(is_wanted=True, layers=(4,)))
    said = "greedy, avoid self, kept, scope lan, own 2+0, trusted 0+1, at most 4 hops, star, int8, alone"
    assert said in job_lines([job(routing=routing.as_object())], 460.0, None)[1]
    assert rules_of(Routing(Rules(sticky=True, fallback=False), is_star=True).as_object()) == [
        "sticky",
        "apart",
        "no fallback",
    ]
    (text,) = job_lines([job(routing=routing.as_object())], 460.0, 100)[1:]
    assert f"rules {said}" in " ".join(text.split())


def test_a_gateway_that_had_no_request_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("manyhands.cli.jobs.ask", lambda *_: {"jobs": []})
    jobs()
    assert capsys.readouterr().out == "no request has come to this gateway yet\n"


def test_names_of_others_are_one_line() -> None:
    hostile = job(model="a\x1b[2Jb", hops=[{"name": "x\ny"}], error="e\r")
    for width in (None, 60):
        text = "".join(job_lines([hostile], 0.0, width))
        assert "\x1b" not in text and "\r" not in text and "x?y" in text and text.count("\n") == (width is not None)
