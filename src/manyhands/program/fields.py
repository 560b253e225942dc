"""config.json as a recipe reads it: every field is read by name and checked; what is left over is refused or harmless.

All errors are ModelError of one line that names the field, its value and what is allowed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from manyhands.checkpoint.quantised import read_quantised
from manyhands.errors import ModelError

# Training, generation, bookkeeping: these never enter a hidden state or a logit.
HARMLESS: Final = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path _num_labels add_cross_attention
    architectures attention_dropout attention_probs_dropout_prob attn_implementation auto_map aux_loss_alpha
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout cls_token_id custom_pipelines decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping embd_pdrop embedding_dropout encoder_no_repeat_ngram_size eos_token_id ep_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing hidden_dropout hidden_dropout_prob id2label initializer_range is_decoder
    is_encoder_decoder label2id length_penalty mask_token_id max_length min_length model_type n_special
    neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_labels num_mtp_layers
    num_nextn_predict_layers num_return_sequences output_attentions output_hidden_states output_past
    output_router_logits output_scores pad_token_id predict_special_tokens prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty resid_pdrop residual_dropout return_dict
    return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id seq_aux suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache
    """.split()
)
# Fields that mean nothing with this value, and are refused with any other by recipes that do not read them.
OFF: Final[Mapping[str, object]] = {
    "add_qkv_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "no_bias": True,
    "partial_rotary_factor": 1.0,
    "qk_layernorm": False,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_mrope": False,
    "use_parallel_residual": False,
    "use_qkv_bias": False,
    "use_sliding_window": False,
}
ABSENT: Final = frozenset({"rope_parameters", "rope_scaling"})  # where they are null, in every family
ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
MOST: Final = 1 << 24  # of any count: larger ones are nonsense, or a trap
MOST_EXPERTS: Final = 1024  # of a layer, as kernels.h has it: 512 are the most that a published model has
WIDEST: Final = 1 << 17  # columns of a row that goes from layer to layer
LARGEST: Final = 1e15  # of any other number
SMALLEST: Final = 1e-30  # of any positive one


