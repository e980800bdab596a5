"""Training arguments that all trainers share."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args

import torch
from transformers import TrainingArguments

from ...data.streams import column_names_of
from ...encode.granularity import EncoderConfig, Grid
from ...encode.states import Pooling
from ...models.settings import EmbeddingSettings
from ...utils.columns import Role, text_columns_of
from ...utils.help_texts import described
from .objective import Objective, require_known


logger = logging.getLogger(__name__)
ROLES: tuple[Role, ...] = get_args(Role)
# Option -> its values, as sentence-transformers calls them.
BATCH_SAMPLERS = {
    "batch_sampler": ("batch_sampler", "no_duplicates"),
    "multi_dataset_batch_sampler": ("proportional", "round_robin"),
}
# Options of transformers that would do nothing here, or something else.
REFUSED = {
    "label_smoothing_factor": "these losses have no labels to smooth",
    "label_names": "the collator names its own columns",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "use_liger_kernel": "its kernels do not fit these losses",
    "auto_find_batch_size": "a smaller batch has fewer negatives; set mini_batch_size or a smaller batch",
    "bf16_full_eval": "it would round the weights; bf16 also evaluates in 16 bits",
    "fp16_full_eval": "it would round the weights; fp16 also evaluates in 16 bits",
    "batch_eval_metrics": "compute_metrics gets all rows at once",
    "include_for_metrics": "compute_metrics gets logits and labels",
    "eval_use_gather_object": "rows are gathered as tensors",
    "debug": "its hooks do not fit an encoder that is run layer by layer",
    "parallelism_config": "set fsdp to divide a model",
}


class Token(str):
    """A token that no pickle holds: transformers and its callbacks pickle whole arguments beside a model."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> Self:
        return self


@described
@dataclass
class NestedTrainingArguments(TrainingArguments):
    """
    [`~transformers.TrainingArguments`] with the grid to train. A subclass names its objective in `objective_class`.
    The fields that `objective_fields` names are passed to it, as arguments of the same name.

    Args:
        > Parameters that control the grid and the objective

        grid (`str`, *optional*): Granularities to train, as layers x dims (`4,8,12x32,64,768`) or as a list
            (`2x16,12x768`). Default: `matryoshka_layers` x `matryoshka_dims` of the model's config.
        projector_learning_rate (`float`, *optional*): Learning rate of the projection and of the objective's own
            parameters (projectors, a learned temperature), which start untrained, unlike the backbone. Default:
            `learning_rate`.
        shuffle_buffer_size (`int`, *optional*, defaults to 10000): For streams: number of rows that are read ahead and
            shuffled. The order of the shards is shuffled, too. 0 reads shards and rows in their order.

    Raises:
        ValueError: if the grid cannot be parsed, one process would use several GPUs, or an option does not apply here.
    """

    objective_class: ClassVar[type[Objective]]
    objective_fields: ClassVar[tuple[str, ...]] = ()
    # Whether the default grid is the model's full size, rather than the grid in the model's config.
    full_size_by_default: ClassVar[bool] = False

    grid: str | None = None
    projector_learning_rate: float | None = None
    shuffle_buffer_size: int = 10_000
    include_num_input_tokens_seen: str = "no"  # of `bool | str`, the parser of transformers reads the bool

    def __post_init__(self) -> None:
        for name, reason in REFUSED.items():
            if getattr(self, name):
                raise ValueError(f"{name} is not supported: {reason}.")
        # An evaluation decides what is better: it knows the terms of the loss.
        given = {"greater_is_better": self.greater_is_better, "hub_token": self.hub_token and Token(self.hub_token)}
        super().__post_init__()
        self.__dict__.update(given)
        if self.n_gpu > 1:  # transformers would split the rows of a batch by nn.DataParallel, which keeps texts whole
            raise ValueError(
                f"One process sees {self.n_gpu} GPUs: start one per GPU with torchrun or accelerate launch, or set "
                "CUDA_VISIBLE_DEVICES=0."
            )
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # there is nothing to pin memory for, and torch would warn
        if self.grid is not None:
            Grid.parse(self.grid)

    def grid_for(self, config: EncoderConfig) -> Grid:
        """The grid to train on a model of this config. ValueError if neither the arguments nor the config name one, or
        if it is outside the model."""
        if self.grid is not None:
            return Grid.parse(self.grid).validate(config)
        if self.full_size_by_default:
            return Grid.full_size(config)
        values = config.to_dict()
        layers, dims = values.get("matryoshka_layers"), values.get("matryoshka_dims")
        if not layers or not dims:
            raise ValueError(
                "The model's config names no matryoshka_layers and matryoshka_dims: pass grid, such as "
                "'4,8,12x32,64,768'."
            )
        return Grid.product(layers, dims).validate(config)

    def objective_arguments(self) -> dict[str, Any]:
        """The arguments of the objective that this config has."""
        return {name: getattr(self, name) for name in self.objective_fields}

    def build_objective(self, grid: Grid) -> Objective:
        """Build the objective that this config describes, for the grid of [`~NestedTrainingArguments.grid_for`]."""
        return self.objective_class.for_grid(grid, **self.objective_arguments())


