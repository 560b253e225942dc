"""Write the figures of docs/benchmarks.md and README.md from bench/results/*.json, so that none is typed by hand.

    python -m tools.figures            write both pages
    python -m tools.figures --check    exit 1 if a page differs from what would be written

A row is a sentence with fields of one result file: `{decode_x.node}` looks up a nested value. A value with a median is
written as `median (min to max)`, or with the interval in which its median lies, 95 % sure, where that is known. What stands
in [[ ]] is left out where the file, an older one, lacks a field of it. Every file in bench/results has a row, so a target
that was missed is shown too.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.engine.library import PREFERENCE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- FIGURES: written by tools/figures.py -->", "<!-- /FIGURES -->"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of docs/benchmarks.md. `file`: stem of a result."""

    file: str
    question: str
    answer: str
    target: str


@dataclass(frozen=True, slots=True)
class Brief:
    """One line of README's table: medians, rounded. `file` is a whole stem, of one CPU."""

    file: str
    what: str
    measured: str
    beside: str


_KILLED = "p50 {pause_p50_s} s, longest {pause_p99_s} s; {same_text} of {trials} texts the same"
_STEP = (
    "decode {decode_x.node} x, prefill {prefill_x.node} x; in process {decode_x.ours} x, {prefill_x.ours} x[[; "
    "in process, of llama.cpp's bf16: decode {of_llama_cpp.decode} x, prefill {of_llama_cpp.prefill} x]]"
)
_STEP_TARGET = (
    "decode {target.decode_x} x[[, prefill {target.prefill_x} x]][[; of llama.cpp's {target.decode_of_llama_cpp} x, "
    "{target.prefill_of_llama_cpp} x]]"
)
_SMALL = (
    "decode {decode_x.llama_cpp} x, prefill {prefill_x.llama_cpp} x; of our bf16 {decode_x.bf16} x, {prefill_x.bf16} x"
)
_SMALL_QUESTION = (
    "`--dtype {dtype}`, {threads} thread(s), {clock} seconds, the {shape} shape: against llama.cpp's like format"
)
_SMALL_TARGET = "decode {target.decode_x} x, prefill {target.prefill_x} x"
_ENGINE_QUESTION = "layers of the {shape} shape at `{dtype}`, {threads} thread(s)"
_ENGINE = (
    "one row reads weights at {of_read} of what memory delivers; n rows cost at most {cost_of_bound} x their bound; one at "
    "position 8,192 is {at_8192_x.plain} x as fast as at 128, with a cache of 8 bit {at_8192_x.codes} x"
)
_QUALITY = (
    "w8 {w8.mean_mkl} ({mean_kl_of_llama_cpp_x.w8} x), w4 {w4.mean_mkl} ({mean_kl_of_llama_cpp_x.w4} x), cache "
    "{bf16+c8.mean_mkl} ({mean_kl_of_llama_cpp_x.bf16+c8} x); likeliest token the same {w8.same_top}, {w4.same_top}, "
    "{bf16+c8.same_top}"
)
_OUTLIERS = "with outlier channels, which change no bit of bf16"
_SPLIT = "one thread a node {nodes_x.3n1t1s} x; two threads {nodes_x.3n2t1s} x"
_LADDER = (
    "a star {star_x} x a ring, which has with its drafter {auto_x} x no drafts, a text known to an oracle {known_x} x, "
    "no draft right {wrong_x} x; "
    "{tokens_per_s.auto} tokens/s"
)
_LADDER_TARGET = "{target.auto_x} x, {target.known_x} x, {target.wrong_x} x"
_GPU = (
    "decode {decode_x} x: {decode_tps.ours.median} tokens/s, {of_floor} of what its memory delivers; prefill of 256 tokens "
    "{prefill_x.256} x: {prefill_tps.256.ours.median} tokens/s, of 2,048 {prefill_x.2048} x: "
    "{prefill_tps.2048.ours.median} tokens/s; the CPU's bits: {same_bits}"
)
_GPU_TARGET = "decode {target.decode_x} x"
_SOAKED = (
    "{completed_same} streams whole and unchanged, {completed_changed} changed, {num_failed} failed; "
    "longest pause {longest_pause_s} s"
)
_UPKEEP = (
    "[[{percent.all} %: logs {percent.logs}, heartbeats {percent.heartbeats}; ]]CPU with both {cpu_of_neither.both} x "
    "that with neither, speed {of_neither.both} x; a standby's node takes {standby_cpu_ms} ms of CPU a token"
)
_CHURN = "{requests_answered} requests answered, {requests_lost} lost, {requests_wrong} wrong; gone from views after {gone_s} s"

