"""
Packed rows: several documents one after another in a row of tokens, each encoded as if it were alone.

The positions of every document start anew, and its tokens attend to each other only. Flash attention reads where the
documents begin; other implementations get a mask with one block per document. A CPU computes all of such a mask, also
outside of the blocks, so that documents are faster one per row there ([`~Flattened.separate`]).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    packed_sequence_mask_function,
)

from ..models.conversion import CONVERTIBLE
from .granularity import EncoderConfig


DOCUMENTS = "document_ids"  # tensor of a batch of packed rows; see `packed_arguments`
DISENTANGLED = "its attention and its embeddings read one mask, which cannot keep documents apart"
# Model types that were tested to encode a document in a packed row as they do alone.
PACKABLE = ("m3bert", *CONVERTIBLE, "mpnet", "modernbert", "eurobert", "nomic_bert", "gte", "qwen3")
# Model type -> why a document in a packed row would not be encoded as it is alone.
REFUSED = {
    "deberta": DISENTANGLED,
    "deberta-v2": f"{DISENTANGLED}, and its convolution reads across their borders",
    "gemma3_text": "its bidirectional window cannot be combined with a mask of documents",
}


def check_packable(config: EncoderConfig) -> None:
    """Check that a backbone of this config encodes every document of a packed row as it does alone."""
    if config.model_type not in PACKABLE:
        reason = REFUSED.get(config.model_type, f"only these were tested: {', '.join(PACKABLE)}")
        raise ValueError(
            f"model_type={config.model_type!r} cannot read packed rows: {reason}. Train it on files with one "
            "document per row."
        )


def document_positions(document_ids: torch.Tensor) -> torch.Tensor:
    """The position of every token in its document, counted from 0, `(rows, tokens)`. Padding counts as a document."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = nn.functional.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    return index - (index * begins).cummax(dim=1).values


def packed_arguments(
    config: EncoderConfig, inputs: Mapping[str, torch.Tensor], *, first_position: int, causal: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """
    The arguments with which an encoder reads packed rows, if its attention takes a mask: `position_ids`,
    `attention_mask` and the other inputs. The inputs are `document_ids` `(rows, tokens)`, 1, 2, ... for the documents
    of a row and 0 for padding, and further tensors of this shape. `first_position` is the row of the position
    embeddings that the first token of a document reads, `dtype` the type of the encoder's weights.
    """
    document_ids = inputs[DOCUMENTS]
    rest: dict[str, Any] = token_tensors(inputs)
    rest["position_ids"] = document_positions(document_ids) + first_position
    if causal:  # transformers finds documents in the positions of a causal model, if there is no mask
        return {**rest, "attention_mask": None}
    like = torch.empty(*document_ids.shape, 0, dtype=dtype, device=document_ids.device)
    options = {"and_mask_function": packed_sequence_mask_function(document_ids), "attention_mask": None}
    mask: Any = create_bidirectional_mask(config, like, **options)
    if config.model_type == "modernbert":
        window = create_bidirectional_sliding_window_mask(config, like, **options)
        mask = {"full_attention": mask, "sliding_attention": window}
    return {**rest, "attention_mask": mask}


@dataclass(frozen=True)
class Flattened:
    """
    Texts in one row without padding, for attention with variable lengths (flash attention): the arguments of the
    encoder, and the tokens that are in the row, `(texts, tokens)`.
    """

    inputs: dict[str, Any]
    real: torch.Tensor

    @classmethod
    def of(cls, inputs: Mapping[str, torch.Tensor], first_position: int) -> Flattened:
        """Flatten texts `(texts, tokens, ...)` with an `attention_mask`, or packed rows, as for
        [`packed_arguments`]."""
        if DOCUMENTS in inputs:
            real = inputs[DOCUMENTS] > 0
            positions = document_positions(inputs[DOCUMENTS])[real]
            boundaries = nn.functional.pad((positions == 0).nonzero().flatten(), (0, 1), value=len(positions))
        else:
            real = inputs["attention_mask"].bool()
            positions = torch.arange(real.shape[1], device=real.device).expand_as(real)[real]
            boundaries = nn.functional.pad(real.sum(dim=1).cumsum(0), (1, 0))
        boundaries, longest = boundaries.to(torch.int32), int(boundaries.diff().max())
        row = {
            "position_ids": (positions + first_position).unsqueeze(0),
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        return cls(row | {name: value[real].unsqueeze(0) for name, value in token_tensors(inputs).items()}, real)

    def padded(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states `(1, real tokens, hidden_size)` as `(texts, tokens, hidden_size)`, with zeros at padding."""
        rows = states.new_zeros(*self.real.shape, states.shape[2])
        return rows.masked_scatter(self.real.unsqueeze(2), states)

    def separate(self, values: torch.Tensor, padding: int) -> torch.Tensor:
        """Values of the tokens, `(1, real tokens)`, with one text or document per row, padded to the longest."""
        lengths = self.inputs["cu_seq_lens_q"].diff().tolist()
        return pad_sequence(values[0].split(lengths), batch_first=True, padding_value=padding)


def token_tensors(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs that say what the tokens are, not where they are."""
    return {name: value for name, value in inputs.items() if name not in (DOCUMENTS, "attention_mask")}
