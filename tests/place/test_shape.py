"""What is said of a model without loading it is what it takes once loaded."""

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from manyhands.checkpoint.folder import read_config
from manyhands.checkpoint.split import split_model
from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.cpu import CpuSpan
from manyhands.errors import ModelError
from manyhands.place.shape import look_up, stored_precision
from manyhands.testing.tiny import make_tiny
from manyhands.worker.runner import describe, load_span
from tests.gguf_files import tiny_gguf
from tests.mxfp4_files import packed_mxfp4_tiny
from tests.quantised_cases import CASES
from tests.quantised_files import mxfp4_tiny, quantised_tiny
from tests.weights.hub_server import REPO, FakeHub, serving
from tests.worker.pipeline import forced


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "lfm2", "deepseek_v4"])
def test_states_are_as_large_as_the_layers_say(tmp_path: Path, home: Path, family: str) -> None:
    """Of any span; what a plan counts is one session of them, beside its positions."""
    folder = make_tiny(family, tmp_path / family)
    shape, facts = look_up(str(folder), "bf16", home).shape, describe(folder, "bf16")
    assert shape.state_bytes == facts.state_bytes and shape.cache_bytes == facts.position_bytes
    each = zip(facts.state_bytes, facts.position_bytes, strict=True)
    kinds = {(True, True), (False, True)} if family == "deepseek_v4" else {(True, False), (False, True)}
    assert {(state > 0, position > 0) for state, position in each} == kinds
    for span in (Span(0, 6), Span(1, 3), Span(2, 6)):
        runner, part = load_span(folder, span, "bf16", 1), slice(span.start, span.end)
        assert runner.session_bytes == sum(facts.state_bytes[part]) > 0
        assert runner.bytes_per_token == sum(facts.position_bytes[part])
        cached = shape.span_bytes(span, 100) - shape.span_bytes(span, 0)
        assert cached == runner.session_bytes + 100 * runner.bytes_per_token


@pytest.mark.parametrize("engine", [library.supported()[0], "torch-cpu"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2_moe", "gemma3_text", "minicpm3", "gpt_oss", "deepseek_v3", "deepseek_v4"]
)
def test_cache_is_as_large_as_the_layers_say(tmp_path: Path, home: Path, family: str, engine: str) -> None:
    """Also where latents are cached, or heads are wider than hidden / heads."""
    folder = make_tiny(family, tmp_path / family, layers=2)
    with forced(engine):
        shape = look_up(str(folder), "bf16", home).shape
        taken = load_span(folder, Span(0, 2), "bf16", 1).bytes_per_token
        assert taken == sum(shape.cache_bytes) == sum(describe(folder, "bf16").position_bytes)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "w8", "w4"])
@pytest.mark.parametrize(("family", "dtype"), [("llama", "bf16"), ("qwen2", "fp32"), ("mixtral", "bf16")])
def test_bytes_are_those_that_the_native_engine_holds(
    tmp_path: Path, home: Path, family: str, dtype: Precision, precision: Precision
) -> None:
    """Matrices of 16 bits stay so in fp32 too; those of 32 are rounded in bf16."""
    folder = make_tiny(family, tmp_path / family, layers=2, hidden=256, dtype=dtype)
    with forced(library.supported()[0]):
        shape = look_up(str(folder), precision, home).shape
        span = load_span(folder, Span(0, 2), precision, 1)
    assert isinstance(span, CpuSpan)
    held = {
        id(array): array.nbytes
        for _, _, _, tensors in span._layers.ops
        for array in tensors
        if isinstance(array, np.ndarray)
    }
    assert 0.95 <= sum(held.values()) / sum(shape.layer_bytes) <= 1.1


def test_the_bundled_model_is_known(home: Path) -> None:
    found = look_up("tales", "bf16", home)
    assert found.shape.num_layers == 12 and found.folder is not None


def test_a_part_tells_of_the_whole_but_is_not_measured(llama: Path, home: Path, tmp_path: Path) -> None:
    first, _ = split_model(llama, [Span(0, 3), Span(3, 6)], tmp_path / "parts")
    whole, part = look_up(str(llama), "bf16", home), look_up(str(first), "bf16", home)
    assert part.shape.layer_bytes == whole.shape.layer_bytes
    assert whole.folder == llama and part.folder is None


