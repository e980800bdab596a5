"""Base class and configuration of the contrastive objectives on pooled embeddings."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from modeling_m3bert import EmbeddingSettings

from ..losses import Guide, nested_info_nce, with_own_negatives
from .arguments import NestedTrainingArguments
from .columns import labels_of, text_columns_of
from .composition import mapping_of
from .dataset_checks import header_of
from .granularity import Grid
from .help_texts import described
from .matches import Matches
from .objective import NestedBatch, Objective, Terms
from .parallel.ranks import RankRows
from .parallel.ring import ring_info_nce
from .states import Pooling, check_pooling


logger = logging.getLogger(__name__)
Role = Literal["query", "document"]
# Option -> its values, as sentence-transformers calls them.
BATCH_SAMPLERS = {
    "batch_sampler": ("batch_sampler", "no_duplicates"),
    "multi_dataset_batch_sampler": ("proportional", "round_robin"),
}
LARGEST_LEARNED_SCALE = 100.0
NO_TEXT = -1


def check_negatives(ring: bool, gather_negatives: bool, guide_margin: float | None, own_negatives: bool) -> None:
    """
    Check that the options of negatives can be combined.

    Raises:
        ValueError: if a ring is to gather nothing, or a ring or own negatives are to leave out what a guide finds.
    """
    if ring and not gather_negatives:
        raise ValueError("ring passes the candidates of other devices around: it excludes gather_negatives=False.")
    if ring and guide_margin is not None:
        raise ValueError("ring does not pass a guide's embeddings around: unset ring, or train without a guide.")
    if own_negatives and guide_margin is not None:
        raise ValueError("own_negatives does not use a guide: unset own_negatives, or train without a guide.")


def with_one_element(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load the learned temperature of a checkpoint in which it has no dims."""
    if (name := f"{prefix}log_scale") in state_dict:
        state_dict[name] = state_dict[name].reshape(1)