@described
@dataclass
class TextTrainingArguments(NestedTrainingArguments):
    """
    Training arguments of all methods on embeddings of texts: how texts are read, encoded and pooled.

    Args:
        > Parameters that control the texts and their embeddings

        pooling (`str`, *optional*): Pooling of token hidden states: `"mean"` over real tokens, `"cls"` (the first
            token) or `"lasttoken"` (for causal backbones). Default: as the model was published, else the mean.
        text_columns (`list[str]`, *optional*): Columns with text: anchor, positive, then hard negatives.
            `title+text` joins two columns with the tokenizer's separator token. Default: by their names, in any order:
            `anchor`, `query`, `question` or `sentence1`; `positive`, `document`, `answer` or `sentence2`; `negative`,
            `negative_1`, ...; `text` for a single text, or for the other side of a pair. `label` and `score` are not
            read. A dataset with other columns is refused.
        max_length (`int`, *optional*): Maximum length of a text in tokens; longer texts are truncated. Default: 512,
            or less if the model was published for shorter texts. The saved model keeps the length that it was
            published for, unless this one is larger.
        query_max_length (`int`, *optional*): Maximum length of a query in tokens. Default: `max_length`.
        document_max_length (`int`, *optional*): Maximum length of a document in tokens. Default: `max_length`.
        query_prompt (`str`, *optional*): Prompt before every query, such as `"query: "`. It is saved with the model.
            Default: as the model was published.
        document_prompt (`str`, *optional*): Prompt before every document, such as `"passage: "`. It is saved with the
            model. Default: as the model was published.
        projection_dim (`int`, *optional*): Train a projection of the last layer's pooled embedding to this many dims
            and publish it with the model ([`Projection`]). The dims of the grid are then prefixes of the projection.
            Default: train the projection that the model was published with, if there is one. Another number of dims
            starts with a new one.
        mini_batch_size (`int`, *optional*): Cache gradients, so that the encoder's memory does not grow with the
            batch: as many tokens as this number of the longest texts has are encoded at a time. Default: keep the
            activations of all texts, which is faster.

        > Parameters that control the batches

        learning_rate (`float`, *optional*, defaults to 2e-5): Initial learning rate of AdamW.
        per_device_train_batch_size (`int`, *optional*, defaults to 32): Rows per device and step.
        dataloader_drop_last (`bool`, *optional*, defaults to `True`): Drop the last batch if it is smaller, because
            it has fewer negatives.
        batch_sampler (`str`, *optional*, defaults to `"batch_sampler"`): How rows become batches: `batch_sampler`, at
            random, or `no_duplicates`, at random without two equal texts in a batch. The name and the values are those
            of sentence-transformers.
        multi_dataset_batch_sampler (`str`, *optional*, defaults to `"proportional"`): Which data set the next batch is
            from, if there are several: `proportional` to their sizes, so that every row is used, or `round_robin`, one
            batch of each in turn until the smallest has no more.

    Defaults that differ from [`~transformers.TrainingArguments`]: `learning_rate` 2e-5 and
    `per_device_train_batch_size` 32 (m3BERT, section 3.1, public data sets), and `dataloader_drop_last`.

    The texts of the first column are queries, all others are documents. A model keeps what it was
    published with ([`EmbeddingSettings`]): pooling, projection, normalisation, prompts, longest text. Where an
    argument says otherwise, the log says so. The tokens of a prompt count towards the length of a text. A teacher
    reads texts without these prompts.

    Raises:
        ValueError: if a value is out of range.
    """

    objective_fields: ClassVar[tuple[str, ...]] = ("pooling",)
    # For a model that was not published as an embedding model, and the longest text for any model.
    default_pooling: ClassVar[Pooling] = "mean"
    default_max_length: ClassVar[int] = 512
    # Whether training puts the prompts that the model was published with before texts.
    reads_published_prompts: ClassVar[bool] = True
    similarity: ClassVar[str | None] = None  # that is trained; `None`: as published

    pooling: Pooling | None = None
    text_columns: list[str] | None = None
    max_length: int | None = None
    query_max_length: int | None = None
    document_max_length: int | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    projection_dim: int | None = None
    mini_batch_size: int | None = None
    batch_sampler: str = "batch_sampler"
    multi_dataset_batch_sampler: str = "proportional"
    learning_rate: float = 2e-5
    per_device_train_batch_size: int = 32
    dataloader_drop_last: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, legal in BATCH_SAMPLERS.items():
            require_known(legal, **{name: getattr(self, name)})

    @property
    def all_queries(self) -> bool:
        """Whether the texts of all columns are queries."""
        return False

    @property
    def views(self) -> int:
        """Number of times that each text is encoded, each time with other dropout masks."""
        return 1

    def with_settings(self, settings: EmbeddingSettings | None, limit: int) -> Self:
        """A copy that takes everything that is not set from the settings of the model to train, if it is an embedding
        model, and the longest text that it embeds. Logs arguments that differ."""
        known = settings or EmbeddingSettings(pooling=self.default_pooling)
        published: dict[str, Any] = {"pooling": known.pooling}
        if known.projection is not None:
            published["projection_dim"] = known.projection.out_features
        published |= {f"{role}_prompt": known.prompts[role] for role in ROLES if known.prompts.get(role)}
        if settings is not None:
            lengths = {"max_length": limit} if (self.max_length or 0) > limit else {}
            for name, value in (published | lengths).items():
                if (given := getattr(self, name)) not in (None, value):
                    logger.warning(f"The model was published with {name}={value!r}; the argument {given!r} is used.")
        if not self.reads_published_prompts:
            published = {name: value for name, value in published.items() if not name.endswith("_prompt")}
        elif self.all_queries:  # all texts are queries
            published.pop("document_prompt", None)
        published["max_length"] = min(self.default_max_length, limit)
        chosen = copy.copy(self)
        for name, value in published.items():
            if getattr(self, name) is None:
                setattr(chosen, name, value)
        return chosen

    def objective_arguments(self) -> dict[str, Any]:
        arguments = super().objective_arguments()
        return arguments | ({"pooling": self.pooling or self.default_pooling} if "pooling" in arguments else {})

    def of_roles(self, option: str) -> dict[Role, Any]:
        """Role -> what `query_{option}` or `document_{option}` says for its texts, where it is set."""
        values: dict[Role, Any] = {role: getattr(self, f"{role}_{option}") for role in ROLES}
        return {role: value for role, value in values.items() if value is not None}

    def roles_of(self, columns: Sequence[str]) -> dict[str, Role]:
        """Text column -> role of its texts. ValueError if there are options for documents, but all are queries."""
        roles: dict[str, Role] = {
            column: "query" if self.all_queries or column == columns[0] else "document" for column in columns
        }
        unused = "document" in {**self.of_roles("prompt"), **self.of_roles("max_length")}
        if unused and "document" not in roles.values():
            raise ValueError("All texts are queries here: set query_prompt and query_max_length.")
        return roles

    def grid_for(self, config: EncoderConfig) -> Grid:
        if self.projection_dim is not None and self.grid is None:
            return Grid.product([config.num_hidden_layers], [self.projection_dim])
        return super().grid_for(config)

    def columns_of(self, *datasets: Any) -> list[str]:
        """The text columns to train on: `text_columns`, or the first dataset's ([`text_columns_of`]). Methods
        check their number."""
        return self.text_columns if self.text_columns is not None else text_columns_of(self.all_columns(*datasets))

    def label_column_of(self, *datasets: Any) -> str | None:
        """Hook for methods that train on scores: the column with them; `None` for all others."""
        return None

    @staticmethod
    def all_columns(*datasets: Any) -> list[str]:
        """The columns of the first dataset that there is."""
        return next((column_names_of(dataset) for dataset in datasets if dataset is not None), [])