def test_of_a_hub_model_only_headers_are_read(llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeHub(llama)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        found = look_up(REPO, "bf16", home)
    assert found.folder is None and found.config == read_config(llama)
    assert found.shape.layer_bytes == look_up(str(llama), "bf16", home).shape.layer_bytes
    assert 0 < server.weight_bytes < (llama / "model.safetensors").stat().st_size / 10


def test_a_hub_that_is_down_is_no_matter_after_a_fetch(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        look_up(REPO, "bf16", home)
    (part, _) = split_model(llama, [Span(0, 3), Span(3, 6)], home / "parts")
    (home / "models").mkdir()
    part.rename(home / "models" / f"{REPO.replace('/', '--')}@0123")
    assert look_up(REPO, "bf16", home).shape.num_layers == 6


@pytest.mark.parametrize("config, said", [("[]", "not an object"), ("{}", "num_hidden_layers"), ("{", "corrupt")])
def test_a_config_of_no_model_is_refused(llama: Path, home: Path, tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.json").write_text(config)
    (tmp_path / "x" / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=said):
        look_up(str(tmp_path / "x"), "bf16", home)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "w8", "w4"])
@pytest.mark.parametrize(
    ("name", "auto"), [("awq", "w4"), ("gptq", "w4"), ("int8", "w8"), ("mxfp4", "w8"), ("packed mxfp4", "w8")]
)
def test_quantised_matrices_are_counted_as_they_are_held(
    tmp_path: Path, home: Path, name: str, auto: str, precision: Precision
) -> None:
    if name == "mxfp4":
        folder, _ = mxfp4_tiny(tmp_path / "q", layers=2, hidden=256)
    elif name == "packed mxfp4":
        folder, _ = packed_mxfp4_tiny(tmp_path / "q", layers=2, hidden=256)
    else:
        config, pack, _, facts = CASES[name]
        folder, _ = quantised_tiny(tmp_path / "q", config, pack, layers=2, hidden=256, intermediate_size=512, **facts)
    assert stored_precision(str(folder), home) == auto
    shape, span = look_up(str(folder), precision, home).shape, load_span(folder, Span(0, 2), precision, 1)
    assert isinstance(span, CpuSpan)
    held = {
        id(array): array.nbytes
        for _, _, _, tensors in span._layers.ops
        for array in tensors
        if isinstance(array, np.ndarray)
    }
    assert 0.95 <= sum(held.values()) / sum(shape.layer_bytes) <= 1.1


def test_layers_that_the_checkpoint_lacks_are_named(llama: Path, home: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 8}))
    (tmp_path / "x" / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="no tensors of layer 6"):
        look_up(str(tmp_path / "x"), "bf16", home)


@pytest.mark.parametrize(
    ("dtype", "auto"),
    [
        ("Q4_0", "w4"),
        ("Q4_1", "w4"),
        ("Q4_K", "w4"),
        ("MXFP4", "w4"),
        ("IQ4_XS", "w4"),
        ("Q3_K", "w4"),
        ("Q2_K", "w4"),
        ("IQ3_XXS", "w4"),
        ("IQ2_XXS", "w4"),
        ("TQ1_0", "w4"),
        ("Q2_0", "w4"),
        ("PQ2_0", "w4"),
        ("NVFP4", "w8"),
        ("Q8_0", "w8"),
        ("Q6_K", "w8"),
        ("F16", "bf16"),
    ],
)
def test_a_gguf_file_is_held_as_it_is_stored(dtype: str, auto: str, tmp_path: Path) -> None:
    """What --dtype auto, the default, means."""
    file, folder = tiny_gguf("llama", tmp_path / "tiny.gguf", dtype, layers=1, hidden=256, intermediate_size=256)
    assert stored_precision(str(file), tmp_path / "home") == auto
    assert stored_precision(str(folder), tmp_path / "home") == stored_precision("tales", tmp_path / "home") == "bf16"
