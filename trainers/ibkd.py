"""IBKD: distil a teacher's embeddings into a student, with an information bottleneck."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .contrastive import Contrastive, ContrastiveConfig
from .core.composition import Composition, part_arguments
from .core.described import described
from .core.embedding import EmbeddingConfig
from .core.granularity import Grid
from .core.objective import Objective
from .core.parts.hsic import HSIC
from .core.parts.teacher import CRD, HPD, TeacherContrast, TeacherMSE
from .data.collators import joined_text, separator_for
from .data.teacher import Teacher, TeacherEmbeddings
from .embedding import EmbeddingTrainer


METHODS = ("ibkd", "ckd", "mse", "crd", "hpd")


@described
@dataclass
class IBKDConfig(EmbeddingConfig):
    """
    Configuration of [`IBKDTrainer`], in addition to the fields of [`EmbeddingConfig`].

    Args:
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
        method (`str`, *optional*, defaults to `"ibkd"`): Training objective: `ibkd` (InfoNCE with the teacher, and
            HSIC), or a baseline: `ckd` (without HSIC), `mse` (squared error), `crd` (a learned critic, with its own
            temperature), `hpd` (squared error to principal components; needs `projection_dim`).
        beta (`float`, *optional*, defaults to 1.0): Weight of HSIC in the method `ibkd`, beta_1 in the paper.
        hsic (`dict`, *optional*): Arguments of [`HSIC`], as JSON or a YAML mapping, such as `{normalize: true}`.
        normalize_targets (`bool`, *optional*, defaults to `False`): L2-normalise both sides of the squared error, for
            the methods `mse` and `hpd`.

    The default grid is the student's full size. With several granularities, their losses are summed, which is not in
    the paper. Other defaults are the paper's (Table 1, STS): `temperature` 0.1, `learning_rate` 1e-4, batches of 256,
    10 epochs. `text_columns` names one or more columns; the teacher embeds the texts of all of them.

    Raises:
        ValueError: if a value is out of range.
    """

    full_size_by_default = True

    teacher_name_or_path: str | None = None
    teacher_revision: str | None = None
    teacher_pooling: str | None = None
    teacher_prompt: str = ""
    teacher_max_length: int | None = None
    teacher_batch_size: int = 64
    teacher_dtype: str = "float32"
    teacher_trust_remote_code: bool = False
    teacher_cache_dir: str = "runs/teachers"
    method: str = "ibkd"
    beta: float = 1.0
    hsic: dict | str | None = None
    normalize_targets: bool = False
    temperature: float = 0.1
    learning_rate: float = 1e-4
    per_device_train_batch_size: int = 256
    num_train_epochs: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is unknown; legal values: {', '.join(METHODS)}.")
        if self.beta < 0:
            raise ValueError(f"beta={self.beta} must not be negative.")
        if self.method == "hpd" and self.projection_dim is None:
            raise ValueError("method='hpd' needs projection_dim, the dims of the compressed teacher (the paper: 128).")
        if self.normalize_targets and self.method not in ("mse", "hpd"):
            raise ValueError(f"normalize_targets needs the method mse or hpd; method={self.method!r} does not use it.")
        for name in ("unsupervised", "symmetric", "learn_temperature"):
            if getattr(self, name):
                raise ValueError(f"{name} is for contrastive training on text pairs; unset it for distillation.")
        self.hsic = part_arguments("hsic", self.hsic, HSIC)

    @property
    def teacher(self) -> Teacher:
        """
        The teacher that this config describes.

        Raises:
            ValueError: if `teacher_name_or_path` is not set.
        """
        if self.teacher_name_or_path is None:
            raise ValueError("Distillation needs a teacher: set teacher_name_or_path.")
        names = ("revision", "pooling", "prompt", "max_length", "dtype", "trust_remote_code", "batch_size")
        return Teacher(self.teacher_name_or_path, **{name: getattr(self, f"teacher_{name}") for name in names})

    def columns_of(self, *datasets: Any) -> list[str]:
        columns = self.named_columns(*datasets)
        if not columns:
            raise ValueError("Distillation needs at least one text column: name it in text_columns.")
        return columns

    def build_objective(self, grid: Grid, teacher: TeacherEmbeddings | None = None) -> Objective:
        """
        Build the objective that this config describes.

        Args:
            grid ([`Grid`]): The granularities to train.
            teacher ([`TeacherEmbeddings`]): Embeddings of the teacher, for their width and principal components.

        Returns:
            [`Objective`]

        Raises:
            ValueError: if `teacher` is missing, or an argument of the objective is out of range.
        """
        if teacher is None:
            raise ValueError("Distillation needs the teacher's embeddings: pass teacher.")
        options: dict[str, Any] = {"teacher_dim": teacher.width, "pooling": self.pooling}
        if self.method == "mse":
            return TeacherMSE(grid, normalize=self.normalize_targets, **options)
        if self.method == "crd":
            return CRD(grid, mask_duplicates=self.mask_duplicates, **options)
        if self.method == "hpd":
            components = teacher.principal_components(grid.full.dim)
            return HPD(grid, components=components, normalize=self.normalize_targets, **options)
        infonce = TeacherContrast(grid, temperature=self.temperature, mask_duplicates=self.mask_duplicates, **options)
        if self.method == "ckd" or self.beta == 0:
            return infonce
        return Composition({"infonce": (1.0, infonce), "hsic": (self.beta, hsic_of(self, grid))})


class IBKDTrainer(EmbeddingTrainer):
    """
    Distils a teacher's embeddings into a student on unlabelled texts: the first stage of IBKD
    ([2311.05472](https://huggingface.co/papers/2311.05472), Eq. 8), and the baselines of its paper. The teacher may be
    any embedding model with any tokenizer. It embeds all texts once, before training, into a cache.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The student.
        args ([`IBKDConfig`]): Training arguments.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the student.
        train_dataset ([`~datasets.Dataset`], *optional*): Texts, in one or more columns.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): Evaluation data with the same columns.
        teacher ([`TeacherEmbeddings`], *optional*): The teacher's embeddings of all these texts. Default: embeddings
            of `args.teacher`, read from the cache or computed.
        kwargs: Further arguments of [`NestedTrainer`].

    Raises:
        ValueError: as [`EmbeddingTrainer`], or if no teacher is named, or a dataset is a stream.
    """

    def teacher_of(
        self,
        args: IBKDConfig,
        datasets: Sequence[Any],
        columns: Sequence[str],
        processing_class: PreTrainedTokenizerBase,
    ) -> TeacherEmbeddings:
        separator = args.field_separator
        if separator is None:
            separator = separator_for(columns, processing_class)
        texts = all_texts(datasets, columns, separator)
        return args.teacher.embed(texts, args.teacher_cache_dir, description="Teacher")

    def build_objective(self, args: IBKDConfig, grid: Grid) -> Objective:
        return args.build_objective(grid, self.teacher)


def hsic_of(args: IBKDConfig | IBKDFinetuningConfig, grid: Grid) -> HSIC:
    """[`HSIC`] with the pooling and the HSIC arguments of a config."""
    return HSIC(grid, **{"pooling": args.pooling, **part_arguments("hsic", args.hsic, HSIC)})


def all_texts(datasets: Iterable[Any], columns: Sequence[str], separator: str) -> Iterable[str]:
    """
    All texts of all columns, joined as the collator joins them.

    Raises:
        ValueError: if a dataset is a stream, whose texts cannot be embedded before training.
    """
    for dataset in datasets:
        if not isinstance(dataset, Dataset):
            raise ValueError(
                f"A teacher embeds all texts before training: pass a Dataset, not an {type(dataset).__name__}."
            )
        for row in dataset:
            for column in columns:
                yield joined_text(row, column, separator)


@described
@dataclass
class IBKDFinetuningConfig(ContrastiveConfig):
    """
    Configuration of [`IBKDFinetuningTrainer`], in addition to the fields of [`ContrastiveConfig`].

    Args:
        beta (`float`, *optional*, defaults to 0.5): Weight of HSIC, beta_2 in the paper.
        hsic (`dict`, *optional*): Arguments of [`HSIC`], as JSON or a YAML mapping, such as `{normalize: true}`.

    The default grid is the student's full size, or the last layer at `projection_dim` dims. Other defaults are the
    paper's (Table 1, STS): `temperature` 0.05, `learning_rate` 3e-5, batches of 256, 3 epochs. The paper uses up to 8
    hard negatives, one column each; the command `mine` finds them.

    Raises:
        ValueError: if a value is out of range.
    """

    full_size_by_default = True

    beta: float = 0.5
    hsic: dict | str | None = None
    learning_rate: float = 3e-5
    per_device_train_batch_size: int = 256
    num_train_epochs: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 0:
            raise ValueError(f"beta={self.beta} must not be negative.")
        self.hsic = part_arguments("hsic", self.hsic, HSIC)

    def build_objective(self, grid: Grid) -> Objective:
        contrastive = Contrastive(grid, **self.objective_arguments(Contrastive))
        return Composition({"contrastive": (1.0, contrastive), "hsic": (self.beta, hsic_of(self, grid))})


class IBKDFinetuningTrainer(EmbeddingTrainer):
    """
    Fine-tunes a student on labelled pairs and hard negatives with [`Contrastive`] and [`HSIC`]: the second stage of
    IBKD ([2311.05472](https://huggingface.co/papers/2311.05472), Eqs. 9 and 10). With `projection_dim`, embeddings are
    projected to fewer dims (Eq. 11). Takes an [`IBKDFinetuningConfig`].
    """
