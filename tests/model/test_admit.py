"""Families beyond the tested ones are served only after a self-test, and refused with a reason otherwise."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from manyhands.errors import ModelError
from manyhands.model import admit as admission
from manyhands.model import attention
from manyhands.model.admit import TESTED, admit, check
from manyhands.testing.tiny import FAMILIES


def config(family: str, **values: Any) -> Any:
    return AutoConfig.for_model(family, num_hidden_layers=6, hidden_size=128, num_attention_heads=4, **values)


def test_tested_families_are_those_that_tiny_makes() -> None:
    """TESTED is a claim about the test suite: every family in it has a tiny checkpoint there."""
    assert set(FAMILIES) >= TESTED


def test_a_family_nobody_listed_passes_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    granite = config("granite", num_key_value_heads=2, embedding_multiplier=12.0, logits_scaling=8.0)
    admit(granite, tmp_path)
    monkeypatch.setattr(admission, "check", lambda _: pytest.fail("tested a second time"))
    admit(granite, tmp_path)


def test_a_family_whose_products_are_not_ours_is_refused(tmp_path: Path) -> None:
    """gpt2's Conv1D is no nn.Linear, so its rows depend on their number: the self-test sees that."""
    gpt2 = AutoConfig.for_model("gpt2", n_layer=6, n_embd=128, n_head=4)
    with pytest.raises(ModelError, match="'gpt2' is refused"):
        admit(gpt2, tmp_path)
    assert not (tmp_path / "admitted.json").exists()


def test_a_family_that_breaks_upstream_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'llama4_text' is refused") as caught:
        admit(config("llama4_text", num_key_value_heads=2, num_local_experts=2), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_memory_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "admitted.json").write_text("{[")
    admit(config("stablelm", num_key_value_heads=4), tmp_path)


def test_the_self_test_sees_a_wrong_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """If our attention forgot the sliding window, transformers' own logits would differ."""
    mistral = config("mistral", num_key_value_heads=2, sliding_window=8)
    check(mistral)
    real = attention._mask
    monkeypatch.setattr(attention, "_mask", lambda plan, s, group, _, dtype: real(plan, s, group, None, dtype))
    with pytest.raises(ModelError, match="differ from transformers"):
        check(mistral)
