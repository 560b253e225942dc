"""manyhands.model.load, shard and ends: only the part that was asked for is read and held; bad checkpoints are named."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from manyhands.checkpoint.partition import layer_of
from manyhands.core import Precision, Span
from manyhands.errors import CutError, ModelError
from manyhands.model import load, tiles
from manyhands.model.ends import Ends
from manyhands.model.linear import FusedPart, InvariantLinear
from manyhands.model.load import ModelPart, context_length, find_layers, load_part, read_config
from manyhands.model.shard import Shard
from manyhands.testing.tiny import make_tiny
from tests.model.pipeline import Loader, random_ids

LAYERS = 6


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A llama that a test may damage."""
    return Path(shutil.copytree(llama, tmp_path / "copy"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors read from checkpoint files."""
    names: list[str] = []

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._handle: Any = safetensors.safe_open(*args, **kwargs)

        def __enter__(self) -> "Spy":
            return self

        def __exit__(self, *args: Any) -> None:
            return None

        def get_tensor(self, name: str) -> torch.Tensor:
            names.append(name)
            tensor: torch.Tensor = self._handle.get_tensor(name)
            return tensor

    monkeypatch.setattr(load, "safe_open", Spy)
    return names


def change_weights(folder: Path, drop: str = "", **put: torch.Tensor) -> None:
    """Remove tensors whose names contain `drop`, or store others in their place (dots of a name as double underscores)."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not drop or drop not in name}
    kept |= {name.replace("__", "."): tensor for name, tensor in put.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("span", [Span(0, 2), Span(2, 5), Span(5, 6)], ids=str)
def test_a_shard_reads_the_tensors_of_its_layers_alone(sharded: Path, reads: list[str], span: Span) -> None:
    """Not one byte of another layer or of the ends is read."""
    Shard(sharded, span, "bf16")
    assert {layer_of(name) for name in reads} == set(range(span.start, span.end))
    assert len(reads) == len(set(reads)) == 9 * len(span)


def test_absent_layers_hold_nothing(llama: Path) -> None:
    """A part's parameters are those of its layers, all real (none on the meta device), and no embedding or head."""
    config = read_config(llama)
    model = load_part(llama, config, ModelPart(Span(1, 3)), "fp32")
    _, _, layers = find_layers(model, LAYERS)
    held = {index for index, layer in enumerate(layers) if any(True for _ in layer.parameters())}
    assert held == {1, 2}
    assert all(p.device.type == "cpu" for p in layers.parameters())
    big = [name for name, p in model.named_parameters() if p.dim() > 1 and layer_of(name) is None]
    assert big == []
    names = {name for name, _ in model.named_parameters() if layer_of(name) is not None}
    assert {layer_of(name) for name in names} == {1, 2}, "absolute indices stay"


def test_a_shard_drops_weights_that_it_packed(llama: Path) -> None:
    """No stock linear is left, so no matrix is held twice."""
    shard = Shard(llama, Span(0, 1), "bf16")
    kinds = [type(m) for m in shard._layers.modules() if isinstance(m, nn.Linear | InvariantLinear | FusedPart)]
    in_layer = (0, 0) if tiles.available() else (5, 2)
    assert nn.Linear not in kinds
    assert (kinds.count(FusedPart), kinds.count(InvariantLinear)) == in_layer


@pytest.mark.parametrize(
    ("family", "embed", "head", "names"),
    [
        ("llama", True, True, {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}),
        ("llama", True, False, {"model.embed_tokens.weight"}),
        ("llama", False, True, {"model.norm.weight", "lm_head.weight"}),
        ("qwen2", True, True, {"model.embed_tokens.weight", "model.norm.weight"}),
        ("qwen2", True, False, {"model.embed_tokens.weight"}),
        ("qwen2", False, True, {"model.embed_tokens.weight", "model.norm.weight"}),
    ],
)
def test_ends_read_what_they_need(
    llama: Path, tied: Path, reads: list[str], family: str, embed: bool, head: bool, names: set[str]
) -> None:
    """The embedding for ids, norm and head for logits; a tied head is the embedding."""
    folder = {"llama": llama, "qwen2": tied}[family]
    both = Ends(folder, "fp32")
    reads.clear()
    ends = Ends(folder, "fp32", embed=embed, head=head)
    assert set(reads) == names and len(reads) == len(names)
    if embed:
        assert torch.equal(ends.embed(torch.tensor(random_ids(3, 0))), both.embed(torch.tensor(random_ids(3, 0))))
    if head:
        hidden = torch.ones(2, 64)
        assert torch.equal(ends.logits(hidden), both.logits(hidden))


def test_a_tied_head_multiplies_by_the_embedding(tied: Path) -> None:
    """Logits come from the embedding matrix, though no head is stored."""
    ends = Ends(tied, "fp32")
    tensors = {k: v.float() for k, v in load_file(tied / "model.safetensors").items()}
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + ends.config.rms_norm_eps)
    want = (normed * tensors["model.norm.weight"]) @ tensors["model.embed_tokens.weight"].t()
    torch.testing.assert_close(ends.logits(hidden), want)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_one_file_or_many_is_the_same_model(llama: Path, sharded: Path, precision: Precision) -> None:
    """How a checkpoint is cut into files has no influence on a bit."""
    assert len(list(sharded.glob("*.safetensors"))) > 1
    ids = random_ids(9, 1)
    one, many = (Loader(folder, precision).cut(0, 3, LAYERS).run(ids, [9]) for folder in (llama, sharded))
    assert np.array_equal(one, many)


@pytest.mark.parametrize("span", [Span(0, 7), Span(6, 7), Span(100, 200)], ids=str)
def test_layers_outside_the_model_are_refused(llama: Path, span: Span) -> None:
    with pytest.raises(CutError, match=r"out of range: the model has layers 0-5"):
        Shard(llama, span, "bf16")


def test_a_missing_layer_is_named(copy: Path) -> None:
    change_weights(copy, "layers.4.")
    with pytest.raises(ModelError, match=r"layer 4"):
        Shard(copy, Span(3, 6), "bf16")
    assert Shard(copy, Span(0, 4), "bf16").shapes, "other layers can be served"


@pytest.mark.parametrize("name", ["mlp.down_proj.weight", "self_attn.q_proj.weight", "input_layernorm.weight"])
def test_a_missing_tensor_is_named(copy: Path, name: str) -> None:
    """Never a layer with made-up weights."""
    change_weights(copy, f"layers.1.{name}")
    with pytest.raises(ModelError, match=re.escape(f"layers.1.{name}")):
        Shard(copy, Span(0, 2), "bf16")


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_missing_end_is_named(copy: Path, name: str) -> None:
    change_weights(copy, name)
    with pytest.raises(ModelError, match=r"head|embed|norm"):
        Ends(copy, "bf16")


@pytest.mark.parametrize("shape", [(96, 32), (1, 1), (64,)], ids=str)
def test_a_tensor_of_the_wrong_shape_is_named(copy: Path, shape: tuple[int, ...]) -> None:
    change_weights(copy, model__layers__2__mlp__up_proj__weight=torch.zeros(shape))
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj"):
        Shard(copy, Span(2, 3), "bf16")


def test_a_cut_off_file_is_named(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Shard(copy, Span(0, 6), "bf16")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "warp_drive"}', '{"model_type": "clip"}', "{}"])
def test_a_config_that_is_none_of_a_language_model_is_refused(copy: Path, text: str) -> None:
    """Unknown family, no family, no JSON: one error that names the file."""
    (copy / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"copy") as caught:
        Shard(copy, Span(0, 1), "bf16")
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 1024),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 1024),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 256}, 256),
    ],
)
def test_the_context_ends_where_rotary_scaling_would_switch(copy: Path, rope: dict[str, Any], length: int) -> None:
    """A scaling that depends on the length seen would make a position's numbers depend on its batch."""
    change_config(copy, rope_parameters=rope)
    assert context_length(read_config(copy)) == length


def test_stored_precision_and_computed_precision_are_independent(tmp_path: Path) -> None:
    """A checkpoint in fp32 can be served in bf16: what is computed is the precision asked for."""
    folder = make_tiny("llama", tmp_path, layers=1, dtype="fp32")
    shard = Shard(folder, Span(0, 1), "bf16")
    assert shard.dtype == torch.bfloat16 and shard.bytes_per_token() == 2 * 2 * 16 * 2
    assert Shard(folder, Span(0, 1), "fp32").bytes_per_token() == 2 * 2 * 16 * 4
