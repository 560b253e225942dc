"""manyhands.worker.torch_program: Programs in torch as a node serves them, on torch-cpu; what is missing is one line."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.header import read_header
from manyhands.checkpoint.manifest import build_manifest
from manyhands.core import UNPROVEN, Precision, Span
from manyhands.engine import library, torch_functions
from manyhands.engine import torch as torch_engine
from manyhands.engine.library import FORCED
from manyhands.engine.span import Piece
from manyhands.engine.torch_memory import TorchCache
from manyhands.errors import ContextOverflow, CutError, Damaged, ModelError
from manyhands.testing.tiny import make_tiny
from manyhands.worker import torch_program
from manyhands.worker.runner import describe, device_name, load_ends, load_span, precision_note
from tests.gguf_files import tiny_gguf
from tests.nightly import daily
from tests.worker.pipeline import Feed, Loader, Logits, Pipeline, forced, random_ids

LAYERS = 4
CPU = "torch-cpu"
NATIVE = library.supported()[0]
IDS = random_ids(40, seed=3)
NEAR: dict[Precision, float] = {"fp32": 3e-5, "bf16": 0.08}  # of the largest logit (tests/engine/test_torch.py)


@pytest.fixture(autouse=True)
def on_torch_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By `monkeypatch`, as tests here do: what one undoes must not be what another set."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(FORCED, CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("device") / "llama", layers=LAYERS, seed=4)


def config(folder: Path) -> bytes:
    return (folder / "config.json").read_bytes()


def near(got: Logits, want: Logits, precision: Precision) -> bool:
    return float(np.abs(got - want).max() / np.abs(want).max()) < NEAR[precision]


def reference(folder: Path, precision: Precision, ids: list[int]) -> Logits:
    """Of the native engine."""
    return Loader(folder, precision, NATIVE).cut(0, LAYERS).run(ids, [len(ids)])


# Each family once and each precision with two of them; the other pairs nightly.
DAILY = [("llama", "bf16"), ("gemma2", "fp32"), ("gpt_oss", "bf16"), ("deepseek_v3", "fp32")]
NIGHTLY = [("llama", "fp32"), ("gemma2", "bf16"), ("gpt_oss", "fp32"), ("deepseek_v3", "bf16")]


@pytest.mark.parametrize(("family", "precision"), daily(DAILY, NIGHTLY))
def test_any_cut_chunk_company_and_rollback_is_near_the_native_engine(
    family: str, precision: Precision, tmp_path: Path
) -> None:
    """Three spans, chunks of 7, wrong drafts that are rolled back, another session between the rows."""
    folder = make_tiny(family, tmp_path / family, layers=LAYERS, seed=4)
    want, pipeline = reference(folder, precision, IDS), Loader(folder, precision, CPU).cut(0, 1, 3, LAYERS)
    mine, other, got = pipeline.session(64), pipeline.session(64), []
    for start in range(0, len(IDS), 7):
        ids = IDS[start : start + 7]
        pipeline.step([Feed(mine, start, [1, 2, 3])])  # wrong: the next step begins where this one did
        got.append(pipeline.step([Feed(other, start, IDS[start : start + 5]), Feed(mine, start, ids)])[1])
    assert near(np.concatenate(got), want, precision)
    assert [cache.length for cache in mine] == [len(IDS)] * 3


def test_scores_and_matrices_are_taken_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds a step's memory changes nothing but rounding."""
    want = Loader(folder, "bf16", CPU).cut(0, LAYERS).run(IDS, [40])
    seen: list[int] = []
    linear = functional.linear

    def noted(rows: Tensor, weight: Tensor) -> Tensor:
        seen.append(weight.numel())
        return linear(rows, weight)

    monkeypatch.setattr(torch_engine, "SCORES", 4 * 40 * 3)
    monkeypatch.setattr(torch_functions, "CONVERTED", 300)
    monkeypatch.setattr(functional, "linear", noted)
    assert near(Loader(folder, "bf16", CPU).cut(0, LAYERS).run(IDS, [40]), want, "bf16")
    assert max(seen) <= 300


