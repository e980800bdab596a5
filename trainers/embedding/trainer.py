"""The base class of all trainers of embedding models."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from ...data.collators import ColumnsCollator
from ...data.samplers import BatchLoader, batches_of
from ...data.teacher import TeacherEmbeddings
from ...data.training_sets import NamedDatasets, by_columns, collator_of, training_data, with_lengths
from ...encode.granularity import EncoderConfig, Grid
from ...encode.projection import Projection
from ...encode.quantizer import has_quantizer
from ...encode.states import longest_text, unwrap_encoder, width_of
from ...modeling.files_elastic import source_of
from ...models.settings import PROJECTION_FOLDER, EmbeddingSettings
from ..core.arguments import TextTrainingArguments
from ..core.backbone import backbone_of
from ..core.checkpoints import part_of, with_weights
from ..core.objective import Objective
from ..core.publishing import PublishingTrainer


if TYPE_CHECKING:
    from peft import PeftConfig


logger = logging.getLogger(__name__)


class EmbeddingTrainer(PublishingTrainer):
    """
    Trains an encoder with the objective of its config. An embedding model is trained and saved as it was published:
    with its pooling, projection, normalisation, prompts and longest text, unless `args` says otherwise.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`], peft model or [`~sentence_transformers.SentenceTransformer`]):
            The encoder, or its folder or Hub id. A model in memory is trained in place; a SentenceTransformer, and a
            model that gets a new adapter, stay as they are.
        args ([`TextTrainingArguments`]): Training arguments; `args.build_objective` makes the objective.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*): Tokenizer of the encoder. Default:
            the one beside the encoder.
        train_dataset ([`~datasets.Dataset`], stream or `dict`, *optional*): Training data with text columns: anchor,
            positive, then hard negatives. A [`~datasets.DatasetDict`] or `dict` has several data sets, whose columns
            may differ. Each batch is of one of them (`args.multi_dataset_batch_sampler`).
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): Evaluation data with the same columns; beside
            several training sets, perhaps with other columns.
        teacher (`Any`, *optional*): A teacher, for methods with one ([`DistillationTrainer`]).
        objective ([`Objective`], *optional*): An objective to train in place of the one that `args` describes, such as
            a [`Composition`].
        peft_config ([`~peft.PeftConfig`], *optional*): Train a new adapter of this kind instead of the whole encoder.
        kwargs: Further arguments of [`PublishingTrainer`].

    Raises:
        ValueError: as [`NestedTrainer`], if an argument is out of range or of another type than above, if a text is
            missing or empty, or if `unsupervised` training gets a model without dropout.
    """

    trains_quantizer: ClassVar[bool] = False

    def __init__(
        self,
        model: PreTrainedModel,
        args: TextTrainingArguments,
        processing_class: PreTrainedTokenizerBase | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        teacher: Any = None,
        objective: Objective | None = None,
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ):
        model, processing_class = backbone_of(model, processing_class, AutoModel, peft_config)
        encoder = unwrap_encoder(model)
        self.published = published = EmbeddingSettings.of(encoder)
        limit = longest_text(encoder.config, processing_class, published.max_length if published else None)
        args = self.arguments_for(args.with_settings(published, limit), model, teacher)
        if not self.trains_quantizer and has_quantizer(source_of(encoder)):
            logger.warning(
                f"{encoder.config.name_or_path} has a quantizer that fits its embeddings, which training changes: the "
                "trained model has none. Train one for it with QAMATrainer (m3bert train qama)."
            )
        train_dataset = training_data(train_dataset, args)
        groups = by_columns(train_dataset, eval_dataset)
        collator = ColumnsCollator([collator_of(args, datasets, processing_class) for datasets in groups])
        if args.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
            train_dataset = with_lengths(train_dataset, collator.collators[0].columns, args.length_column_name)
        if args.views > 1 and not has_dropout(model):
            raise ValueError(
                f"{type(model).__name__} has no dropout (see its config): two views of a text would be the same."
            )
        self.teacher = self.embeddings_of(teacher, args, collator.texts(chain(*groups)))
        for each in collator.collators:
            each.teacher = self.teacher
        super().__init__(
            model=model,
            objective=objective or self.build_objective(args, args.grid_for(model.config)),
            args=args,
            data_collator=collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            columns=collator.shared_fields,
            optional_columns=collator.fields,
            mini_batch_size=args.mini_batch_size,
            projection=projection_for(encoder.config, args.projection_dim, published),
            **kwargs,
        )

    def arguments_for(self, args: Any, model: nn.Module, teacher: Any) -> Any:
        """Hook for arguments that depend on the model and the teacher."""
        return args

    def embeddings_of(self, teacher: Any, args: Any, texts: Iterable[str]) -> TeacherEmbeddings | None:
        """Hook for methods with a teacher: its embeddings of all texts. By default, only ready
        embeddings are accepted."""
        if isinstance(teacher, TeacherEmbeddings | None):
            return teacher
        raise ValueError(f"{type(self).__name__} takes no teacher.")

    def build_objective(self, args: Any, grid: Grid) -> Objective:
        """Build the objective that `args` describes."""
        return args.build_objective(grid)

    def get_train_dataloader(self) -> DataLoader:
        if not isinstance(self.train_dataset, NamedDatasets):
            return super().get_train_dataloader()
        rows, sampler = batches_of(self.train_dataset, self.data_collator, self.args, self._train_batch_size)
        options = {"batch_sampler": sampler, "persistent_workers": self.args.dataloader_persistent_workers}
        return self.loader(rows, "Training", BatchLoader, **options)

    def configure_encoder(self) -> None:
        """Also give the encoder in memory the settings that it is trained with, and the projection in training."""
        super().configure_encoder()
        if self.nested.objective.layers and not self.is_fsdp_enabled:
            settings = replace(self.settings(self.nested.state_dict()), projection=self.projection)
            unwrap_encoder(self.backbone).embedding_settings = settings

    def save_modules(self, output_dir: str, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Write the settings of the embedding model next to the backbone, as modules of sentence-transformers."""
        super().save_modules(output_dir, state_dict)
        self.settings(state_dict).write(output_dir, width=width_of(unwrap_encoder(self.backbone).config))

    def settings(self, state_dict: Mapping[str, torch.Tensor]) -> EmbeddingSettings:
        config, args, published = unwrap_encoder(self.backbone).config, self.args, self.published
        projection, longest = self.projection, published.max_length if published else None
        if projection is not None:
            projection = with_weights(projection, part_of(state_dict, "projection."))
        if longest is not None:
            longest = max(longest, args.max_length, *args.of_roles("max_length").values())
        return replace(
            published or EmbeddingSettings(),
            pooling=args.pooling,
            projection=projection,
            similarity=args.similarity or (published.similarity if published else "cosine"),
            prompts={**(published.prompts if published else {}), **args.of_roles("prompt")},
            max_length=longest_text(config, self.processing_class, longest),
        )

    def load_modules(self, folder: str) -> None:
        super().load_modules(folder)
        if self.projection is not None:
            saved = EmbeddingSettings.read(folder).projection
            if saved is None:
                raise ValueError(f"{folder} has no projection ({PROJECTION_FOLDER}).")
            self.projection.load_state_dict(saved.state_dict())


def projection_for(config: EncoderConfig, dim: int | None, published: EmbeddingSettings | None) -> Projection | None:
    """The projection to train: the published one if it has this many dims, else a new one; `None` without dims."""
    if dim is None:
        return None
    known = published.projection if published is not None else None
    if known is not None and known.out_features == dim:
        return Projection.of(known)
    return Projection(config.hidden_size, dim)


def has_dropout(model: PreTrainedModel) -> bool:
    """Whether a backbone has dropout outside a classification head. The config shows dropout in attention, the modules
    show dropout in adapters."""
    return any(
        "dropout" in name and "classifier" not in name and isinstance(value, int | float) and value > 0
        for name, value in model.config.to_dict().items()
    ) or any(isinstance(module, nn.Dropout) and module.p > 0 for module in unwrap_encoder(model).modules())
