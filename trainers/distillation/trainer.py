"""Distillation of a teacher's embeddings: the options and the trainer that its methods share."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Self

from torch import nn

from ...data.teacher import Teacher, TeacherEmbeddings, teacher_from
from ...encode.granularity import Grid
from ...encode.projection import FIT_EXITS
from ...encode.states import unwrap_encoder
from ...models.settings import EmbeddingSettings
from ...utils.help_texts import described
from ..core.arguments import TextTrainingArguments
from ..core.objective import Objective
from ..embedding.trainer import EmbeddingTrainer


@described
@dataclass
class DistillationConfig(TextTrainingArguments):
    """
    Configuration that the methods with a teacher share, in addition to the fields of
    [`TextTrainingArguments`].

    Args:
        > Parameters that control the teacher

        teacher_name_or_path (`str`, *optional*): Folder or Hub id of the teacher; see [`Teacher`].
        teacher_revision (`str`, *optional*): Branch, tag or commit of the teacher.
        teacher_pooling (`str`, *optional*): Pooling of the teacher: `mean`, `cls`, `lasttoken`, `pooler`, ...
            Default: the pooling that the teacher was published with.
        teacher_prompt (`str`, *optional*, defaults to `""`): Prompt before every text for the teacher.
        teacher_max_length (`int`, *optional*): Maximum length of a text for the teacher in tokens. Default: the limit
            of the teacher.
        teacher_batch_size (`int`, *optional*, defaults to 64): Number of texts that the teacher embeds at a time.
        teacher_dtype (`str`, *optional*, defaults to `"float32"`): Type of the cached embeddings: `float32` or
            `float16`.
        teacher_trust_remote_code (`bool`, *optional*, defaults to `False`): Run code from the teacher's repository.
        teacher_cache_dir (`str`, *optional*, defaults to `"runs/teachers"`): Folder for the cached embeddings.

    `text_columns` names one or more columns; the teacher embeds the texts of all of them. Neither teacher nor student
    reads the prompts that the student was published with; the saved student keeps them.
    """

    reads_published_prompts = False
    projects: ClassVar[bool] = True  # whether the student may have a projection

    teacher_name_or_path: str | None = None
    teacher_revision: str | None = None
    teacher_pooling: str | None = None
    teacher_prompt: str = ""
    teacher_max_length: int | None = None
    teacher_batch_size: int = 64
    teacher_dtype: str = "float32"
    teacher_trust_remote_code: bool = False
    teacher_cache_dir: str = "runs/teachers"

    @property
    def teacher(self) -> Teacher:
        """The teacher that this config names."""
        if self.teacher_name_or_path is None:
            raise ValueError("Distillation needs a teacher: set teacher_name_or_path.")
        return Teacher(self.teacher_name_or_path, **self.teacher_settings)

    @property
    def teacher_settings(self) -> dict[str, Any]:
        """Arguments of [`Teacher`], without the name."""
        names = ("revision", "pooling", "prompt", "max_length", "dtype", "trust_remote_code", "batch_size")
        return {name: getattr(self, f"teacher_{name}") for name in names}

    def with_settings(self, settings: EmbeddingSettings | None, limit: int) -> Self:
        if not self.projects and (self.projection_dim is not None or (settings and settings.projection is not None)):
            raise ValueError(f"{type(self).__name__} trains no projection. {FIT_EXITS}")
        return super().with_settings(settings, limit)

    def with_teacher(self, model: nn.Module, given: Any) -> Self:
        """A copy that names its teacher, where the teacher that was passed is a folder or Hub id, or `None`."""
        chosen = copy.copy(self)
        if isinstance(given, str | PathLike):
            chosen.teacher_name_or_path, given = str(given), None
        return chosen.for_student(model) if given is None else chosen

    def for_student(self, model: nn.Module) -> Self:
        """Hook for arguments of the teacher that depend on the student."""
        return self

    def with_student_as_teacher(self, model: nn.Module) -> Self:
        """A copy that names the model itself, as it was loaded, if no teacher is named."""
        chosen = copy.copy(self)
        if chosen.teacher_name_or_path is None:
            chosen.teacher_name_or_path = unwrap_encoder(model).config.name_or_path or None
            if chosen.teacher_pooling is None and chosen.pooling != "mean":
                chosen.teacher_pooling = chosen.pooling  # without published modules, it would be the mean
        return chosen

    def with_length_of_student(self) -> Self:
        """A copy whose teacher reads texts as long as the student's, if it was published for them."""
        chosen = copy.copy(self)
        if chosen.teacher_max_length is None and chosen.teacher_name_or_path is not None:
            published = EmbeddingSettings.read(chosen.teacher_name_or_path, revision=chosen.teacher_revision)
            longest = [length for length in (chosen.max_length, published.max_length) if length is not None]
            chosen.teacher_max_length = min(longest, default=None)
        return chosen

    def build_distillation(self, grid: Grid, teacher: TeacherEmbeddings) -> Objective:
        """Build the objective that this config describes, for the granularities to train."""
        raise NotImplementedError(f"{type(self).__name__} must define build_distillation.")


class DistillationTrainer(EmbeddingTrainer):
    """
    Trains a student with a teacher's embeddings. The teacher may be any embedding model with any tokenizer. It embeds
    all texts once, before training, into a cache.

    Args:
        args ([`DistillationConfig`]): Training arguments.
        teacher (`Any`, *optional*): The teacher: its folder or Hub id, a
            [`~sentence_transformers.SentenceTransformer`], a [`Teacher`], or its [`TeacherEmbeddings`] of all these
            texts. Default: the teacher of `args`. Its embeddings are read from the cache or computed.
        kwargs: Further arguments of [`EmbeddingTrainer`], of which `model` is the student. The data has one or
            more columns of texts.

    Raises:
        ValueError: as [`EmbeddingTrainer`], or if no teacher is named.
    """

    def arguments_for(self, args: Any, model: nn.Module, teacher: Any) -> Any:
        return args if isinstance(teacher, TeacherEmbeddings) else args.with_teacher(model, teacher)

    def embeddings_of(self, teacher: Any, args: Any, texts: Iterable[str]) -> TeacherEmbeddings:
        if isinstance(teacher, TeacherEmbeddings):
            return teacher
        source = args.teacher if teacher is None else teacher_from(teacher, **args.teacher_settings)
        return source.embed(texts, args.teacher_cache_dir, description="Teacher")

    def build_objective(self, args: Any, grid: Grid) -> Objective:
        assert self.teacher is not None  # embeddings_of always gives one
        return args.build_distillation(grid, self.teacher)
