"""Quality while training: tasks scored at every granularity, and evaluators of sentence-transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import BatchEncoding

from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity, Grid
from ..utils.extras import require_extra
from .evaluate import score_grid
from .readers import load_task
from .tasks import Task, find_tasks


if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class GridEvaluator:
    """
    Scores a model on tasks at every granularity of a grid, with each text encoded once: the `evaluator` of a trainer.
    ValueError if a task is unknown or has no data.

    Args:
        tasks (`Iterable[str | Task]`): Tasks, or names of tasks or groups of them ([`find_tasks`]).
        grid ([`Grid`] or `str`, *optional*): Granularities to score. Default: the trained ones.
        data (`Path`, *optional*): Folder of local data sets. Data that is not there is read from the Hub.

    ```python
    >>> evaluator = GridEvaluator(["stsb"], grid="2,6x64,384")  # doctest: +SKIP
    >>> evaluator(encoder)  # doctest: +SKIP
    {'stsb_2x64_spearman': 0.71, 'stsb_2x384_spearman': 0.73, 'stsb_6x64_spearman': 0.80, 'stsb_6x384_spearman': 0.82}
    ```
    """

    greater_is_better = True

    def __init__(
        self, tasks: Iterable[str | Task], grid: Grid | str | None = None, data: str | Path | None = None
    ) -> None:
        members = [each for task in tasks for each in ([task] if isinstance(task, Task) else find_tasks([task]))]
        self.evaluators = {task.name: load_task(task, None if data is None else Path(data)) for task in members}
        self.grid = Grid.parse(grid) if isinstance(grid, str) else grid

    def primary_metric(self, trained: Grid) -> str:
        """Name of the first task's score at the full size, for a model that is trained at these granularities."""
        name, evaluator = next(iter(self.evaluators.items()))
        return f"{name}_{(self.grid or trained).full}_{evaluator.main_metric}"

    def __call__(self, encoder: GridEncoder) -> dict[str, float]:
        """The main metric of each task at each granularity: `TASK_LAYERxDIM_METRIC` -> value."""
        if self.grid is not None:
            encoder = replace(encoder, grid=self.grid)
        return {
            f"{name}_{granularity}_{evaluator.main_metric}": scores[evaluator.main_metric]
            for name, evaluator in self.evaluators.items()
            for granularity, scores in score_grid(encoder, evaluator).items()
        }


def as_sentence_transformer(encoder: GridEncoder, granularity: Granularity | None = None) -> SentenceTransformer:
    """
    One granularity of an encoder in memory as a [`~sentence_transformers.SentenceTransformer`], which shares its
    weights and cannot be saved.

    Args:
        encoder ([`GridEncoder`]): The encoder.
        granularity ([`Granularity`], *optional*): Size of its embeddings. Default: the full size of the grid.
    """
    library = require_extra("sentence_transformers", "sentence-transformers", "A SentenceTransformer")
    from sentence_transformers.base.modules import InputModule

    size = granularity or encoder.grid.full
    encoder = replace(encoder, grid=Grid((size,)))

    class Embed(InputModule):
        """Tokenises and embeds texts."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.tokenizer, self.max_seq_length = encoder.model, encoder.tokenizer, encoder.max_length

        def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: object) -> BatchEncoding:
            return encoder.tokenizer(
                [(prompt or "") + text for text in inputs],
                padding=True,
                truncation=True,
                max_length=encoder.max_length,
                return_tensors="pt",
            )

        def forward(self, features: dict[str, torch.Tensor], **kwargs: object) -> dict[str, torch.Tensor]:
            inputs = {name: features[name] for name in ("input_ids", "attention_mask")}
            return {**features, "sentence_embedding": encoder.pooled(inputs)[size.layer]}

        def get_embedding_dimension(self) -> int:
            return size.dim

        def save(self, *arguments: object, **kwargs: object) -> None:
            raise ValueError("This model is in training: save it with its trainer.")

    prompts = dict.fromkeys(("query", "document", encoder.default_prompt_name or "query"), "") | {**encoder.prompts}
    device = str(next(encoder.model.parameters()).device)
    named = {"similarity_fn_name": encoder.similarity, "default_prompt_name": encoder.default_prompt_name}
    return library.SentenceTransformer(modules=[Embed()], prompts=prompts, device=device, **named)
