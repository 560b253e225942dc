"""What the metadata of more architectures without experts in all layers adds to the config.json."""

from manyhands.checkpoint.gguf_keys import Config, GgufKeys


def mistral3(keys: GgufKeys, config: Config) -> Config:
    """Ministral 3, whose queries are scaled from a position on; and Mistral Small 3.1 and 3.2, without any of that."""
    scaling = {"rope_theta": config["rope_theta"], **config.get("rope_scaling", {"rope_type": "default"})}
    log, beta = keys.number("rope.scaling.yarn_log_multiplier", 0.0), keys.number("attention.temperature_scale", 0.0)
    if scaling["rope_type"] == "yarn" and log:
        scaling |= {"mscale": 1.0, "mscale_all_dim": log}  # the first is not in the file: llama.cpp takes 1
    if beta:
        context = config["max_position_embeddings"]
        original = keys.count("rope.scaling.original_context_length", context)
        scaling["original_max_position_embeddings"] = original
    return {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {**scaling, "llama_4_scaling_beta": beta},
    }
