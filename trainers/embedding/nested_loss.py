"""An objective as a loss of sentence-transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...encode.ranks import world_size
from ...models.settings import EmbeddingSettings
from ..core.grid import declare_grid
from ..core.model import NestedModel
from ..core.objective import Objective


if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class NestedLoss(nn.Module):
    """
    Any [`Objective`] as a loss for [`~sentence_transformers.SentenceTransformerTrainer`]. The encoder runs once for
    all granularities. The saved model names the trained grid, so that `output_layer` and `output_dim` find it.

    sentence-transformers' own `AdaptiveLayerLoss` and `Matryoshka2dLoss` train the raw hidden states of a layer. A
    model with exits does not return those: `output_layer` returns the output of the exit. Use this loss for such a
    model.

    Args:
        model ([`~sentence_transformers.SentenceTransformer`]): The model to train: an encoder, pooling, and optionally
            a normalisation.
        objective ([`Objective`]): The objective. Objectives with a teacher need our own trainers.

    Raises:
        ValueError: if the model has a projection, the objective has another pooling than the model, its grid is
            outside the model, or there are several processes.

    ```python
    >>> from m3bert.trainers import Contrastive, Grid, NestedLoss

    >>> loss = NestedLoss(model, Contrastive(Grid.parse("2,4,6x64,384")))  # doctest: +SKIP
    >>> trainer = SentenceTransformerTrainer(model, args, train_dataset=pairs, loss=loss)  # doctest: +SKIP
    ```
    """

    def __init__(self, model: SentenceTransformer, objective: Objective) -> None:
        super().__init__()
        settings = EmbeddingSettings.of_sentence_transformer(model)
        if settings.projection is not None:
            raise ValueError("NestedLoss trains no projection: use our own trainers.")
        if world_size() > 1:
            raise ValueError("NestedLoss trains in one process: use our own trainers for several.")
        if objective.pooling not in (None, settings.pooling):
            raise ValueError(f"The model pools by {settings.pooling!r}, the objective by {objective.pooling!r}.")
        encoder: Any = model.transformers_model
        objective.validate(encoder.config)
        declare_grid(encoder.config, objective.grid)
        self.model = model
        self.objective = objective

    def forward(self, sentence_features: Iterable[Mapping[str, Any]], labels: torch.Tensor | None) -> torch.Tensor:
        """
        Args:
            sentence_features (`Iterable[Mapping[str, Any]]`): Output of the tokenizer for each text column.
            labels (`torch.Tensor`, *optional*): Labels of the rows, for objectives on scores.

        Returns:
            `torch.Tensor`: the loss, a scalar.
        """
        columns = {
            f"column_{index}": {name: features[name] for name in INPUTS if name in features}
            for index, features in enumerate(sentence_features)
        }
        self.objective.constrain()
        return NestedModel(self.model.transformers_model, self.objective)(**columns, labels=labels)["loss"]
