"""Distillation of a teacher's embeddings: the options and the trainer that its methods share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import nn

from modeling_m3bert import EmbeddingSettings

from .core.arguments import TextTrainingArguments
from .core.granularity import Grid
from .core.help_texts import described
from .core.objective import Objective
from .data.teacher import Teacher, TeacherEmbeddings, teacher_from
from .embedding import EmbeddingTrainer


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
        teacher_pooling (`str`, *optional*): Pooling of the teacher: `mean`, `cls`, `lasttoken`, ... Default: the
            pooling that the teacher was published with.
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
        """
        The teacher that this config describes.

        Raises:
            ValueError: if `teacher_name_or_path` is not set.
        """
        if self.teacher_name_or_path is None:
            raise ValueError("Distillation needs a teacher: set teacher_name_or_path.")
        return Teacher(self.teacher_name_or_path, **self.teacher_settings)

    @property
    def teacher_settings(self) -> dict[str, Any]:
        """Arguments of [`Teacher`], without the name."""
        names = ("revision", "pooling", "prompt", "max_length", "dtype", "trust_remote_code", "batch_size")
        return {name: getattr(self, f"teacher_{name}") for name in names}

    def teacher_for(self, model: nn.Module) -> Teacher:
        """The teacher of a student; for some methods, the student itself as it was loaded."""
        return self.teacher

    def with_length_of_student(self) -> Teacher:
        """The teacher, which reads texts as long as the student's if it was published for them."""
        if self.teacher_max_length is None and self.teacher_name_or_path is not None:
            published = EmbeddingSettings.read(self.teacher_name_or_path, revision=self.teacher_revision)
            longest = [length for length in (self.max_length, published.max_length) if length is not None]
            self.teacher_max_length = min(longest, default=None)
        return self.teacher

    def build_distillation(self, grid: Grid, teacher: TeacherEmbeddings) -> Objective:
        """
        Build the objective that this config describes.

        Args:
            grid ([`Grid`]): The granularities to train.
            teacher ([`TeacherEmbeddings`]): Embeddings of the teacher.

        Returns:
            [`Objective`]

        Raises:
            ValueError: if an argument of the objective is out of range.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build_distillation.")


class DistillationTrainer(EmbeddingTrainer):
    """
    Trains a student with a teacher's embeddings. The teacher may be any embedding model with any tokenizer. It embeds
    all texts once, before training, into a cache.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`], peft model or [`~sentence_transformers.SentenceTransformer`]):
            The student, or its folder or Hub id.
        args ([`DistillationConfig`]): Training arguments.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*): Tokenizer of the student. Default:
            the one beside the student.
        train_dataset ([`~datasets.Dataset`], *optional*): Texts, in one or more columns.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): Evaluation data with the same columns.
        teacher (`Any`, *optional*): The teacher: its folder or Hub id, a
            [`~sentence_transformers.SentenceTransformer`], a [`Teacher`], or its [`TeacherEmbeddings`] of all these
            texts. Default: the teacher of `args`. Its embeddings are read from the cache or computed.
        kwargs: Further arguments of [`EmbeddingTrainer`].

    Raises:
        ValueError: as [`EmbeddingTrainer`], or if no teacher is named.
    """

    def teacher_of(
        self,
        model: nn.Module,
        args: DistillationConfig,
        texts: Iterable[str],
        given: Any = None,
    ) -> TeacherEmbeddings:
        if isinstance(given, str | PathLike):  # on record, as if `args` had named it
            args.teacher_name_or_path, given = str(given), None
        teacher = args.teacher_for(model) if given is None else teacher_from(given, **args.teacher_settings)
        return teacher.embed(texts, args.teacher_cache_dir, description="Teacher")

    def build_objective(self, args: DistillationConfig, grid: Grid) -> Objective:
        assert self.teacher is not None  # teacher_of always gives one
        return args.build_distillation(grid, self.teacher)
