"""Do a user's commands give the same text on another device, through deaths too, as on the CPU?

    python -m tools.check_commands --device cuda

Parts, each with *tales* and processes of its own; whatever a command answers on the CPU, it is to answer on the device:
  local   one answer over node processes: precisions, sampling, a drafter, star, ends at the edges, one node
  deaths  hops that are killed or asked to leave in the middle of an answer: the text of the undisturbed one, one repair
  mixed   `serve` on the device, with a spare node on the CPU: a node of the device is killed while `infer` prints
  api     `local --api`: a chat of three turns, and eight streams at once

The last line is JSON: texts compared, what differed, seconds; exits with 1 if anything differed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PROMPT = "Once upon a time there was a king who"
LOCAL = {
    "bf16": [], "fp32": ["--dtype", "fp32"], "w8": ["--dtype", "w8"], "w4": ["--dtype", "w4"],
    "sampled": ["-t", "0.9", "--seed", "7"], "drafted": ["--draft", "model"],
    "star": ["--path", "star"], "edges": ["--ends", "edges"], "one node": ["--nodes", "1"],
}  # fmt: skip
DEATHS = {
    "killed": ["--kill", "1@30"], "first killed": ["--kill", "0@20", "--dtype", "w4"],
    "two killed": ["--nodes", "4", "--kill", "1@20", "--kill", "2@40"],
    "standby": ["--spares", "1", "--standby", "--kill", "2@30"], "drained": ["--drain", "1@25", "--spares", "1"],
}  # fmt: skip
TURNS = ("Tell me of a fox.", "And then?", "How did it end?")
START_S, ANSWER_S = 240.0, 120.0
Found = Iterator[tuple[str, str]]  # what was asked, and what is wrong, or ""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "manyhands.cli", *words]


def answered(device: str, words: list[str]) -> dict[str, Any]:
    """What `manyhands local tales ... --json` says. Raises RuntimeError with what it printed if it failed."""
    asked = ["local", "tales", "--nodes", "3", "-p", PROMPT, "-n", "64", "--json", "--device", device, *words]
    done = subprocess.run(command(*asked), capture_output=True, text=True, timeout=START_S + ANSWER_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(asked)}: exit {done.returncode}: {done.stderr.strip()[-600:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def local(device: str) -> Found:
    for name, words in LOCAL.items():
        wanted, found = answered("cpu", words), answered(device, words)
        yield name, "" if found["text"] == wanted["text"] else f"{found['text']!r} instead of {wanted['text']!r}"


def deaths(device: str) -> Found:
    for name, words in DEATHS.items():
        quiet = [word for at, word in enumerate(words) if word not in ("--kill", "--drain") and "@" not in word]
        wanted, found = answered("cpu", quiet), answered(device, words)
        repairs, expected = len(found["repairs"]), sum("@" in word for word in words)
        wrong = f"{found['text']!r} instead of {wanted['text']!r}; " if found["text"] != wanted["text"] else ""
        yield name, wrong + (f"{repairs} repairs" if repairs != expected else "")


@contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and the first two lines that it prints; stopped at the end."""
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            lines = ""
            while line := process.stdout.readline():
                lines += line
                if "mh1" in line or "Ctrl-C" in line:
                    break
            else:
                raise RuntimeError(f"{' '.join(words)}: {lines}")
            yield process, lines
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)


def mixed(device: str) -> Found:
    """`infer` prints while the second half's node, on the device, is killed; a spare one on the CPU goes on."""
    with ExitStack() as stack:
        room, ticket = Path(stack.enter_context(tempfile.TemporaryDirectory())), ""
        nodes = []
        for name, layers, on, words in (
            ("first", "0-5", device, []), ("second", "6-11", device, []), ("spare", "6-11", "cpu", ["--spare"])
        ):  # fmt: skip
            own = ["--name", name, "--key", str(room / name), *words, *(["--ticket", ticket] if ticket else [])]
            node, said = stack.enter_context(started("serve", "tales", "--layers", layers, "--device", on, *own))
            nodes.append(node)
            ticket = next(line for line in said.splitlines() if line.startswith("mh1"))
        asked = command("infer", "tales", "-p", PROMPT, "-n", "900", "--draft", "off", "--ticket", ticket)
        wanted = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWER_S).stdout
        told = stack.enter_context(open(room / "told", "w+"))
        with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=told, text=True) as asking:
            assert asking.stdout is not None
            text = asking.stdout.read(20)
            nodes[1].kill()
            text += asking.stdout.read()
        told.seek(0)
        notes = told.read()
        yield "killed", "" if wanted and text == wanted else f"{text!r} instead of {wanted!r}"
        yield "repaired", "" if "spare" in notes else f"no repair was told: {notes!r}"


def chatted(url: str, messages: list[dict[str, str]]) -> str:
    body = {"model": "tales", "messages": messages, "max_tokens": 48, "temperature": 0.7, "seed": 3}
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def conversation(device: str) -> list[str]:
    """A chat's answers, and those to eight requests at once."""
    with started("local", "tales", "--nodes", "2", "--api", "127.0.0.1:0", "--device", device) as (_, said):
        url = next(word.rstrip("/;") for word in said.split() if word.startswith("http://"))
        messages: list[dict[str, str]] = []
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": chatted(url, messages)})
        alone = [message["content"] for message in messages[1::2]]
        asked = [[{"role": "user", "content": f"{turn} {n}"}] for n in range(4) for turn in TURNS[:2]]
        with ThreadPoolExecutor(len(asked)) as pool:
            return alone + list(pool.map(lambda one: chatted(url, one), asked))


def api(device: str) -> Found:
    pairs = zip(conversation("cpu"), conversation(device), strict=True)
    for number, (wanted, found) in enumerate(pairs):
        yield f"answer {number}", "" if wanted == found else f"{found!r} instead of {wanted!r}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.check_commands", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", required=True)
    device = parser.parse_args().device
    parts: dict[str, Callable[[str], Found]] = {"local": local, "deaths": deaths, "mixed": mixed, "api": api}
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["MANYHANDS_HOME"] = home
        for name, part in parts.items():
            began, texts, wrong = time.monotonic(), 0, {}
            try:
                for what, found in part(device):
                    texts += 1
                    if found:
                        wrong[what] = found
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                wrong["failed"] = str(error)
            report[name] = {"texts": texts, "wrong": wrong, "seconds": round(time.monotonic() - began, 1)}
            print(name, report[name], file=sys.stderr, flush=True)
    holds = not any(part["wrong"] for part in report.values())
    print(json.dumps({"device": device, **report, "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
