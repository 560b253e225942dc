"""GGUF files of Phi-3.5-MoE and Phi-mini-MoE (phimoe): what their metadata adds, and what it leaves out."""

from typing import Final

from manyhands.checkpoint.gguf_architecture import ATTENTION, NORMS, Architecture
from manyhands.checkpoint.gguf_configs import experts, phi3
from manyhands.checkpoint.gguf_keys import Config, GgufKeys
from manyhands.checkpoint.gguf_names import MIXTRAL, PHI2_ENDS

_NOISE: Final = 0.01  # of both
_LENGTHS: Final = (131072, 4096)  # of Phi-3.5-MoE, with its scaling and before; the other is not scaled
_STATED: Final = 1.1902380714  # what the converter makes of these lengths
_PUBLISHED: Final = 1.243163121016122  # the factor of tables, which the checkpoint's config has besides

_ENDS: Final = {
    **PHI2_ENDS,
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
}


def phimoe(keys: GgufKeys, config: Config) -> Config:
    """The noise that the sparse mixer compares with, and the factor of tables: no file has them, checkpoints do."""
    scaling = config.get("rope_scaling")
    return {
        **phi3(keys, config),
        **experts(keys, config),
        **({} if scaling is None else {"rope_scaling": _scaled(keys, config, scaling)}),
        "lm_head_bias": any(tensor.name == "output.bias" for tensor in keys.gguf.tensors),
        "router_jitter_noise": _NOISE,
    }


def _scaled(keys: GgufKeys, config: Config, scaling: Config) -> Config:
    lengths = config["max_position_embeddings"], scaling.get("original_max_position_embeddings")
    stated = scaling.get("attention_factor", 1.0)
    if lengths != _LENGTHS or scaling["rope_type"] != "longrope" or abs(stated - _STATED) > 1e-6:
        raise keys.refused("its positions are scaled otherwise than those of Phi-3.5-MoE, whose factor no file states")
    factors = {name: scaling[name] for name in ("short_factor", "long_factor", "original_max_position_embeddings")}
    return {**factors, "rope_type": "longrope", "short_mscale": _PUBLISHED, "long_mscale": _PUBLISHED}


PHIMOE: Final = Architecture(
    "phimoe",
    "PhimoeForCausalLM",
    MIXTRAL,
    phimoe,
    ends=_ENDS,
    biases=(NORMS, ("attention_bias", ATTENTION)),
)
