"""IBKD: a student learns a teacher's embeddings, and no more of its input than it needs for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from . import papers
from .collators import joined_text, separator_for
from .composition import Composition
from .contrastive import Contrastive, ContrastiveConfig
from .embedding import EmbeddingConfig, EmbeddingTrainer
from .granularity import Grid
from .objective import Objective
from .regularizers import HSIC
from .representation_distillation import CRD, HPD, TeacherContrast, TeacherMSE
from .teacher import Teacher, TeacherEmbeddings


# The paper's method and its baselines, and what each minimises.
EQUATIONS = {
    "ibkd": "Eq. 8: InfoNCE with a teacher's embeddings, and HSIC between input and representation",
    "ckd": "Eq. 8 without HSIC: InfoNCE with a teacher's embeddings (baseline CKD)",
    "mse": "mean squared error to a teacher's embeddings (baseline MSE)",
    "crd": "contrast with a teacher's embeddings by a learned critic (baseline CRD, arXiv 1910.10699)",
    "hpd": "mean squared error to a teacher's principal components (baseline HPD, arXiv 2203.07687)",
}
METHODS = tuple(EQUATIONS)


@dataclass
class HSICArguments:
    """
    How IBKD measures the dependence of an embedding on its input.

    Args:
        hsic_kernel (`str`, *optional*, defaults to `"rbf"`): `"rbf"`, `"linear"` or `"imq"`; see [`HSIC`], as for all
            that follow.
        hsic_gamma (`float`, *optional*, defaults to 0.5): Of the kernel.
        hsic_input_layer (`int`, *optional*, defaults to 0): What the input is: 0 for the embedding layer.
        hsic_detach_input (`bool`, *optional*, defaults to `False`): Whether the input is without gradient.
        hsic_normalize (`bool`, *optional*, defaults to `False`): L2-normalise before the kernel.
    """

    hsic_kernel: str = field(default="rbf", metadata={"help": "Kernel of HSIC: rbf, linear or imq."})
    hsic_gamma: float = field(default=0.5, metadata={"help": "Of the kernel."})
    hsic_input_layer: int = field(default=0, metadata={"help": "HSIC's input: 0 for the embeddings, or a layer."})
    hsic_detach_input: bool = field(default=False, metadata={"help": "No gradient to HSIC's input."})
    hsic_normalize: bool = field(default=False, metadata={"help": "L2-normalise before the kernel."})

    def hsic(self, grid: Grid, pooling: Any) -> HSIC:
        """The regulariser that these describe."""
        return HSIC(
            grid,
            kernel=self.hsic_kernel,
            gamma=self.hsic_gamma,
            input_layer=self.hsic_input_layer,
            detach_input=self.hsic_detach_input,
            normalize=self.hsic_normalize,
            pooling=pooling,
        )


@dataclass
class IBKDConfig(HSICArguments, EmbeddingConfig):
    """
    Configuration of [`IBKDTrainer`]: that of [`EmbeddingConfig`], [`HSICArguments`], and

    Args:
        teacher_name_or_path (`str`, *optional*): The teacher; see [`Teacher`], as for all that follow.
        teacher_revision (`str`, *optional*): Branch, tag or commit.
        teacher_pooling (`str`, *optional*): `"mean"`, `"cls"`, ...; default: as the teacher was published.
        teacher_prompt (`str`, *optional*, defaults to `""`): Words before every text.
        teacher_max_length (`int`, *optional*): Longest text in tokens.
        teacher_batch_size (`int`, *optional*, defaults to 64): Texts at a time.
        teacher_dtype (`str`, *optional*, defaults to `"float32"`): Of the cache: `"float32"` or `"float16"`.
        teacher_trust_remote_code (`bool`, *optional*, defaults to `False`): Run code that comes with it.
        teacher_cache_dir (`str`, *optional*, defaults to `"runs/teachers"`): Folder of caches.
        method (`str`, *optional*, defaults to `"ibkd"`): `"ibkd"` ([`TeacherContrast`] and [`HSIC`]), or a baseline:
            `"ckd"` (without HSIC), `"mse"` ([`TeacherMSE`]), `"crd"` ([`CRD`], with a temperature of its own), `"hpd"`
            ([`HPD`], with `projection_dim`).
        beta (`float`, *optional*, defaults to 1.0): beta_1, the weight of HSIC, for `"ibkd"`.
        normalize_targets (`bool`, *optional*, defaults to `False`): For `"mse"` and `"hpd"`: L2-normalise both sides
            of the squared error.

    The grid is the student's full size by default; with several granularities each has these losses, summed, which no
    paper has. Other defaults are the paper's (Table 1, STS): `temperature` 0.1, `learning_rate` 1e-4, batches of 256,
    10 epochs. `text_columns` has one column or more; all their texts are taught.

    Raises:
        ValueError: if a value is out of range.
    """

    full_size_by_default = True

    teacher_name_or_path: str | None = field(default=None, metadata={"help": "Folder or Hub id of the teacher."})
    teacher_revision: str | None = field(default=None, metadata={"help": "The teacher's branch, tag or commit."})
    teacher_pooling: str | None = field(
        default=None, metadata={"help": "mean, cls, lasttoken, ... Default: as the teacher was published."}
    )
    teacher_prompt: str = field(default="", metadata={"help": "Words that the teacher gets before every text."})
    teacher_max_length: int | None = field(default=None, metadata={"help": "The teacher's longest text in tokens."})
    teacher_batch_size: int = field(default=64, metadata={"help": "Texts that the teacher embeds at a time."})
    teacher_dtype: str = field(default="float32", metadata={"help": "Of the cache: float32 or float16."})
    teacher_trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the teacher."})
    teacher_cache_dir: str = field(default="runs/teachers", metadata={"help": "Folder of teachers' caches."})
    method: str = field(default="ibkd", metadata={"help": f"One of {', '.join(METHODS)}."})
    beta: float = field(default=1.0, metadata={"help": "Weight of HSIC, for the method ibkd."})
    normalize_targets: bool = field(
        default=False, metadata={"help": "For mse and hpd: L2-normalise both sides of the squared error."}
    )
    temperature: float = field(default=0.1, metadata={"help": "Cosines are divided by it."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Initial learning rate of AdamW."})
    per_device_train_batch_size: int = field(default=256, metadata={"help": "Texts a device and step."})
    num_train_epochs: float = field(default=10.0, metadata={"help": "Epochs."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is unknown; legal values: {', '.join(METHODS)}.")
        if self.beta < 0:
            raise ValueError(f"beta={self.beta} must not be negative.")
        if self.method == "hpd" and self.projection_dim is None:
            raise ValueError("HPD compresses the teacher to projection_dim dims: pass it (the paper: 128).")
        if self.normalize_targets and self.method not in ("mse", "hpd"):
            raise ValueError(f"normalize_targets is for the methods mse and hpd, not {self.method}.")
        for name in ("unsupervised", "symmetric", "learn_temperature"):
            if getattr(self, name):
                raise ValueError(f"{name} is for contrasting texts with each other, not with a teacher.")

    @property
    def teacher(self) -> Teacher:
        """
        The teacher that is meant.

        Raises:
            ValueError: if none is named.
        """
        if self.teacher_name_or_path is None:
            raise ValueError("Distillation needs a teacher: pass teacher_name_or_path.")
        return Teacher(
            self.teacher_name_or_path,
            **{
                name: getattr(self, f"teacher_{name}")
                for name in (
                    "revision",
                    "pooling",
                    "prompt",
                    "max_length",
                    "dtype",
                    "trust_remote_code",
                    "batch_size",
                )
            },
        )

    def columns_of(self, *datasets: Any) -> list[str]:
        columns = self.named_columns(*datasets)
        if not columns:
            raise ValueError("Distillation needs a column of texts: name it in text_columns.")
        return columns


class IBKDTrainer(EmbeddingTrainer):
    """
    Trains a student on unlabelled texts to embed them as a teacher does: IBKD, first stage
    ([2311.05472](https://huggingface.co/papers/2311.05472), Eq. 8), and the baselines of its paper. The teacher may be
    any model and have any tokenizer: texts are what the two have in common. It embeds all texts once, before training,
    into a cache.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The student.
        args ([`IBKDConfig`]): How to train.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]): The student's tokenizer.
        train_dataset ([`~datasets.Dataset`], *optional*): Texts, in one column or more.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): The same columns.
        teacher ([`TeacherEmbeddings`], *optional*): Of all these texts; default: those of `args.teacher`, from its
            cache, or computed now.
        kwargs: As for [`NestedTrainer`].

    Raises:
        ValueError: as [`EmbeddingTrainer`], or if no teacher is named, or a dataset is a stream.
    """

    _name = "IBKD"
    _tag_names = ("ibkd", "distillation", "sentence-similarity")
    _paper = papers.IBKD
    _equation = EQUATIONS["ibkd"]

    def __init__(
        self,
        model: nn.Module,
        args: IBKDConfig,
        processing_class: PreTrainedTokenizerBase,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        teacher: TeacherEmbeddings | None = None,
        **kwargs: Any,
    ):
        if teacher is None:
            eval_sets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
            datasets = [dataset for dataset in (train_dataset, *eval_sets) if dataset is not None]
            columns = args.columns_of(*datasets)
            separator = args.field_separator
            if separator is None:
                separator = separator_for(columns, processing_class)
            teacher = args.teacher.embed(
                all_texts(datasets, columns, separator), args.teacher_cache_dir, description="Teacher"
            )
        self.teacher = teacher
        self._name, self._equation = args.method.upper(), EQUATIONS[args.method]
        super().__init__(model, args, processing_class, train_dataset, eval_dataset, teacher=teacher, **kwargs)

    def build_objective(self, args: IBKDConfig, grid: Grid) -> Objective:
        options: dict[str, Any] = {"teacher_dim": self.teacher.width, "pooling": args.pooling}
        contrast = {"mask_duplicates": args.mask_duplicates}
        if args.method == "mse":
            return TeacherMSE(grid, normalize=args.normalize_targets, **options)
        if args.method == "crd":
            return CRD(grid, **contrast, **options)
        if args.method == "hpd":
            components = self.teacher.principal_components(grid.full.dim)
            return HPD(grid, components=components, normalize=args.normalize_targets, **options)
        distillation = TeacherContrast(grid, temperature=args.temperature, **contrast, **options)
        if args.method == "ckd" or args.beta == 0:
            return distillation
        return Composition({"infonce": (1.0, distillation), "hsic": (args.beta, args.hsic(grid, args.pooling))})


def all_texts(datasets: Iterable[Any], columns: list[str], separator: str) -> Iterable[str]:
    """
    The texts of all columns, as the collator joins them.

    Raises:
        ValueError: if a dataset is a stream: a cache holds texts that are known beforehand.
    """
    for dataset in datasets:
        if not isinstance(dataset, Dataset):
            raise ValueError(f"A teacher's cache needs a dataset that is read whole, not a {type(dataset).__name__}.")
        for row in dataset:
            for column in columns:
                yield joined_text(row, column, separator)


@dataclass
class IBKDFinetuningConfig(HSICArguments, ContrastiveConfig):
    """
    Configuration of [`IBKDFinetuningTrainer`]: that of [`ContrastiveConfig`], [`HSICArguments`], and

    Args:
        beta (`float`, *optional*, defaults to 0.5): beta_2, the weight of HSIC.

    The grid is the student's full size by default, or `projection_dim`. Other defaults are the paper's (Table 1, STS):
    `temperature` 0.05, `learning_rate` 3e-5, batches of 256, 3 epochs. Up to 8 hard negatives, a column each:
    `scripts/mine_negatives.py` finds them.

    Raises:
        ValueError: if a value is out of range.
    """

    full_size_by_default = True

    beta: float = field(default=0.5, metadata={"help": "Weight of HSIC."})
    learning_rate: float = field(default=3e-5, metadata={"help": "Initial learning rate of AdamW."})
    per_device_train_batch_size: int = field(default=256, metadata={"help": "Pairs a device and step."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Epochs."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 0:
            raise ValueError(f"beta={self.beta} must not be negative.")


class IBKDFinetuningTrainer(EmbeddingTrainer):
    """
    Trains a student on labelled pairs and hard negatives: IBKD, second stage
    ([2311.05472](https://huggingface.co/papers/2311.05472), Eqs. 9 and 10), [`Contrastive`] and [`HSIC`]; with
    `projection_dim`, to fewer dims (Eq. 11).

    Args:
        args ([`IBKDFinetuningConfig`]): How to train.
        kwargs: As for [`EmbeddingTrainer`].
    """

    _name = "IBKD fine-tuning"
    _tag_names = ("ibkd", "contrastive", "sentence-similarity")
    _paper = papers.IBKD
    _equation = "Eqs. 9 to 11: InfoNCE of pairs with hard negatives, and HSIC between input and representation"

    def build_objective(self, args: IBKDFinetuningConfig, grid: Grid) -> Objective:
        contrastive = Contrastive(grid, reduction=args.reduction, **args.embedding_arguments())
        return Composition({"nce": (1.0, contrastive), "hsic": (args.beta, args.hsic(grid, args.pooling))})