ROWS = [
    Row(
        "repair",
        "pause of a stream when a hop is killed (kill -9) and a spare takes over",
        _KILLED,
        "p50 {target.p50_s} s",
    ),
    Row("repair-0.5b", "the same at the 0.5B shape", _KILLED, "p50 {target.p50_s} s"),
    Row("repair-standby", "the same on tales with a standby (`--standby`)", _KILLED, "p50 {target.p50_s} s"),
    Row("repair-freeze", "pause when a hop freezes", _KILLED, "p50 {target.p50_s} s"),
    Row("repair-drain", "pause when a hop leaves politely", _KILLED, "p50 {target.p50_s} s"),
    Row(
        "reuse",
        "first token of a second turn with {history} tokens of history cached, 0.5B shape",
        "{times_sooner} x sooner than computing them: {reused_s} s; {same_text} of {reused_s.n} texts the same",
        "{target.times_sooner} x",
    ),
    Row(
        "reuse-tales",
        "the same with tales",
        "{times_sooner} x sooner than computing them: {reused_s} s; {same_text} of {reused_s.n} texts the same",
        "{target.times_sooner} x",
    ),
    Row(
        "drafting",
        "drafting on one machine, auto against off, tales with its drafter",
        "text that repeats {repeats_x} x, prose {prose_x} x, four streams of prose {four_x} x",
        "{target.repeats_x} x, {target.prose_x} x, {target.four_x} x",
    ),
    Row(
        "acceptance",
        "how often a draft of tales' drafter is right: drawn with the target's noise, the likeliest, drawn by itself; "
        "{positions} positions",
        "T 0.7: {T 0.7.same_noise}, {T 0.7.likeliest}, {T 0.7.own_noise}; T 1: {T 1.0.same_noise}, {T 1.0.likeliest}, "
        "{T 1.0.own_noise}; greedy {greedy.same_noise}",
        "with the target's noise {target.T 0.7}, {target.T 1.0}; greedy {target.greedy}",
    ),
    Row("ladder", "tales over six hops of 22 to 75 ms, emulated, T = {temperature}", _LADDER, _LADDER_TARGET),
    Row("ladder-1.0", "the same at T = {temperature}", _LADDER, _LADDER_TARGET),
    Row(
        "start",
        "from the start of a node process to serving, tales",
        "one alone {alone_s} s ({cpu_s} s of a CPU), {nodes} at once {many_s} s; {fit} fit into the memory",
        "{target.alone_s} s, {target.many_s} s, {target.fit}",
    ),
    Row(
        "first_answer",
        "`make demo` from Enter to its end; `up tales` from Enter to a first token over the API",
        "{demo_s} s; {first_token_s} s",
        "{target.demo_s} s; {target.first_token_s} s",
    ),
    Row(
        "prefill",
        "chunks of a prompt in flight together, against one at a time, in virtual time",
        "4,096 tokens over 3 hops {3 hops, 4096 tokens.x} x, 256 over 6 {6 hops, 256 tokens.x} x; "
        "coded rows on 10 Mbit/s {uplinks of 10 Mbit/s.x} x[[, in 8 bits {uplinks of 10 Mbit/s.int8_x} x]]",
        "{target.3 hops, 4096 tokens} x, {target.6 hops, 256 tokens} x; {target.uplinks of 10 Mbit/s} x",
    ),
    Row(
        "resume",
        "a stream cut after {after} tokens goes on at another gateway, a prompt of {prompt}, {shape}",
        "over warm hops {adopted_s} s, {adopted_x} x a repair; from the last hop's rows {recomputed_s} s, {recomputed_x} x "
        "a prefill; one by one {redrawn_s} s[[; with the client's text {received_x} x a prefill]]; "
        "{same_text} of {adopted_s.n} texts the same",
        "{target.adopted_x} x; {target.recomputed_x} x",
    ),
    Row(
        "soak",
        "{kills} kills in {seconds} s, {streams_at_once} streams at any time",
        _SOAKED,
        "0 failed, 0 changed",
    ),
    Row("soak-short", "the same in less than half an hour", _SOAKED, "0 failed, 0 changed"),
    Row(
        "siege",
        "every outside attack at once for {minutes} minutes against 4 nodes that serve {streams_at_once} streams",
        "{whole} streams whole, {lost} lost, {changed} changed; "
        "/health p99 {health_ms.p99} ms, first token p99 {first_token_s.p99} s",
        "0 lost, 0 changed; {target.health_p99_ms} ms; {target.first_token_p99_s} s",
    ),
    Row(
        "precisions-0.5b",
        "expected tokens/s of each precision (`plan`, `model inspect`) against measured, one thread, in CPU seconds",
        "bf16 {bf16.predicted_x} x, w8 {w8.predicted_x} x, w4 {w4.predicted_x} x",
        "within {target.off_by} of 1",
    ),
    Row(
        "load",
        "loading a GGUF file of {file_gb} GB, a GB, from page cache to able to compute; without SHA instructions",
        "{sha.clock_s} s ({sha.cpu_s} of the CPU); {no_sha.clock_s} s ({no_sha.cpu_s})",
        "{target.s_per_gb} s",
    ),
    Row(
        "busy",
        "a swarm of five beside busy processes",
        "{flaps} members declared gone, {repairs} repairs, {lost} streams lost",
        "0, 0, 0",
    ),
    Row(
        "churn",
        "{processes} processes join, leave and are killed for {seconds} s",
        _CHURN,
        "0, 0; {target.gone_s_max} s",
    ),
    Row("churn-quick", "the same with {processes} processes for {seconds} s", _CHURN, "0, 0; {target.gone_s_max} s"),
    Row(
        "upkeep",
        "output logs and heartbeats, of a token's CPU, tales",
        _UPKEEP,
        "[[{target.percent} %]]",
    ),
    Row("upkeep-0.5b", "the same at the 0.5B shape", _UPKEEP, "{target.percent} %"),
    Row(
        "join",
        "from `join` to serving, tales",
        "{join_s} s, of it ours {ours_s} s",
        "{target.join_s} s; {target.ours_s} s",
    ),
    Row(
        "balance-live",
        "{nodes} processes, layers held 4:1, balance themselves while clients ask",
        "at rest after {seconds_to_rest} s; "
        "{requests_answered} requests answered, {requests_lost} lost, {requests_wrong} changed",
        "0 lost, 0 changed",
    ),
    Row(
        "balance",
        "balancing in virtual time",
        "10 to 1: {ten_to_one.all_rules.moves} moves",
        "comes to rest, never slower",
    ),
    Row(
        "plan",
        "prediction of `manyhands plan` over what is measured, 9 topologies",
        "tokens/s off by at most {worst_off_by}[[, time to first token {ttft_worst_off_by}]]",
        "{target.off_by}[[, {target.ttft_off_by}]]",
    ),
    Row(
        "route",
        "search for a route, {nodes} nodes, {layers} layers, CPU time",
        "{ms.latency} ms, p99 {ms.latency.p99} ms",
        "{target.search_p99_ms} ms",
    ),
    Row(
        "route-quick",
        "search for a route, {nodes} nodes, {layers} layers, CPU time",
        "{ms.latency} ms, p99 {ms.latency.p99} ms",
        "{target.search_p99_ms} ms",
    ),
    Row(
        "directory-gossip",
        "gossip among 100 idle nodes, simulated; a third of 300 dies at once",
        "{nodes.100.bytes_per_node_s} bytes/s a node; gone from all views after {nodes.300.third_gone_s} s",
        "{target.bytes_per_node_s_at_100} bytes/s; {target.gone_s} s",
    ),
    Row(
        "directory-dht",
        "DHT of 100 nodes, simulated",
        "{nodes.100.bytes_per_node_s} bytes/s a node",
        "lookups whole {target.lookups_whole}",
    ),
    Row(
        "nat",
        "what a relay and what iroh add to a step of 8 KiB",
        "{relay_adds_us_8192} us; {iroh_adds_us_8192} us",
        "{target.relay_adds_us_8192}; {target.iroh_adds_us_8192} us",
    ),
    Row(
        "gateway",
        "what the API adds to a request and to a token; {streams} streams",
        "{request_ms} ms; {token_us} us; {errors} errors",
        "{target.request_ms} ms; {target.token_us} us",
    ),
    Row(
        "callbacks",
        "the longest of {count} callbacks of the gateway's event loop, under {streams} streams, 200 at once; its CPU",
        "{longest_ms} ms; {errors} errors",
        "{target.longest_ms} ms",
    ),
    Row(
        "first_word",
        "CPU seconds until a command says something, and until it refuses; the slowest of all commands",
        "{slowest.says.cpu_s.min} s (`{slowest.says.command}`); {slowest.refuses.cpu_s.min} s (`{slowest.refuses.command}`)",
        "{target.says_cpu_s} s; {target.refuses_cpu_s} s",
    ),
    Row(
        "amx",
        "does AMX compute the chain of arithmetic.md? {cases} results of TDPBF16PS against the definition",
        "differing: any operands {chain.any}, near one {chain.near one}, tiny {chain.tiny}, large {chain.large}, cancelling "
        "{chain.cancelling}, denormal {chain.denormal}",
        "{target.chain}",
    ),
    Row("step-0.5b", "one node over TLS against transformers, 0.5B shape", _STEP, _STEP_TARGET),
    Row("step-0.5b-2000", "the same with a prompt of {prompt} tokens", _STEP, _STEP_TARGET),
    Row("step-1.1b", "the same, 1.1B shape", _STEP, _STEP_TARGET),
    Row("step-1.1b-2000", "the same with a prompt of {prompt} tokens", _STEP, _STEP_TARGET),
    Row("step-tales", "the same, tales (a toy of 11 MB: overhead dominates)", _STEP, _STEP_TARGET),
    Row("split-0.5b", "3 nodes against 1, 0.5B shape, one stream", _SPLIT, "{target.three_nodes_x} x"),
    Row("split-0.5b-busy", "the same beside two busy processes a core", _SPLIT, "{target.three_nodes_x} x"),
    Row("split-tales", "the same, tales", _SPLIT, "{target.three_nodes_x} x"),
    Row(
        "audit",
        "what hashes of rows cost an answer, and how long an audit of its {positions} positions takes; 3 nodes, 0.5B shape",
        "first token {first_token_x} x, decode {decode_x} x; an audit {audit_x} x the first token: {audit_s} s",
        "{target.first_token_x} x, {target.decode_x} x; {target.audit_x} x",
    ),
    Row("hop", "what a hop adds to a token", "{hop_ms} ms", "{target.hop_ms} ms"),
    Row(
        "batch-0.5b",
        "8 requests at once against one, 0.5B shape, tokens/s",
        "{of_one_x.8} x",
        "{target.eight_x} x",
    ),
    Row(
        "memory-0.5b",
        "weights of a node with a third of the layers against all, 0.5B shape",
        "{third_of_whole_weights} ({third_mb} of {whole_mb} MB resident, {libraries_mb} of them libraries)",
        "{target.third}",
    ),
    Row(
        "memory-1.1b-w4",
        "a process that serves the whole 1.1B shape at `w4`, embedding and head at `w8`: weights, and what is resident beside",
        "{weights_mb} MB and {beside_mb} MB",
        "{target.weights_mb} and {target.beside_mb} MB",
    ),
    Row(
        "tables",
        "resident memory that a table which stays in its file adds: a second one of embeddings, one of n-grams",
        "of {gemma3n_text.table_mb} MB {gemma3n_text.bf16.held_mb} MB at bf16 and {gemma3n_text.w4.held_mb} MB at `w4`; of "
        "{qwen4_exp_text.table_mb} MB {qwen4_exp_text.bf16.held_mb} MB and {qwen4_exp_text.w4.held_mb} MB",
        "{target.of_table} of it",
    ),
    Row(
        "large",
        "the shape of Mistral-7B at `{dtype}` over three node processes of a third each, random weights",
        "the largest node holds {largest_node} of {weights_mb} MB; serving after {serving_s} s ({packed_s} s the first time); "
        "{tokens_per_s} tokens/s, {of_floor} of what memory delivers; kill -9: a pause of {pause_s} s, same text: "
        "{same_text}",
        "{target.largest_node}; {target.of_floor}; {target.pause_s} s; same text",
    ),
    Row("engine-1.1b", _ENGINE_QUESTION, _ENGINE, "{target.of_read}; 1 x; {target.at_8192_x} x"),
    Row("engine-0.5b", _ENGINE_QUESTION, _ENGINE, "1 x; {target.at_8192_x} x"),
    Row("engine-1.1b-w8", _ENGINE_QUESTION, _ENGINE, "1 x; {target.at_8192_x} x"),
    Row("engine-1.1b-w4", _ENGINE_QUESTION, _ENGINE, "1 x; {target.at_8192_x} x"),
    Row(
        "gpu-0.5b",
        "the {shape} shape in bf16 on one {gpu} (`--device cuda`), against transformers there",
        _GPU,
        _GPU_TARGET,
    ),
    Row("gpu-1.1b", "the {shape} shape in bf16 on one {gpu}, against transformers there", _GPU, _GPU_TARGET),
    Row("gpu-8b", "{shape}, the same", _GPU, f"{_GPU_TARGET}, {{target.of_floor}} of its memory"),
    Row("gpu-1.1b-w4", "the {shape} shape at w4, against transformers at bf16", _GPU, _GPU_TARGET),
    Row("gpu-8b-w8", "{shape} at w8, the same", _GPU, f"{_GPU_TARGET}, {{target.of_floor}} of its memory"),
    Row("gpu-8b-w4", "{shape} at w4, the same", _GPU, f"{_GPU_TARGET}, {{target.of_floor}} of its memory"),
    Row("step-0.5b-w8", _SMALL_QUESTION, _SMALL, _SMALL_TARGET),
    Row("step-0.5b-w4", _SMALL_QUESTION, _SMALL, _SMALL_TARGET),
    Row("step-1.1b-w8", _SMALL_QUESTION, _SMALL, _SMALL_TARGET),
    Row("step-1.1b-w4", _SMALL_QUESTION, _SMALL, _SMALL_TARGET + "; decode {target.w4_of_bf16_x} x"),
    *(
        Row(
            f"step-1.1b-{kind}",
            "a file of llama.cpp's {dtype}, {threads} thread(s), {clock} seconds, the {shape} shape: against llama.cpp; "
            "weights held",
            "decode {decode_x.llama_cpp} x, prefill {prefill_x.llama_cpp} x; {held_of_file_x} of the file",
            "decode {target.decode_x} x; {target.held_of_file_x} of the file",
        )
        for kind in ("q6_k", "q4_k_m", "iq4_xs", "q3_k_m", "q2_k")
    ),
    Row(
        "states",
        "layers with states in Q4_0, one thread, in CPU seconds, against llama.cpp: of Qwen3.5-0.8B; of LFM2-350M",
        "decode {qwen3_5.decode_x} x, prefill {qwen3_5.prefill_x} x; decode {lfm2.decode_x} x, prefill {lfm2.prefill_x} x",
        "decode {target.decode_x} x, prefill {target.prefill_x} x",
    ),
    Row(
        "quality",
        "{model}, {positions} positions: mean divergence from bf16 in thousandths of a nat, and of llama.cpp's likes; of a "
        "cache of 8 bit (`--cache-dtype w8`) too",
        _QUALITY,
        "{target.mean_kl_of_llama_cpp_x} x",
    ),
    Row("quality-outliers", f"{{model}} {_OUTLIERS}", _QUALITY, "{target.mean_kl_of_llama_cpp_x} x"),
    Row(
        "quality-smollm2",
        "SmolLM2-135M-Instruct, {positions} positions, groups across those that the file stored",
        _QUALITY,
        "{target.mean_kl_of_llama_cpp_x} x",
    ),
    Row("quality-smollm2-outliers", f"SmolLM2 {_OUTLIERS}", _QUALITY, "{target.mean_kl_of_llama_cpp_x} x"),
]

