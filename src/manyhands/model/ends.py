"""The two ends of a model: ids -> hidden states before layer 0, and hidden states after the last layer -> logits.

The model's own forward runs with every layer absent, so embedding scales, final norms and logit caps stay upstream's.
Where calling the parts directly (embedding; final norm, then head) gives the same bits, they are called directly: that
saves half a millisecond a token of wrappers.
"""

import contextlib
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from manyhands.checkpoint.manifest import Manifest
from manyhands.checkpoint.verify import verifying
from manyhands.core import Precision
from manyhands.model import tiles
from manyhands.model.elementwise import InvariantMode
from manyhands.model.fuse import fuse
from manyhands.model.linear import DTYPES, InvariantLinear, pad_rows
from manyhands.model.load import Captured, ModelPart, Tap, find_layers, load_part, read_config


class Ends:
    """Embedding and/or head of the checkpoint in `folder`, proven by `manifest` if given. Not thread-safe.

    Raises ModelError.
    """

    def __init__(
        self,
        folder: Path,
        precision: Precision,
        *,
        embed: bool = True,
        head: bool = True,
        config: PreTrainedConfig | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.config = config or read_config(folder)
        self.dtype = DTYPES[precision]
        self.vocab_size = int(self.config.vocab_size)
        with verifying(folder, manifest) as use:
            self._model = load_part(folder, self.config, ModelPart(None, embed=embed, head=head), precision, use)
            owner = self._pack(precision, head=head)
        self._direct_embed = self._find_direct_embed() if embed else None
        self._direct_norm = self._find_direct_norm(owner) if head else None

    def _pack(self, precision: Precision, *, head: bool) -> nn.Module:
        """Put our parts in; returns the owner of the layers and the final norm."""
        owner, _, layers = find_layers(self._model, self.config.num_hidden_layers)
        self._tap = Tap(layers[0])
        if head and isinstance(self._model.get_output_embeddings(), nn.Linear):
            self._model.set_output_embeddings(InvariantLinear(self._model.get_output_embeddings()))
        if head:
            fuse(owner, precision)
        return owner

    def embed(self, ids_T: Tensor) -> Tensor:
        """Hidden states [T, hidden] that enter layer 0, for token ids [T] (int64)."""
        if self._direct_embed is not None:
            return self._direct_embed(ids_T)  # type: ignore[no-any-return]
        return self._embed_by_model(ids_T)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, vocab] in the compute dtype for hidden states [T, hidden] that left the last layer."""
        rows = pad_rows(hidden_TD)
        out_TV = self._logits_by_parts(rows) if self._direct_norm else self._logits_by_model(rows)
        tiles.rest()
        return out_TV[: hidden_TD.shape[0]]

    def _embed_by_model(self, ids_T: Tensor) -> Tensor:
        with contextlib.suppress(Captured):
            self._model.base_model(input_ids=ids_T[None], use_cache=False)
        return self._tap.take()[0]

    def _logits_by_model(self, rows_ND: Tensor) -> Tensor:
        self._tap.injected = rows_ND[None]
        with InvariantMode():
            out: Tensor = self._model(inputs_embeds=rows_ND[None], use_cache=False).logits
        self._tap.injected = None
        return out[0]

    def _logits_by_parts(self, rows_ND: Tensor) -> Tensor:
        assert self._direct_norm is not None
        with InvariantMode():
            out: Tensor = self._model.get_output_embeddings()(self._direct_norm(rows_ND[None]))
        return out[0]

    def _find_direct_embed(self) -> nn.Module | None:
        """The embedding module, if calling it gives the same bits as the model's own forward."""
        module: nn.Module = self._model.get_input_embeddings()
        ids_T = torch.arange(min(8, self.vocab_size))
        return module if torch.equal(module(ids_T), self._embed_by_model(ids_T)) else None

    def _find_direct_norm(self, owner: nn.Module) -> nn.Module | None:
        """The final norm, if norm then head gives the same bits as the model's own forward; None if no child does."""
        rows_ND = torch.randn(4, int(self.config.hidden_size), generator=torch.Generator().manual_seed(0))
        rows_ND = rows_ND.to(self.dtype)
        expected = self._logits_by_model(rows_ND)
        for name, module in owner.named_children():
            if "norm" in name or "ln" in name:
                self._direct_norm = module
                if torch.equal(self._logits_by_parts(rows_ND), expected):
                    return module
        return None