def test_a_cache_takes_no_more_than_its_lease(folder: Path) -> None:
    """It grows as it is written, at most to the session's capacity, whose bytes are those that are counted for it."""
    span, ends = load_span(folder, Span(0, LAYERS), "bf16", 1), load_ends(folder, "bf16", 1)
    cache = span.new_cache(600)
    assert isinstance(cache, TorchCache) and cache.num_bytes == 0, "a step takes it, where the device is"
    sizes = []
    for start in range(0, 800, 50):
        span.step(ends.embed([1] * 50).tobytes(), [Piece(cache, start, 50)], 1)
        sizes.append(cache.num_bytes // span.bytes_per_token)
    assert sizes == [256] * 5 + [384] * 2 + [576] * 4 + [600] + [704] * 2 + [768, 832]  # its lease has grown
    small = span.new_cache(3)
    span.step(ends.embed([1]).tobytes(), [Piece(small, 0, 1)], 1)
    assert isinstance(small, TorchCache) and small.num_bytes == 3 * span.bytes_per_token
    assert sum(tensor.nbytes for layer in cache.layers for tensor in layer) == 832 * span.bytes_per_token


def test_what_a_cache_holds_survives_growth_and_copies(folder: Path) -> None:
    pipeline = Loader(folder, "fp32", CPU).cut(0, LAYERS)
    ids = random_ids(300, seed=5)
    want = pipeline.run(ids, [300])
    (grown,) = pipeline.session(0)
    pipeline.run(ids[:280], [200, 80], [grown])
    copied = pipeline.spans[0].fork(grown, 280, 300)
    assert copied.length == 280
    assert near(pipeline.step([Feed([copied], 280, ids[280:])])[0], want[280:], "fp32")


def test_a_devices_memory_bounds_what_is_leased(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is free once weights are there; None where torch does not tell."""
    span = load_span(folder, Span(0, LAYERS), "bf16", 1)
    assert span.cache_room is None
    monkeypatch.setattr(torch_program, "free_memory", lambda name: 1000)
    assert span.cache_room == 500


def test_part_of_a_span_and_what_does_not_fit(folder: Path) -> None:
    span, ends = load_span(folder, Span(1, LAYERS), "bf16", 1), load_ends(folder, "bf16", 1)
    rows = ends.embed([1, 2]).tobytes()
    parts = [span.new_cache(5, Span(1, 2)), span.new_cache(5, Span(2, 4))]
    whole = span.step(rows, [Piece(span.new_cache(5), 0, 2)], 1)
    half = span.step(rows, [Piece(parts[0], 0, 2)], 1)
    assert np.array_equal(span.step(half.tobytes(), [Piece(parts[1], 0, 2)], 1), whole)
    with pytest.raises(ModelError, match="different layers"):
        span.step(rows, [Piece(part, 0, 1) for part in parts], 1)
    with pytest.raises(CutError):
        span.new_cache(5, Span(0, 2))
    with pytest.raises(CutError):
        load_span(folder, Span(2, LAYERS + 1), "bf16", 1)
    with pytest.raises(ModelError, match="bytes are not 2 rows"):
        span.step(rows[:-1], [Piece(span.new_cache(5), 0, 2)], 1)
    with pytest.raises(ContextOverflow):
        span.step(rows, [Piece(span.new_cache(0), 1 << 20, 2)], 1)
    for wrong in (-1, ends.vocab_size):
        with pytest.raises(ModelError, match=f"token id {wrong}"):
            ends.embed([1, wrong])


def test_facts_name_the_device_and_a_class_that_is_never_exact(folder: Path) -> None:
    facts = describe(folder, "bf16")
    with forced(NATIVE):
        native = describe(folder, "bf16")
        assert device_name() == f"cpu {NATIVE}"
    assert facts.arithmetic == f"bf16/torch-{torch.__version__}/torch-cpu{UNPROVEN}"
    assert facts.back_end == CPU == load_span(folder, Span(0, 1), "bf16", 1).back_end
    for name in ("num_layers", "hidden_size", "vocab_size", "context_length"):
        assert getattr(facts, name) == getattr(native, name)
    assert "class E2" in precision_note(config(folder), "bf16") and device_name() == "torch-cpu CPU"


def test_every_tensor_is_proven_and_becomes_memory_of_its_own(tmp_path: Path) -> None:
    folder = make_tiny("mixtral", tmp_path / "m", layers=2, seed=1)
    manifest, path = build_manifest(folder), folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    for entry in read_header(path)[::5]:
        middle = (entry.start + entry.end) // 2
        raw[middle] ^= 1
        path.write_bytes(raw)
        raw[middle] ^= 1
        with pytest.raises(Damaged, match="SHA-256") as failed:
            load_span(folder, Span(0, 2), "bf16", 1, manifest)
            load_ends(folder, "bf16", 1, manifest)
        assert failed.value.names == (entry.name,)
    path.write_bytes(raw)
    pipeline = Pipeline([load_span(folder, Span(0, 2), "bf16", 1, manifest)], load_ends(folder, "bf16", 1, manifest))
    want = pipeline.run(IDS, [40])
    with path.open("r+b") as handle:
        handle.truncate(100)
    assert np.array_equal(pipeline.run(IDS, [40]), want)


def test_quantised_matrices_are_held_as_numbers_and_small_weights_are_refused(tmp_path: Path) -> None:
    file, _ = tiny_gguf("llama", tmp_path / "model.gguf", "Q4_0", layers=LAYERS)
    folder = gguf_folder(file, tmp_path / "home")
    both: list[Precision] = ["fp32", "bf16"]
    for precision in both:
        got = Loader(folder, precision, CPU).cut(0, 2, LAYERS).run(IDS, [40])
        assert near(got, reference(folder, precision, IDS), precision)
    assert "rounded to bf16" in precision_note(config(folder), "bf16")
    refusals: list[Precision] = ["w4", "w8", "fp16", "bf16+c8"]
    for refused in refusals:
        with pytest.raises(
            ModelError, match=f"torch-cpu computes in bf16 and fp32, not in .*{refused[:2]}.*--dtype bf16"
        ):
            describe(folder, refused)


def test_models_with_states_are_refused(tmp_path: Path) -> None:
    for family in ("lfm2", "qwen3_5_text", "granitemoehybrid_mamba"):
        with pytest.raises(
            ModelError, match=f"{family.removesuffix('_mamba')} has .* torch-cpu does not compute: .*cuda$"
        ):
            describe(make_tiny(family, tmp_path / family), "bf16")


def test_matrices_of_16_bits_stay_as_they_are(tmp_path: Path) -> None:
    """A checkpoint in fp16 loses nothing in bf16, as on the native engine: only rows are rounded."""
    folder = make_tiny("llama", tmp_path / "half", layers=LAYERS, seed=4, dtype="fp16")
    assert near(Loader(folder, "fp32", CPU).cut(0, LAYERS).run(IDS, [40]), reference(folder, "fp32", IDS), "fp32")
    span = load_span(folder, Span(0, 1), "bf16", 1)
    assert isinstance(span, torch_program.DeviceSpan)
    kept = {tensor.dtype for weights in span._span._weights for tensor in weights._held.values()}
    assert kept == {torch.float16, torch.float32}


@pytest.mark.parametrize("name", ["mps", "xpu", "xpu:7"])
def test_a_device_that_is_missing_is_one_line(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_program, "_count", lambda kind: int(kind == CPU or (kind, name) == ("xpu", "xpu:7")))
    monkeypatch.setattr(torch_program, "describe_device", lambda name: "a device")
    monkeypatch.setattr(torch_program, "free_memory", lambda name: None)
    torch_program.open_device.cache_clear()
    monkeypatch.setenv(FORCED, name)
    for act in (lambda: describe(folder, "bf16"), lambda: load_span(folder, Span(0, 1), "bf16", 1), device_name):
        with pytest.raises(
            ModelError, match=f"--device {name}: torch .* finds .*torch-cpu.* leave --device out"
        ) as said:
            act()
        assert "\n" not in str(said.value)


class FakeXpu:
    """What torch.xpu says of two GPUs."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def get_device_name(index: int) -> str:
        return f"Vendor/GPU\n {index}" + "x" * 300

    @staticmethod
    def mem_get_info(index: int) -> tuple[int, int]:
        return 10**9 * (index + 1), 10**10


def test_gpus_are_listed_with_their_names_and_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here: what torch would say of two."""
    monkeypatch.setattr(torch, "xpu", FakeXpu)
    torch_program.open_device.cache_clear()
    found: list[Any] = [tuple(one) for one in torch_program.devices_here()]
    assert [one[0] for one in found][:3] == [CPU, "xpu:0", "xpu:1"] and found[2][2] == 2 * 10**9
    monkeypatch.setenv(FORCED, "xpu:1")
    named = describe(folder, "bf16")
    assert named.back_end == "xpu:1" and "/xpu VendorGPU 1xxx" in named.arithmetic
    assert named.arithmetic.endswith(UNPROVEN) and len(named.arithmetic) < 128 and named.arithmetic.isprintable()
    assert len(device_name()) <= 64 and device_name().isprintable()
    torch_program.open_device.cache_clear()


_ALONE = """
import os, sys
from pathlib import Path
sys.modules["transformers"] = None
if sys.argv[2] == "without":
    sys.modules["torch"] = None
from manyhands.core import Span
from manyhands.errors import ModelError
from manyhands.worker.runner import describe, load_span
try:
    print(describe(Path(sys.argv[1]), "bf16").back_end, load_span(Path(sys.argv[1]), Span(0, 1), "bf16", 1).back_end)
except ModelError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("which", "said"), [("with", "torch-cpu torch-cpu"), ("without", "pip install 'manyhands[torch]'")]
)
def test_torch_alone_is_needed_and_who_lacks_it_is_told(folder: Path, which: str, said: str) -> None:
    """transformers is not."""
    command = [sys.executable, "-c", _ALONE, str(folder), which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("\n") == 1 and said in done.stdout
