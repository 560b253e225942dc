"""config.json -> Program: one recipe a family, by model_type.

llama      llama, mistral, qwen2, qwen3, phi3, smollm3, granite, ernie4_5
gemma      gemma, gemma2, gemma3_text
wrapped    olmo2, olmo3, glm4
layernorm  stablelm, phi, gpt_neox, nemotron, starcoder2, cohere2
experts    mixtral, qwen2_moe, qwen3_moe, gpt_oss
latent     deepseek_v3, minicpm3
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from manyhands.errors import ModelError
from manyhands.program.families import experts, gemma, latent, layernorm, llama, wrapped
from manyhands.program.fields import Fields
from manyhands.program.ops import Program

_LONGEST: Final = 1 << 22  # bytes of a config.json; the largest of the hub have some 20,000
FAMILIES: Final[Mapping[str, Callable[[Fields], Program]]] = {
    "cohere2": layernorm.cohere2,
    "deepseek_v3": latent.deepseek_v3,
    "ernie4_5": llama.ernie4_5,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3_text,
    "glm4": wrapped.glm4,
    "gpt_neox": layernorm.gpt_neox,
    "gpt_oss": experts.gpt_oss,
    "granite": llama.granite,
    "llama": llama.llama,
    "minicpm3": latent.minicpm3,
    "mistral": llama.mistral,
    "mixtral": experts.mixtral,
    "nemotron": layernorm.nemotron,
    "olmo2": wrapped.olmo2,
    "olmo3": wrapped.olmo3,
    "phi": layernorm.phi,
    "phi3": llama.phi3,
    "qwen2": llama.qwen2,
    "qwen2_moe": experts.qwen2_moe,
    "qwen3": llama.qwen3,
    "qwen3_moe": experts.qwen3_moe,
    "smollm3": llama.smollm3,
    "stablelm": layernorm.stablelm,
    "starcoder2": layernorm.starcoder2,
}


def build_program(config: Mapping[str, Any], where: str = "config.json") -> Program:
    """The Program of a parsed config.json. Raises ModelError in one line for what cannot be computed exactly."""
    family = config.get("model_type")
    recipe = FAMILIES.get(family) if isinstance(family, str) else None
    if recipe is None:
        shown = repr(family)[:80]
        raise ModelError(f"{where}: model_type is {shown}; there are recipes for {', '.join(FAMILIES)}")
    return recipe(Fields(config, where))


def read_program(folder: Path) -> Program:
    """The Program of a checkpoint folder. Raises ModelError for an absent, oversized or corrupt config.json."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > _LONGEST:
            raise ModelError(f"{path} is longer than {_LONGEST} bytes: it is no config of a language model")
        config = json.loads(path.read_text("utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object")
    return build_program(config, str(path))