class EmbeddingObjective(Objective):
    """
    Base class of objectives that contrast pooled embeddings. The first text column holds the anchors, the second one
    their positives. Further columns hold hard negatives, which are negatives of every anchor on every rank, as in the
    released code of IBKD, or with `own_negatives` of the anchor in their row alone, as in its Eq. 10.

    Args:
        grid ([`Grid`]): The granularities to train.
        temperature (`float`, *optional*, defaults to 0.05): tau; cosines are divided by it.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, `"cls"` or `"lasttoken"`.
        symmetric (`bool`, *optional*, defaults to `False`): Average two losses: that of each anchor among all
            candidates, and that of each positive among all anchors.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Exclude false negatives of an anchor: texts equal to
            its own positive, and positives of an equal anchor. Needs the `text_ids` of a batch, which
            [`TextColumnsCollator`] makes; without them nothing is masked.
        learn_temperature (`bool`, *optional*, defaults to `False`): Train tau as `log(1 / tau)`, starting from
            `temperature` and never below 0.01.
        ring (`bool`, *optional*, defaults to `False`): Pass the candidates of other ranks around in a ring
            ([`ring_info_nce`]) instead of gathering them. The losses are the same.
        gather_negatives (`bool`, *optional*, defaults to `True`): Use the candidates of all ranks. Without, each rank
            contrasts its own batch.
        guide_margin (`float`, *optional*): Exclude false negatives of an anchor: candidates that a guide model finds
            more similar to it than its positive, less this margin ([`false_negatives`]). Needs the guide's embeddings
            as the `teacher` of a batch. Default: there is no guide.
        relative_guide_margin (`bool`, *optional*, defaults to `False`): Whether the margin is a share of the
            similarity to the positive.
        own_negatives (`bool`, *optional*, defaults to `False`): Use a hard negative only for the anchor in its row
            ([`with_own_negatives`]), not for all.

    Raises:
        ValueError: if an argument is out of range, `ring` is combined with a guide or without `gather_negatives`, or
            `own_negatives` is combined with a guide; in forward, for a batch of one pair without hard negatives,
            without the embeddings of a guide, or with `own_negatives` and no hard negatives.
    """

    pooling: Pooling

    def __init__(
        self,
        grid: Grid,
        *,
        temperature: float = 0.05,
        pooling: Pooling = "mean",
        symmetric: bool = False,
        mask_duplicates: bool = True,
        learn_temperature: bool = False,
        ring: bool = False,
        gather_negatives: bool = True,
        guide_margin: float | None = None,
        relative_guide_margin: bool = False,
        own_negatives: bool = False,
    ):
        super().__init__(grid)
        check_negatives(ring, gather_negatives, guide_margin, own_negatives)
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} must be above 0.")
        check_pooling(pooling)
        self.pooling, self.symmetric, self.mask_duplicates, self.ring = pooling, symmetric, mask_duplicates, ring
        self.gather_negatives, self.own_negatives = gather_negatives, own_negatives
        self.guide_margin, self.relative_guide_margin = guide_margin, relative_guide_margin
        self._temperature = temperature
        # One element, since FSDP refuses parameters without dims.
        self.log_scale = nn.Parameter(torch.tensor([-math.log(temperature)])) if learn_temperature else None
        self.register_load_state_dict_pre_hook(with_one_element)

    @property
    def temperature(self) -> float | torch.Tensor:
        """The current tau, a number or a scalar tensor."""
        if self.log_scale is None:
            return self._temperature
        return 1 / self.log_scale[0].exp()

    @torch.no_grad()  # a clamp inside the graph would stop the gradient, and tau would stay at the limit
    def constrain(self) -> None:
        """Set a learned tau below 0.01 back to 0.01."""
        if self.log_scale is not None:
            self.log_scale.clamp_(max=math.log(LARGEST_LEARNED_SCALE))

    def embeddings(self, batch: NestedBatch, layer: int) -> list[torch.Tensor]:
        """Pooled embeddings of this rank's texts at a layer, one tensor `(batch, hidden_size)` per text column."""
        return [text.pooled(layer, self.pooling) for text in batch.texts.values()]

    def matches(self, batch: NestedBatch) -> Matches:
        """
        The positives and text ids of a batch, which are the same for every granularity.

        Raises:
            ValueError: if there are fewer than two text columns, three for `own_negatives`, or no embeddings of a
                guide that is needed.
        """
        if len(batch.texts) < 2:
            raise ValueError(f"A contrastive loss needs two text columns or more; got {', '.join(batch.texts)}.")
        if self.own_negatives and len(batch.texts) < 3:
            raise ValueError(f"own_negatives needs a column of hard negatives; got {', '.join(batch.texts)}.")
        first = next(iter(batch.texts.values())).layers[self.layers[0]]
        rows = RankRows.of(len(first), first.device) if self.gather_negatives else RankRows((len(first),))
        targets = torch.arange(len(first), device=first.device) + rows.offset
        guide, backward_guide = self.guides(batch, rows, targets)
        if batch.text_ids is None or not self.mask_duplicates:
            return Matches(rows, targets, guide=guide, backward_guide=backward_guide)
        anchors, positives, *negatives = batch.text_ids.values()
        anchor_ids = torch.stack([positives, anchors], dim=1)
        if self.own_negatives:
            equal = torch.stack([ids == positives for ids in negatives], dim=1)
            pair_ids = anchor_ids if self.ring else rows.gather(anchor_ids)
            return Matches(rows, targets, anchor_ids, pair_ids, pair_ids, equal_negatives=equal)
        without_anchor = [torch.stack([ids, torch.full_like(ids, NO_TEXT)], dim=1) for ids in negatives]
        if self.ring:  # ids go around with their candidates
            return Matches(rows, targets, anchor_ids, anchor_ids, torch.cat([anchor_ids, *without_anchor]))
        pair_ids = rows.gather(anchor_ids)
        candidate_ids = torch.cat([pair_ids, *map(rows.gather, without_anchor)])
        return Matches(rows, targets, anchor_ids, pair_ids, candidate_ids, guide, backward_guide)

    def guides(self, batch: NestedBatch, rows: RankRows, targets: torch.Tensor) -> tuple[Guide | None, Guide | None]:
        """The guide and the backward guide of [`Matches`] for a batch; `None` if there is none."""
        if self.guide_margin is None:
            return None, None
        if batch.teacher is None:
            raise ValueError("guide_margin needs the embeddings of a guide for all texts: name one in guide.")
        anchors, *others = batch.teacher.values()
        margin: dict[str, Any] = {"margin": self.guide_margin, "relative": self.relative_guide_margin}
        forward = Guide.of(anchors, torch.cat([rows.gather(each) for each in others]), targets, **margin)
        if not self.symmetric:
            return forward, None
        return forward, Guide.of(others[0], rows.gather(anchors), targets, **margin)

    def contrast(self, embeddings: Sequence[torch.Tensor], dims: Sequence[int], matches: Matches) -> torch.Tensor:
        """
        InfoNCE of one layer's embeddings at several dims, with the candidates of all ranks.

        Args:
            embeddings (`Sequence[torch.Tensor]`): One tensor of shape `(batch, hidden_size)` per text column.
            dims (`Sequence[int]`): Prefix dims, ascending.
            matches ([`Matches`]): Result of [`~EmbeddingObjective.matches`] for the batch.

        Returns:
            `torch.Tensor` of shape `(len(dims),)`: means over the batch; see [`RankRows.mean`].
        """
        anchors, *others = (vectors[:, : dims[-1]] for vectors in embeddings)
        candidates = others[:1] if self.own_negatives else others
        losses = self.info_nce(anchors, candidates, dims, matches, matches.candidate_ids, matches.guide)
        if self.own_negatives:
            losses = with_own_negatives(
                losses,
                anchors,
                others[0],
                torch.stack(others[1:], dim=1),
                dims=dims,
                temperature=self.temperature,
                left_out=matches.equal_negatives,
            )
        if not self.symmetric:
            return matches.rows.mean(losses)
        backwards = self.info_nce(others[0], [anchors], dims, matches, matches.pair_ids, matches.backward_guide)
        return matches.rows.mean((losses + backwards) / 2)

    def info_nce(
        self,
        anchors: torch.Tensor,
        columns: Sequence[torch.Tensor],
        dims: Sequence[int],
        matches: Matches,
        candidate_ids: torch.Tensor | None,
        guide: Guide | None,
    ) -> torch.Tensor:
        """InfoNCE `(batch, len(dims))` of this rank's anchors in one direction, with the candidates of all ranks:
        `columns` of this rank, the first of which has the positives."""
        if self.ring:
            return ring_info_nce(
                anchors,
                columns,
                dims=dims,
                temperature=self.temperature,
                rows=matches.rows,
                anchor_ids=matches.anchor_ids,
                candidate_ids=candidate_ids,
            )
        return nested_info_nce(
            anchors,
            torch.cat([matches.rows.gather(vectors) for vectors in columns]),
            dims=dims,
            temperature=self.temperature,
            targets=matches.targets,
            anchor_ids=matches.anchor_ids,
            candidate_ids=candidate_ids,
            guide=guide,
        )

    def contrast_grid(self, batch: NestedBatch, matches: Matches, weight: float = 1.0) -> Terms:
        """InfoNCE terms, one per granularity of the grid, all with this weight."""
        losses = {}
        for layer in self.layers:
            dims = self.grid.dims_of(layer)
            losses[layer] = dict(
                zip(dims, self.contrast(self.embeddings(batch, layer), dims, matches).unbind(), strict=True)
            )
        return {self.term(g, weight=weight): losses[g.layer][g.dim] for g in self.grid}


