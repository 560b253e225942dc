"""The two ends of a model: ids -> hidden states before layer 0, and hidden states after the last layer -> logits.

The model's own forward runs with every layer absent, so embedding scales, final norms and logit caps stay upstream's.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from manyhands.core import Precision
from manyhands.model.elementwise import InvariantMode
from manyhands.model.linear import DTYPES, InvariantLinear, pad_rows
from manyhands.model.load import Part, Tap, find_layers, load_part, read_config, until_captured


class Ends:
    """Embedding and/or head of the checkpoint in `folder`. Not thread-safe. Raises ModelError."""

    def __init__(
        self,
        folder: Path,
        precision: Precision,
        *,
        embed: bool = True,
        head: bool = True,
        config: PreTrainedConfig | None = None,
    ) -> None:
        self.config = config or read_config(folder)
        self.dtype = DTYPES[precision]
        self.vocab_size = int(self.config.vocab_size)
        self._model = load_part(folder, self.config, Part(None, embed=embed, head=head), precision)
        self._tap = Tap()
        self._tap.divert_at(find_layers(self._model, self.config.num_hidden_layers)[2][0])
        head_precision: Precision = "bf16" if precision == "int8" else precision  # a rounded head costs most quality
        if head and isinstance(self._model.get_output_embeddings(), nn.Linear):
            self._model.set_output_embeddings(InvariantLinear(self._model.get_output_embeddings(), head_precision))

    def embed(self, ids_T: Tensor) -> Tensor:
        """Hidden states [T, hidden] that enter layer 0, for token ids [T] (int64)."""
        with until_captured():
            self._model.base_model(input_ids=ids_T[None], use_cache=False)
        return self._tap.take()[0]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, vocab] in the compute dtype for hidden states [T, hidden] that left the last layer."""
        rows = pad_rows(hidden_TD)
        self._tap.injected = rows[None]
        with torch.inference_mode(), InvariantMode():
            out: Tensor = self._model(inputs_embeds=rows[None], use_cache=False).logits
        self._tap.injected = None
        return out[0, : hidden_TD.shape[0]]