class Fields:
    """One config.json (or the text part of one). Reading a field marks it as used; `finish` refuses unused ones."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._null = values.keys() - self._values.keys() - ABSENT
        self._used: set[str] = set()
        self._conventions: set[str] = set()  # of GGUF files that were asked about
        self._methods: set[str] = set()  # of quantisation, too
        self._own_names: dict[str, str] = {}  # of fields that are read by other names
        self.where = where

    def refuse(self, name: str, needed: str) -> ModelError:
        """The error for a field whose value cannot be used."""
        shown = repr(self._values.get(name))
        name = self._own_names.get(name, name)
        return ModelError(f"{self.where}: {name} is {shown if len(shown) <= 80 else shown[:77] + '...'}, {needed}")

    def rename(self, **own_names: str) -> None:
        """The family calls these fields by names of its own, by which errors name them. Raises ModelError for one that says
        something else by each."""
        for name, own in own_names.items():
            if own in self._values:
                self.only(name, self._values[own])
                self._values[name] = self._values.pop(own)
                self._own_names[name] = own
            elif own in self._null:
                self._null |= {name}

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return name in self._values

    def is_renamed(self, name: str) -> bool:
        """Whether the config has the field by the family's own name for it."""
        return name in self._own_names

    def is_null(self, name: str) -> bool:
        """Whether the field is there, and null."""
        return name in self._null

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it stands."""
        self._used.add(name)
        return self._values.get(name, default)

    def count(self, name: str, default: int | None = None, *, low: int = 1, high: int = MOST) -> int:
        """An integer from `low` to `high`; required without a default."""
        value = self.raw(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(name, f"a whole number from {low} to {high} is needed")
        return value

    def number(self, name: str, default: float | None = None, *, positive: bool = True) -> float:
        """A number that fp32 can hold and square, above zero if `positive`; required without a default."""
        value = self.raw(name, default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
        if not good or (positive and value < SMALLEST):
            least = SMALLEST if positive else -LARGEST
            raise self.refuse(name, f"a number from {least:g} to {LARGEST:g} is needed")
        return float(value)

    def optional(self, name: str, default: float | None = None) -> float | None:
        """A positive number; None where it is null, or absent without a default."""
        if name in self._null or (default is None and not self.has(name)):
            return None
        return self.number(name, default)

    def optional_count(self, name: str, default: int | None = None) -> int | None:
        """A whole number from 1; None where it is null, or absent without a default."""
        if name in self._null or (default is None and not self.has(name)):
            return None
        return self.count(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false; null is false, as in transformers, and absent `default`."""
        value = self.raw(name, default and not self.is_null(name))
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false is needed")
        return value

    def only(self, name: str, *allowed: object) -> None:
        """The field must be absent or have one of these values."""
        if self.raw(name, allowed[0]) not in allowed:
            raise self.refuse(name, f"only {' or '.join(map(repr, allowed))} is supported")

    def stored(self, convention: str) -> bool:
        """Whether the tensors are stored by this convention of GGUF files (checkpoint/gguf_configs.py)."""
        self._conventions.add(convention)
        given = self._values.get("quantization_config")
        return isinstance(given, dict) and given.get("quant_method") == "gguf" and given.get(convention) is True

    def quantised(self, method: str) -> bool:
        """Whether matrices are stored by this method (checkpoint/quantised.py), which changes the shapes of the recipe."""
        self._methods.add(method)
        found = read_quantised(self._values)
        return found is not None and found.method == method

    def _follows_storage(self) -> bool:
        """Whether all that is said of how the tensors are stored has been read. Raises ModelError for a method that is not."""
        found = read_quantised(self._values)
        if found is not None:
            return found.method != "mxfp4" or "mxfp4" in self._methods
        given = self._values.get("quantization_config", {})
        return set(given) - {"quant_method"} <= self._conventions

    def ignore(self, *names: str) -> None:
        """Fields that do not enter the arithmetic as this config has it."""
        self._used.update(names)

    def activation(self, name: str = "hidden_act", default: str | None = "silu") -> Any:
        """An activation of ops.Activation, by transformers' name for it."""
        value = self.raw(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.refuse(name, f"supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def whole_numbers(self, name: str) -> list[int]:
        """A list of layer numbers or switches, empty if absent."""
        value = self.raw(name, [])
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value) or len(value) > MOST:
            raise self.refuse(name, "a list of whole numbers is needed")
        return value

    def assume(self, **defaults: object) -> None:
        """What a family takes for fields that its config does not have, in a recipe that others share."""
        self._values = {**{name: value for name, value in defaults.items() if name not in self._null}, **self._values}

    def per_layer(self, name: str, layers: int, default: Sequence[str], allowed: Sequence[str]) -> list[str]:
        """One of `allowed` for each layer; `default` where the field is absent."""
        value = self.raw(name, list(default))
        if not isinstance(value, list) or len(value) != layers or not set(map(str, value)) <= set(allowed):
            raise self.refuse(name, f"one of {', '.join(allowed)} for each of the {layers} layers is needed")
        return [str(item) for item in value]

    def shorten(self, length: int, layers: int, *names: str) -> None:
        """Lists of this length lose what they have for more than these layers: for those that guess tokens ahead."""
        for name in names:
            value = self._values.get(name)
            if isinstance(value, list) and len(value) == length:
                self._values[name] = value[:layers]

    def finish(self) -> None:
        """Raises ModelError for the first field that nothing has read and that is not known to be harmless."""
        for name in sorted(self._values.keys() - self._used - HARMLESS):
            if name in OFF and self._values[name] == OFF[name]:
                continue
            if name in ("quantization_config", "compression_config"):
                if self._follows_storage():
                    continue
                raise self.refuse(
                    name, "which this family's recipe does not read: use a checkpoint in bf16, fp16 or fp32"
                )
            raise self.refuse(
                name, "a field that this family's recipe does not know and that may change its arithmetic"
            )