@described
@dataclass
class EmbeddingConfig(NestedTrainingArguments):
    """
    Configuration that the trainers of all [`EmbeddingObjective`]s share.

    Args:
        temperature (`float`, *optional*, defaults to 0.05): Temperature tau; cosines are divided by it (m3BERT,
            section 3.1).
        learn_temperature (`bool`, *optional*, defaults to `False`): Train tau, starting from `temperature` and never
            below 0.01.
        pooling (`str`, *optional*): Pooling of token states: `"mean"` over real tokens, `"cls"` (the first token) or
            `"lasttoken"` (for causal backbones). Default: as the model was published, else the mean.
        symmetric (`bool`, *optional*, defaults to `False`): Contrast in both directions: anchors among positives, and
            positives among anchors.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Do not use equal texts as negatives of each other.
        unsupervised (`bool`, *optional*, defaults to `False`): Train on one text column. The positive of a text is the
            text itself under another dropout mask (SimCSE).
        text_columns (`list[str]`, *optional*): Columns with text: anchor, positive, then hard negatives.
            `title+text` joins two columns. Default: by their names, in any order: `anchor`, `query`, `question` or
            `sentence1`; `positive`, `document`, `answer` or `sentence2`; `negative`, `negative_1`, ...; `text` for a
            single text, or for the other side of a pair. `label` and `score` are not read. A dataset with other
            columns is refused.
        field_separator (`str`, *optional*): Text between joined columns. Default: the tokenizer's separator token.
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
        ring (`bool`, *optional*, defaults to `False`): Pass the candidates of other devices around in a ring instead
            of gathering them: memory then does not grow with the number of devices. The losses are the same. For large
            batches on many devices; see docs/scaling.md.
        gather_negatives (`bool`, *optional*, defaults to `True`): Use the texts of all devices as negatives. Without,
            each device contrasts its own batch, as in the released code of m3BERT.
        guide (`dict`, *optional*): A model that finds false negatives: arguments of [`Teacher`], as JSON or a YAML
            mapping, such as `{name_or_path: intfloat/multilingual-e5-base, prompt: "query: "}`. A text that the guide
            finds more similar to a query than its positive is no negative of it (GISTEmbed,
            [2402.16829](https://huggingface.co/papers/2402.16829)). The guide embeds all texts once, before training.
        guide_margin (`float`, *optional*): Leave out texts whose similarity is above that of the positive less this
            margin. Default: 0 with a guide.
        relative_guide_margin (`bool`, *optional*, defaults to `False`): `guide_margin` is a share of the similarity to
            the positive, rather than a difference.
        own_negatives (`bool`, *optional*, defaults to `False`): Use a hard negative only for the anchor in its row, as
            in Eq. 10 of IBKD, not for all anchors. Excludes a guide.
        guide_cache_dir (`str`, *optional*, defaults to `"runs/teachers"`): Folder for the guide's embeddings.
        batch_sampler (`str`, *optional*, defaults to `"batch_sampler"`): How rows become batches: `batch_sampler`, at
            random, or `no_duplicates`, at random without two equal texts in a batch. The name and the values are those
            of sentence-transformers.
        multi_dataset_batch_sampler (`str`, *optional*, defaults to `"proportional"`): Which data set the next batch is
            from, if there are several: `proportional` to their sizes, so that every row is used, or `round_robin`, one
            batch of each in turn until the smallest has no more.
        learning_rate (`float`, *optional*, defaults to 2e-5): Initial learning rate of AdamW.
        per_device_train_batch_size (`int`, *optional*, defaults to 32): Rows per device and step.
        dataloader_drop_last (`bool`, *optional*, defaults to `True`): Drop the last batch if it is smaller, because
            it has fewer negatives.

    Defaults that differ from [`~transformers.TrainingArguments`]: `learning_rate` 2e-5 and
    `per_device_train_batch_size` 32 (m3BERT, section 3.1, public data sets), and `dataloader_drop_last`.

    The texts of the first column are queries, those of all other columns are documents. With `symmetric` or
    `unsupervised`, all texts are queries. A model keeps what it was published with ([`EmbeddingSettings`]): pooling,
    projection, normalisation, prompts, longest text; where an argument says otherwise, the log says so. The tokens of
    a prompt count towards the length of a text. A teacher reads texts without these prompts.

    Negatives come from the batches of all devices unless `gather_negatives` is off. Gradient accumulation does not add
    negatives: it averages the losses of smaller batches. For more negatives, raise `per_device_train_batch_size` and
    set `mini_batch_size`.

    Raises:
        ValueError: if a value is out of range, or a batch would hold one pair without negatives.
    """

    # For a model that was not published as an embedding model, and the longest text for any model.
    default_pooling: ClassVar[Pooling] = "mean"
    default_max_length: ClassVar[int] = 512
    # Whether training puts the prompts that the model was published with before texts.
    reads_published_prompts: ClassVar[bool] = True

    temperature: float = 0.05
    learn_temperature: bool = False
    pooling: Pooling | None = None
    symmetric: bool = False
    mask_duplicates: bool = True
    unsupervised: bool = False
    text_columns: list[str] | None = None
    field_separator: str | None = None
    max_length: int | None = None
    query_max_length: int | None = None
    document_max_length: int | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    projection_dim: int | None = None
    mini_batch_size: int | None = None
    ring: bool = False
    gather_negatives: bool = True
    guide: dict | str | None = None
    guide_margin: float | None = None
    relative_guide_margin: bool = False
    own_negatives: bool = False
    guide_cache_dir: str = "runs/teachers"
    batch_sampler: str = "batch_sampler"
    multi_dataset_batch_sampler: str = "proportional"
    learning_rate: float = 2e-5
    per_device_train_batch_size: int = 32
    dataloader_drop_last: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mini_batch_size is not None and self.mini_batch_size < 1:
            raise ValueError(f"mini_batch_size={self.mini_batch_size} must be 1 or more.")
        if self.guide is not None:
            self.guide = mapping_of("guide", self.guide)
            self.guide_margin = 0.0 if self.guide_margin is None else self.guide_margin
        check_negatives(self.ring, self.gather_negatives, self.guide_margin, self.own_negatives)
        for name, legal in BATCH_SAMPLERS.items():
            if (value := getattr(self, name)) not in legal:
                raise ValueError(f"{name}={value!r} is unknown; legal values: {', '.join(legal)}.")
        for role, length in self.max_lengths.items():
            if length < 1:
                raise ValueError(f"{role}_max_length={length} must be 1 or more.")
        if self.train_batch_size * self.world_size < 2 and len(self.text_columns or []) < 3:
            raise ValueError(
                "per_device_train_batch_size=1 leaves a contrastive loss without negatives; use 2 or more."
            )

    def with_settings(self, settings: EmbeddingSettings | None, limit: int) -> Self:
        """
        A copy that takes everything that is not set from the settings of the model to train. It says in the log which
        arguments differ from them.

        Args:
            settings ([`EmbeddingSettings`], *optional*): The model's settings, if it is an embedding model.
            limit (`int`): The longest text that the model embeds.
        """
        known = settings or EmbeddingSettings(pooling=self.default_pooling)
        found: dict[str, Any] = {"pooling": known.pooling}
        if known.projection is not None:
            found["projection_dim"] = known.projection.out_features
        for role in ("query", "document"):
            if known.prompts.get(role):
                found[f"{role}_prompt"] = known.prompts[role]
        if settings is not None:
            lengths = {"max_length": limit} if (self.max_length or 0) > limit else {}
            for name, value in (found | lengths).items():
                if (own := getattr(self, name)) not in (None, value):
                    logger.warning(f"The model was published with {name}={value!r}; the argument {own!r} is used.")
        if not self.reads_published_prompts:
            found = {name: value for name, value in found.items() if not name.endswith("_prompt")}
        elif self.symmetric or self.unsupervised:  # all texts are queries
            found.pop("document_prompt", None)
        found["max_length"] = min(self.default_max_length, limit)
        chosen = copy.copy(self)
        for name, value in found.items():
            if getattr(self, name) is None:
                setattr(chosen, name, value)
        return chosen

    def objective_arguments(self, objective_class: type[Objective]) -> dict[str, Any]:
        arguments = super().objective_arguments(objective_class)
        return arguments | ({"pooling": self.pooling or self.default_pooling} if "pooling" in arguments else {})

    @property
    def stated_prompts(self) -> dict[Role, str]:
        """Role -> prompt before its texts, for roles with an argument. It may be empty."""
        named: dict[Role, str | None] = {"query": self.query_prompt, "document": self.document_prompt}
        return {role: prompt for role, prompt in named.items() if prompt is not None}

    @property
    def prompts(self) -> dict[Role, str]:
        """Role -> prompt before its texts, for roles with a prompt."""
        return {role: prompt for role, prompt in self.stated_prompts.items() if prompt}

    @property
    def max_lengths(self) -> dict[Role, int]:
        """Role -> maximum length of its texts in tokens, for roles that differ from `max_length`."""
        named: dict[Role, int | None] = {"query": self.query_max_length, "document": self.document_max_length}
        return {role: length for role, length in named.items() if length is not None}

    def roles_of(self, columns: Sequence[str]) -> dict[str, Role]:
        """
        Text column -> role of its texts.

        Raises:
            ValueError: if there are options for documents, but all texts are queries.
        """
        alike = self.symmetric or self.unsupervised
        roles: dict[str, Role] = {
            column: "query" if alike or column == columns[0] else "document" for column in columns
        }
        for name in ("document_prompt", "document_max_length"):
            if getattr(self, name) is not None and "document" not in roles.values():
                raise ValueError(
                    f"{name} has no effect: all texts are queries here; set {name.replace('document', 'query')}."
                )
        return roles

    def grid_for(self, config: Any) -> Grid:
        if self.projection_dim is not None and self.grid is None:
            return Grid.product([config.num_hidden_layers], [self.projection_dim])
        return super().grid_for(config)

    def columns_of(self, *datasets: Any) -> list[str]:
        """
        The text columns to train on: `text_columns`, or those of the first dataset that knows its columns. It says in
        the log that labels are not read.

        Raises:
            ValueError: as [`~EmbeddingConfig.named_columns`], or if the number of columns does not fit: one if
                `unsupervised`, otherwise two or more.
        """
        columns = self.named_columns(*datasets)
        found = ", ".join(columns) or "none"
        if self.unsupervised and len(columns) != 1:
            raise ValueError(
                f"Unsupervised training takes one text column; found: {found}. Name one in text_columns, or pass "
                "unsupervised=False to train on pairs."
            )
        if not self.unsupervised and len(columns) < 2:
            raise ValueError(f"Contrastive training needs two text columns or more; found: {found}.")
        if not self.unsupervised and self.text_columns is None and (labels := labels_of(self._first(datasets)[1])):
            logger.warning(f"The column(s) {', '.join(labels)} are not read: every row is a positive pair.")
        return columns

    def named_columns(self, *datasets: Any) -> list[str]:
        """
        `text_columns`, or the text columns of the first dataset that knows its columns ([`text_columns_of`]). Their
        number is not checked.

        Raises:
            ValueError: if it is not clear from their names which columns have text.
        """
        if self.text_columns is not None:
            return self.text_columns
        dataset, found = self._first(datasets)
        try:
            return text_columns_of(found)
        except ValueError as error:
            raise ValueError(f"{error}{header_of(dataset)}") from error

    def label_column_of(self, *datasets: Any) -> str | None:
        """Hook for methods that train on scores: the column with them; `None` for all others."""
        return None

    @staticmethod
    def _first(datasets: Sequence[Any]) -> tuple[Any, list[str]]:
        """The first dataset that knows its columns, and these."""
        named = ((dataset, list(dataset.column_names or [])) for dataset in datasets if dataset is not None)
        return next(((dataset, names) for dataset, names in named if names), (None, []))