_STEP_BRIEF = "step-0.5b-avx512-amd26"
BRIEFS = [
    Brief(
        "repair",
        "a node is killed in the middle of an answer",
        "goes on after {pause_s} s, unchanged in {same_text} of {trials} trials",
        "the same answer without the kill",
    ),
    Brief(
        "soak",
        "{kills} kills in half an hour, {streams_at_once} answers at any time",
        "{completed_same} answers whole and unchanged, {num_failed} failed",
        "the same answers of one node",
    ),
    Brief(
        "split-0.5b-avx512-amd26",
        "a model cut over three nodes of this machine",
        "{tps.3n1t1s} tokens/s",
        "one node that holds all of it: {tps.1n1t1s}",
    ),
    Brief(
        _STEP_BRIEF,
        "a node writes",
        "{decode_tps.node} tokens/s",
        "transformers {decode_tps.transformers}, llama.cpp {decode_tps.llama_cpp}",
    ),
    Brief(
        _STEP_BRIEF,
        "a node reads a prompt of {prompt} tokens",
        "{prefill_tps.node} tokens/s",
        "transformers {prefill_tps.transformers}, llama.cpp {prefill_tps.llama_cpp}",
    ),
    Brief("batch-0.5b-avx512-amd26", "eight answers at once", "{tps.8} tokens/s together", "one answer: {tps.1}"),
    Brief(
        "reuse",
        "first word after the next question of a chat of {history} tokens",
        "{reused_s} s",
        "where nothing is kept: {anew_s} s",
    ),
    Brief(
        "gpu-1.1b",
        "a GPU writes, a model of 1.1B",
        "{decode_tps.ours} tokens/s",
        "transformers {decode_tps.transformers}",
    ),
    Brief(
        "gpu-1.1b",
        "it reads a prompt of 2,048 tokens",
        "{prefill_tps.2048.ours} tokens/s",
        "transformers {prefill_tps.2048.transformers}",
    ),
]


