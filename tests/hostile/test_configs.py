"""untrusted config.json: what cannot be is one line that names the field, before a library or the memory sees it (F18)."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.checkpoint.config_fields import MAX_DEPTH, parse_config
from manyhands.checkpoint.folder import MAX_CONFIG_BYTES
from manyhands.checkpoint.manifest import build_manifest
from manyhands.core import Span
from manyhands.errors import ModelError
from manyhands.place.shape import look_up
from manyhands.testing import tiny
from manyhands.testing.tiny import FAMILIES, make_tiny
from manyhands.weights.download import proven_config
from manyhands.worker.runner import describe, load_ends, load_span

ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("configs") / "tiny", layers=3, seed=8)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def with_config(model: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    folder = shutil.copytree(model, to / "changed")
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(do: Callable[[], object]) -> str:
    """The one line that it ends with, at once."""
    began = time.monotonic()
    with pytest.raises(ModelError) as caught:
        do()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600 and "Traceback" not in text
    assert time.monotonic() - began < 10
    return text


BAD: list[tuple[str, object]] = [
    ("num_hidden_layers", 1_000_000_000),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", "three"),
    ("num_hidden_layers", True),
    ("num_hidden_layers", 3.5),
    ("rms_norm_eps", "x"),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", {"a": 1}),
    ("hidden_size", 1_000_000_000),
    ("hidden_size", -64),
    ("vocab_size", 10**12),
    ("vocab_size", float("inf")),
    ("num_attention_heads", 0),
    ("num_key_value_heads", 10**9),
    ("head_dim", -1),
    ("head_dim", 10**7),
    ("intermediate_size", 10**12),
    ("max_position_embeddings", 1 << 60),
    ("sliding_window", "wide"),
    ("some_new_experts", 10**9),
    ("some_new_layers", 10**9),
    ("some_new_dim", 10**10),
    ("anything", 10**40),
    ("anything", float("-inf")),
    ("time_step_limit", [float("-inf"), 1.0]),
    ("time_step_limit", [0.0, float("nan")]),
    ("layers_block_type", ["mlp"] * 5000),
    ("model_type", 7),
    ("architectures", 3),
    ("architectures", [{"a": 1}]),
    ("hidden_act", "a" * 10_000),
    ("rope_parameters", "yarn"),
    ("text_config", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda x: str(x)[:24])
def test_a_bad_field_is_named_with_its_value_wherever_a_config_is_read(
    model: Path, tmp_path: Path, field: str, value: object
) -> None:
    folder = with_config(model, tmp_path, lambda config: config.update({field: value}))
    for read in (
        lambda folder: describe(folder, "bf16"),
        build_manifest,
        lambda folder: look_up(str(folder), "bf16", tmp_path),
    ):
        text = refusal(lambda: read(folder))  # noqa: B023
        assert field in text and "config.json" in text
    refusal(lambda: proven_config((folder / "config.json").read_bytes()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("factor", 1e300),
        ("factor", 0),
        ("factor", "8"),
        ("factor", (None and 0) or float("nan")),
        ("rope_theta", -1.0),
        ("original_max_position_embeddings", 1 << 50),
        ("low_freq_factor", 1e12),
        ("short_factor", [1.0, 1e99]),
        ("short_factor", ["x"]),
        ("rope_type", {"x": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_absurd_rope_scalings_are_refused(key: str, value: object, place: str) -> None:
    scaling = {**ROPE, key: value}
    for found in (scaling, {"full_attention": scaling}):
        raw = json.dumps({place: found}).encode()
        assert key in refusal(lambda: parse_config(raw))  # noqa: B023
    inner = json.dumps({"text_config": {place: {**ROPE, "factor": 0}}}).encode()
    assert "text_config" in refusal(lambda: parse_config(inner))


def test_rope_of_a_kind_that_does_not_exist_is_one_line(model: Path, tmp_path: Path) -> None:
    folder = with_config(model, tmp_path, lambda c: c.update(rope_parameters={"rope_type": "warp", "rope_theta": 1e4}))
    refusal(lambda: load_span(folder, Span(0, 1), "bf16", 1))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
        b'{"a":[' + b"1," * 200_000 + b"1]}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"hidden_size": 64, "hidden_size": 1}',
        b'{"text_config": {"vocab_size": 64, "vocab_size": 1}}',
        b'{"a": "' + b"x" * MAX_CONFIG_BYTES + b'"}',
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_what_is_no_config_is_refused_quickly(raw: bytes) -> None:
    refusal(lambda: parse_config(raw))
    refusal(lambda: proven_config(raw))


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9), st.lists, max_leaves=8)
)
def test_any_value_of_any_known_field_is_taken_or_refused(value: object) -> None:
    for field in ("hidden_size", "rms_norm_eps", "rope_scaling", "text_config", "model_type", "layer_types", "x"):
        try:
            parse_config(json.dumps({field: value, "y": {field: value}}).encode())
        except ModelError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 65536, "head_dim": 16}, "65536"),
        ({"vocab_size": 4_000_000}, "4000000"),
        ({"intermediate_size": 1 << 20}, "1048576"),
        ({"num_attention_heads": 4096}, "q_proj"),
        ({"head_dim": 8192}, "_proj"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, ""),
    ],
)
def test_a_config_must_agree_with_the_tensors_beside_it(
    model: Path, tmp_path: Path, changes: dict[str, int], named: str
) -> None:
    """Some would ask for hundreds of gigabytes: refused by the headers, before anything is allocated."""
    folder = with_config(model, tmp_path, lambda config: config.update(changes))

    def load() -> None:
        load_span(folder, Span(0, 3), "bf16", 1)
        load_ends(folder, "bf16", 1)

    assert named in refusal(load)


def test_layers_that_no_file_holds_are_refused(model: Path, tmp_path: Path) -> None:
    folder = with_config(model, tmp_path, lambda config: config.update(num_hidden_layers=1000))
    assert "layer 3" in refusal(lambda: look_up(str(folder), "bf16", tmp_path))


@pytest.mark.parametrize("field", ["num_local_experts", "moe_intermediate_size"])
def test_experts_that_no_file_holds_are_refused(tmp_path: Path, field: str) -> None:
    """Upstream fuses experts under other names, so these are compared by their number of elements."""
    family = "mixtral" if field == "num_local_experts" else "qwen3_moe"
    folder = with_config(make_tiny(family, tmp_path / "moe", layers=2), tmp_path, lambda c: c.update({field: 5000}))
    refusal(lambda: load_span(folder, Span(0, 2), "bf16", 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_ours_is_within_the_limits(family: str) -> None:
    config = tiny.tiny_config(family, layers=4)
    parse_config(config.to_json_string(use_diff=False).encode())
