"""What the configs of tiny models of bitnet, of older families and of Mamba need, which have names of their own for sizes."""

from collections.abc import Callable, Mapping
from typing import Final

from manyhands.testing.tiny_latent import WINDOW, Overrides

_NO_HEADS: Final[Overrides] = {"num_attention_heads": None, "num_key_value_heads": None}


def _falcon(hidden: int) -> Overrides:
    return {"ffn_hidden_size": hidden * 3 // 2, "new_decoder_architecture": True, "num_kv_heads": 2}


def _gptj(hidden: int) -> Overrides:
    return {"n_inner": hidden * 3 // 2, "rotary_dim": hidden // 8}


def _bigcode(hidden: int) -> Overrides:
    return {"n_inner": hidden * 3 // 2, "num_key_value_heads": None}


def _neo(hidden: int) -> Overrides:
    return {"num_key_value_heads": None, "window_size": WINDOW}


def neo_kinds(layers: int) -> Overrides:
    """Every other layer of gpt_neo has a window."""
    return {"attention_types": [[["local" if i % 2 else "global"], 1] for i in range(layers)]}


def _opt(hidden: int) -> Overrides:
    return {"num_key_value_heads": None, "ffn_dim": hidden // 2, "word_embed_proj_dim": hidden}


def _mamba(hidden: int) -> Overrides:
    return {**_NO_HEADS, "intermediate_size": hidden * 3 // 2, "state_size": 12, "time_step_rank": 20}


def _mamba2(hidden: int) -> Overrides:
    return {
        **_NO_HEADS,
        "intermediate_size": hidden * 2,
        "num_heads": 8,
        "head_dim": hidden // 4,
        "n_groups": 2,
        "state_size": 20,
    }


# Of tied models: what embeds ids and positions, and the norm before the head.
EMBEDDINGS: Final = (
    "embed_tokens.weight",
    "lm_head.weight",
    "transformer.wte.weight",
    "word_embeddings.weight",
    "embed_positions.weight",
    "transformer.wpe.weight",
)
LAST_NORMS: Final = (
    "model.norm.weight",
    "transformer.ln_f.weight",
    "transformer.norm_f.weight",
    "model.decoder.final_layer_norm.weight",
    "biogpt.layer_norm.weight",
)
# As MORE of tiny_configs.py.
OLDER: Final[Mapping[str, tuple[str, Callable[[int], Overrides]]]] = {
    "biogpt": ("biogpt", lambda hidden: {"num_key_value_heads": None}),
    "bitnet": ("bitnet", lambda hidden: {}),
    "bloom": ("bloom", lambda hidden: {"num_key_value_heads": None}),
    "codegen": ("codegen", _gptj),
    "falcon": ("falcon", _falcon),
    "falcon_mamba": ("falcon_mamba", _mamba),
    "gpt2": ("gpt2", lambda hidden: {"n_inner": hidden * 3 // 2, "num_key_value_heads": None}),
    "gpt_bigcode": ("gpt_bigcode", _bigcode),
    "gpt_neo": ("gpt_neo", _neo),
    "gptj": ("gptj", _gptj),
    "mamba": ("mamba", _mamba),
    "mamba2": ("mamba2", _mamba2),
    "mpt": ("mpt", lambda hidden: {"num_key_value_heads": None}),
    "opt": ("opt", _opt),
}
