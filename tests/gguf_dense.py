"""What llama.cpp's converter says of models that gguf_dense.py reads."""

from typing import Any


def dense_facts(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """Keys of the metadata, without the architecture's name."""
    if arch == "mistral3" and config["rope_parameters"]["llama_4_scaling_beta"]:
        rope = config["rope_parameters"]
        return {
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    return {}