def look_up(found: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; a key may itself hold dots ("decode_x.node", "nodes.0.5")."""
    value: Any = found
    rest = path
    while rest:
        if not isinstance(value, Mapping):
            raise KeyError(path)
        key = next((k for k in sorted(value, key=len, reverse=True) if rest == k or rest.startswith(f"{k}.")), None)
        if key is None:
            raise KeyError(path)
        value, rest = value[key], rest[len(key) + 1 :]
    return value


def told(value: Any) -> str:
    """A value as the table has it."""
    if isinstance(value, Mapping) and "low" in value:
        return f"{told(value['median'])} ({told(value['low'])} to {told(value['high'])}, 95 % sure)"
    if isinstance(value, Mapping) and "median" in value:
        return f"{told(value['median'])} ({told(value['min'])} to {told(value['max'])})"
    if isinstance(value, list):
        return " to ".join(told(each) for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value)


def rounded(value: Any) -> str:
    """As README has it: two digits that count, and a median without its range."""
    if isinstance(value, Mapping):
        value = value["median"]
    if isinstance(value, float):
        value = float(f"{value:.2g}")
        return f"{value:g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def filled(text: str, found: Mapping[str, Any], told: Callable[[Any], str] = told) -> str:
    """`text` with its fields looked up. Raises KeyError for one that is not there, outside [[ ]]."""

    def optional(match: re.Match[str]) -> str:
        try:
            return filled(match[1], found, told)
        except KeyError:
            return ""

    text = re.sub(r"\[\[(.*?)\]\]", optional, text)
    return re.sub(r"\{([^}]+)\}", lambda match: told(look_up(found, match[1])), text)


def files_of(row: Row, found: Iterable[str]) -> list[str]:
    """Of the names `found` those of its files: its own, and with a back end's and a family of CPUs' behind it."""
    behind = [re.compile(rf"{re.escape(row.file)}-{name}-[a-z]+[0-9]*") for name in PREFERENCE]
    files = [file for pattern in behind for file in sorted(found) if pattern.fullmatch(file)]
    return [row.file, *files] if row.file in found else files


def cpu_of(found: Mapping[str, Any]) -> str:
    return re.sub(r"\((R|TM)\)| Processor| CPU", "", found["machine"]["cpu"]).split("@")[0].strip()


def line(row: Row, file: str, found: Mapping[str, Any]) -> str:
    machine, held = found["machine"], "yes" if found["holds"] else "**no**"
    cells = [filled(row.question, found), filled(row.answer, found), filled(row.target, found), held]
    return f"| {' | '.join(cells)} | {machine['date'][:10]}, {cpu_of(found)}, load {machine['load_1min']} | `{file}` |"


def table() -> str:
    """The whole table."""
    found = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    if missing := sorted(found.keys() - {file for row in ROWS for file in files_of(row, found)}):
        raise SystemExit(f"bench/results has files without a row in tools/figures.py: {', '.join(missing)}")
    rows = [(row, file) for row in ROWS for file in files_of(row, found)]
    head = ["| question | measured | target | held | when, CPU | file |", "|---|---|---|---|---|---|"]
    return "\n".join(head + [line(row, file, found[file]) for row, file in rows])


def brief_table() -> str:
    """README's."""
    lines = ["| | measured | to compare | on |", "|---|---|---|---|"]
    for row in BRIEFS:
        found = json.loads((RESULTS / f"{row.file}.json").read_text())
        cells = [filled(text, found, rounded) for text in (row.what, row.measured, row.beside)]
        lines.append(f"| {' | '.join([*cells, found.get('gpu') or cpu_of(found)])} |")
    return "\n".join(lines)


PAGES: Mapping[str, Callable[[], str]] = {"docs/benchmarks.md": table, "README.md": brief_table}


def page(name: str) -> str:
    """The page with its table written anew."""
    text = (ROOT / name).read_text()
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{name} has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{PAGES[name]()}\n{END}{after}"


def main() -> int:
    is_check, stale = "--check" in sys.argv[1:], []
    for name in PAGES:
        wanted = page(name)
        if is_check and wanted != (ROOT / name).read_text():
            stale.append(name)
        elif not is_check:
            (ROOT / name).write_text(wanted)
    if stale:
        print(f"{', '.join(stale)}: not what bench/results says; run: python -m tools.figures")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
