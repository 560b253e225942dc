"""config.json -> Program: one recipe a family, by model_type.

llama      llama, mistral, ministral, ministral3, qwen2, qwen3, phi3, smollm3, granite, ernie4_5,
           seed_oss, glm, helium, arcee, cwm, internlm3, iquestcoder, hunyuan_v1_dense, nanbeige
granite    granitemoeshared, granite_swa, granitemoe_swa, hyperclovax
gemma      gemma, gemma2, gemma3_text, vaultgemma
gemma3n    gemma3n_text
gemma4     gemma4_text, gemma4_unified_text (layer_inputs: rows of E2B, E4B and gemma3n)
wrapped    olmo2, olmo3, flex_olmo, exaone4, glm4
layernorm  stablelm, phi, gpt_neox, nemotron, jais2, starcoder2, cohere, cohere2, cohere2_moe,
           cohere_compass_text
experts    mixtral, qwen2_moe, qwen3_moe, olmoe, minimax_m2, granitemoe, gpt_oss
shared     glm4_moe, dots1, mellum, ernie4_5_moe, hunyuan_v1_moe
corrected  solar_open, hy_v3, exaone_moe, afmoe, mimo_v2_flash
linear     qwen3_next, qwen3_5_text, qwen3_5_moe_text, lfm2, lfm2_moe
lfm3       lfm3
mamba      granitemoehybrid, bamba
mamba_only mamba, falcon_mamba, mamba2 (mamba1: layers of Mamba 1)
jamba      jamba
nemotron_h nemotron_h
nemotron_nas nemotron-nas
falcon_h1  falcon_h1
latent     deepseek_v2, deepseek_v3, glm4_moe_lite, kimi_k2 (indexer: what chooses positions; choices: layers that
           share what another has chosen)
latent_dense minicpm3, youtu
longcat_flash longcat_flash
mistral4   mistral4
mistral_large4 mistral_large4_text
llama4     llama4_text
phimoe     phimoe
apertus    apertus
axk1       axk1
axk2       axk2
dots3_note dots3_note_text
unweighted olmo, nanochat
olmo_hybrid olmo_hybrid
muse       muse_glimmer_text, muse_spark_text
qwen4_exp  qwen4_exp_text
kimi_linear kimi_linear (attention_residuals: of Kimi K3)
laguna     laguna
unturned   flint, kolibri1, beam
step3p5    step3p5
minimax    minimax, minimax_text_01, minimax_m1
minimax_m3 minimax_m3_vl_text
deepseek_v4 deepseek_v4 (deepseek_v4_layers: what its config says of each layer)
hy_v4      hy_v4
glm5_next  glm5_next_text (residual_streams: of deepseek_v4 too)
bailing_hybrid bailing_hybrid
bitnet     bitnet
falcon     falcon
gptj       gptj, codegen
slopes     bloom, mpt
positions  gpt2, gpt_bigcode, gpt_neo, opt, biogpt
inkling    inkling_text
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import read_config
from manyhands.checkpoint.text_part import MULTIMODAL
from manyhands.errors import ModelError
from manyhands.program.fields import Fields
from manyhands.program.ops import Program

NEAREST: Final = 6  # families that a refusal names
# model_type -> the module with the function of that name: a node loads the one that it needs.
FAMILIES: Final[Mapping[str, str]] = {
    "afmoe": "corrected",
    "apertus": "apertus",
    "arcee": "llama",
    "axk1": "axk1",
    "axk2": "axk2",
    "bailing_hybrid": "bailing_hybrid",
    "bamba": "mamba",
    "beam": "unturned",
    "biogpt": "positions",
    "bitnet": "bitnet",
    "bloom": "slopes",
    "codegen": "gptj",
    "cohere": "layernorm",
    "cohere2": "layernorm",
    "cohere2_moe": "layernorm",
    "cohere_compass_text": "layernorm",
    "cwm": "llama",
    "deepseek_v2": "latent",
    "deepseek_v3": "latent",
    "deepseek_v32": "latent",
    "deepseek_v4": "deepseek_v4",
    "dots1": "shared",
    "dots3_note_text": "dots3_note",
    "ernie4_5": "llama",
    "ernie4_5_moe": "shared",
    "exaone4": "wrapped",
    "exaone_moe": "corrected",
    "falcon": "falcon",
    "falcon_h1": "falcon_h1",
    "falcon_mamba": "mamba_only",
    "flex_olmo": "wrapped",
    "flint": "unturned",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "glm": "llama",
    "glm4": "wrapped",
    "glm4_moe": "shared",
    "glm4_moe_lite": "latent",
    "glm_moe_dsa": "latent",
    "gpt2": "positions",
    "gpt_bigcode": "positions",
    "gpt_neo": "positions",
    "gpt_neox": "layernorm",
    "gpt_oss": "experts",
    "gptj": "gptj",
    "granite": "llama",
    "granite_swa": "granite",
    "granitemoe": "experts",
    "granitemoe_swa": "granite",
    "granitemoehybrid": "mamba",
    "granitemoeshared": "granite",
    "helium": "llama",
    "hunyuan_v1_dense": "llama",
    "hunyuan_v1_moe": "shared",
    "hy_v3": "corrected",
    "hy_v4": "hy_v4",
    "glm5_next_text": "glm5_next",
    "hyperclovax": "granite",
    "inkling_text": "inkling",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "jais2": "layernorm",
    "jamba": "jamba",
    "kimi_k2": "latent",
    "kimi_linear": "kimi_linear",
    "kolibri1": "unturned",
    "laguna": "laguna",
    "lfm2": "linear",
    "lfm2_moe": "linear",
    "lfm3": "lfm3",
    "llama": "llama",
    "llama4_text": "llama4",
    "longcat_flash": "longcat_flash",
    "mamba": "mamba_only",
    "mamba2": "mamba_only",
    "mellum": "shared",
    "mimo_v2_flash": "corrected",
    "minicpm3": "latent_dense",
    "minimax": "minimax",
    "minimax_m1": "minimax",
    "minimax_m2": "experts",
    "minimax_m3_vl_text": "minimax_m3",
    "minimax_text_01": "minimax",
    "ministral": "llama",
    "ministral3": "llama",
    "mistral": "llama",
    "mistral4": "mistral4",
    "mistral_large4_text": "mistral_large4",
    "mixtral": "experts",
    "mpt": "slopes",
    "muse_glimmer_text": "muse",
    "muse_spark_text": "muse",
    "nanbeige": "llama",
    "nanochat": "unweighted",
    "nemotron": "layernorm",
    "nemotron_h": "nemotron_h",
    "nemotron-nas": "nemotron_nas",
    "olmo": "unweighted",
    "olmo2": "wrapped",
    "olmo3": "wrapped",
    "olmo_hybrid": "olmo_hybrid",
    "olmoe": "experts",
    "opt": "positions",
    "phi": "layernorm",
    "phi3": "llama",
    "phimoe": "phimoe",
    "qwen2": "llama",
    "qwen2_moe": "experts",
    "qwen3": "llama",
    "qwen3_5_moe_text": "linear",
    "qwen3_5_text": "linear",
    "qwen3_moe": "experts",
    "qwen3_next": "linear",
    "qwen4_exp_text": "qwen4_exp",
    "seed_oss": "llama",
    "smollm3": "llama",
    "solar_open": "corrected",
    "stablelm": "layernorm",
    "starcoder2": "layernorm",
    "step3p5": "step3p5",
    "vaultgemma": "gemma",
    "youtu": "latent_dense",
}


def build_program(config: Mapping[str, Any], where: str = "config.json") -> Program:
    """The Program of a parsed config.json. Raises ModelError in one line for what cannot be computed exactly."""
    family = config.get("model_type")
    module = FAMILIES.get(family) if isinstance(family, str) else None
    if family is None:
        raise ModelError(f"{where}: model_type is missing; it names the family of the model")
    if module is None:
        raise ModelError(f"{where}: model_type is {repr(family)[:80]}; {_recipes(str(family)[:80])}")
    recipe: Callable[[Fields], Program] = getattr(import_module(f"{__name__}.{module}"), str(family).replace("-", "_"))
    return recipe(Fields(config, where))


def read_program(folder: Path) -> Program:
    """The Program of a checkpoint folder. Raises ModelError."""
    where = str(folder / "config.json")
    return build_program(parse_config(read_config(folder), where), where)


def _recipes(family: str) -> str:
    """What there is in place of `family`, in a line that stays short however many there are."""
    known = [*FAMILIES, *MULTIMODAL]
    near = get_close_matches(family, known, NEAREST)
    named = f" ({', '.join(near)} among them)" if near else ""
    return f"there are recipes for {len(known)} others{named}: docs/models.md lists them"
