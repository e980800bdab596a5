"""IBKD: distil a teacher's embeddings into a student, with an information bottleneck."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...data.teacher import TeacherEmbeddings
from ...encode.granularity import Grid
from ...utils.help_texts import described
from ..contrastive.contrastive import Contrastive, ContrastiveConfig
from ..core.composition import Composition, mapping_of
from ..core.objective import Objective, require_known
from ..distillation.objective import CRD, HPD, TeacherContrast, TeacherMSE
from ..distillation.trainer import DistillationConfig, DistillationTrainer
from ..embedding.trainer import EmbeddingTrainer
from .hsic import HSIC


METHODS = ("ibkd", "ckd", "mse", "crd", "hpd")


@described
@dataclass
class IBKDConfig(DistillationConfig):
    """
    Configuration of [`IBKDTrainer`], in addition to the fields of [`DistillationConfig`].

    Args:
        method (`str`, *optional*, defaults to `"ibkd"`): Training objective: `ibkd` (InfoNCE with the teacher, and
            HSIC), or a baseline: `ckd` (without HSIC), `mse` (squared error), `crd` (a learned critic, with its own
            temperature), `hpd` (squared error to principal components; needs `projection_dim`).
        beta (`float`, *optional*, defaults to 1.0): Weight of HSIC in the method `ibkd`, beta_1 in the paper.
        hsic (`dict`, *optional*): Arguments of [`HSIC`], as JSON or a YAML mapping, such as `{normalize: true}`.
        normalize_targets (`bool`, *optional*, defaults to `False`): L2-normalise both sides of the squared error, for
            the methods `mse` and `hpd`.
        temperature (`float`, *optional*, defaults to 0.1): Temperature tau of InfoNCE with the teacher.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Do not use equal texts as negatives of each other,
            for the methods `ibkd`, `ckd` and `crd`.

    The default grid is the student's full size. With several granularities, their losses are summed, which is not in
    the paper. Other defaults are the paper's (Table 1, STS): `temperature` 0.1, `learning_rate` 1e-4, batches of 256,
    10 epochs.
    """

    full_size_by_default = True

    method: str = "ibkd"
    beta: float = 1.0
    hsic: dict | str | None = None
    normalize_targets: bool = False
    mask_duplicates: bool = True
    temperature: float = 0.1
    learning_rate: float = 1e-4
    per_device_train_batch_size: int = 256
    num_train_epochs: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known(METHODS, method=self.method)
        if self.method == "hpd" and self.projection_dim is None:
            raise ValueError("method='hpd' needs projection_dim, the dims of the compressed teacher (the paper: 128).")
        self.hsic = mapping_of("hsic", self.hsic, HSIC.argument_names())

    def build_distillation(self, grid: Grid, teacher: TeacherEmbeddings) -> Objective:
        options: dict[str, Any] = {"teacher_dim": teacher.width, "pooling": self.pooling or self.default_pooling}
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


class IBKDTrainer(DistillationTrainer):
    """
    The first stage of IBKD ([2311.05472](https://huggingface.co/papers/2311.05472), Eq. 8), and the baselines of its
    paper, with an [`IBKDConfig`]. Embeddings s of a student become like those of a teacher, t, and are to depend
    little on the unlabelled texts x:

        L = InfoNCE(s, t) + beta HSIC(s, x)
    """


def hsic_of(args: IBKDConfig | IBKDFinetuningConfig, grid: Grid) -> HSIC:
    """[`HSIC`] with the pooling and the HSIC arguments of a config."""
    return HSIC(grid, **{"pooling": args.pooling or args.default_pooling, **mapping_of("hsic", args.hsic)})


@described
@dataclass
class IBKDFinetuningConfig(ContrastiveConfig):
    """
    Configuration of [`IBKDFinetuningTrainer`], in addition to the fields of [`ContrastiveConfig`].

    Args:
        beta (`float`, *optional*, defaults to 0.5): Weight of HSIC, beta_2 in the paper; 0 for the baseline CKD.
        hsic (`dict`, *optional*): Arguments of [`HSIC`], as JSON or a YAML mapping, such as `{normalize: true}`.

    The default grid is the student's full size, or the last layer at `projection_dim` dims. Other defaults are the
    paper's (Table 1, STS): `temperature` 0.05, `learning_rate` 3e-5, batches of 256, 3 epochs. The paper uses up to 8
    hard negatives, one column each; the command `mine` finds them. They are negatives of every anchor, as in the
    released code; with `own_negatives`, of their own, as in Eq. 10.
    """

    full_size_by_default = True

    beta: float = 0.5
    hsic: dict | str | None = None
    learning_rate: float = 3e-5
    per_device_train_batch_size: int = 256
    num_train_epochs: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hsic = mapping_of("hsic", self.hsic, HSIC.argument_names())

    def build_objective(self, grid: Grid) -> Objective:
        contrastive = Contrastive(grid, **self.objective_arguments())
        return Composition({"contrastive": (1.0, contrastive), "hsic": (self.beta, hsic_of(self, grid))})


class IBKDFinetuningTrainer(EmbeddingTrainer):
    """
    The second stage of IBKD ([2311.05472](https://huggingface.co/papers/2311.05472), Eqs. 9 and 10), with an
    [`IBKDFinetuningConfig`]. It fine-tunes a student on labelled pairs and hard negatives:

        L = InfoNCE(s, s+) + beta HSIC(s, x)

    With `projection_dim`, embeddings are projected to fewer dims (Eq. 11).
    """
