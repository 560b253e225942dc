"""GGUF files of MiniMax-Text-01 and MiniMax-M1 (minimax-01): names of their tensors, and what their metadata adds."""

from typing import Final

from manyhands.checkpoint.gguf_architecture import Architecture
from manyhands.checkpoint.gguf_configs import LINEAR, experts
from manyhands.checkpoint.gguf_keys import Config, GgufKeys
from manyhands.checkpoint.gguf_names import MIXTRAL

_TENSORS: Final = {
    **MIXTRAL,
    "attn_qkv": "self_attn.qkv_proj",
    "attn_gate": "self_attn.output_gate",
    "attn_norm_2": "self_attn.norm",
}
_PARTS: Final = ("linear_attention", "full_attention", "mlp")


def minimax_01(keys: GgufKeys, config: Config) -> Config:
    """One factor of all residual streams. Of layers that no key places, every eighth has softmax attention."""
    layers, scale = config["num_hidden_layers"], keys.number("residual_scale")
    every, found = keys.count("full_attention_interval", 8), keys.layers_with("attn_qkv.weight", layers)
    linear = keys.switches("attention.recurrent_layers", layers) or [i % every != 0 for i in range(1, len(found) + 1)]
    if linear != found:
        raise keys.refused(f"its layers with attn_qkv {_places(found)} are not those of lightning attention")
    keys.only("expert_weights_scale", 1.0)
    return {
        **experts(keys, config),
        **{f"layernorm_{part}_alpha": scale for part in _PARTS},
        "attn_type_list": [int(not on) for on in linear],
        "partial_rotary_factor": None,
        "postnorm": True,
        "rotary_dim": keys.count("rope.dimension_count", config["head_dim"]),
    }


def _places(on: list[bool]) -> list[int]:
    return [i for i, is_on in enumerate(on) if is_on]


MINIMAX_01: Final = Architecture(
    "minimax_text_01", "MiniMaxText01ForCausalLM", _TENSORS, minimax_01, (LINEAR,), biases=()
)
