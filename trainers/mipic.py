"""MIPIC: Matryoshka training with self-distilled token relations and a chain from shallow to deep."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import papers
from .nested import Pooling
from .regularized import RegularizedConfig, RegularizedTrainer


@dataclass
class MIPICConfig(RegularizedConfig):
    """
    Configuration of [`MIPICTrainer`]: that of [`RegularizedConfig`] and

    Args:
        alpha (`float`, *optional*, defaults to 0.4): Of the contrastive loss; SIA and PIC count `1 - alpha` (MIPIC,
            [2604.24374](https://huggingface.co/papers/2604.24374), Eq. 18; Table 7: 0.4 for TinyBERT and BERT, 0.5
            for BGE-M3 and Qwen3).

    The other defaults are the paper's (Table 7, A.3): unsupervised, `pooling="anchor"`, the sum over dims, texts of
    256 tokens, 5 epochs of batches of 16, cosine schedule. Layers and checkpoints that are not given come close to the
    paper's for its backbones; the exact ones are in `scripts/recipes`.

    Raises:
        ValueError: if alpha is not in 0..1, and as [`RegularizedConfig`].
    """

    alpha: float = field(default=0.4, metadata={"help": "Weight of the contrastive loss; SIA and PIC have the rest."})
    unsupervised: bool = field(
        default=True, metadata={"help": "One text column; its positive is itself under another dropout mask."}
    )
    pooling: Pooling = field(default="anchor", metadata={"help": "'mean' over real tokens, or 'anchor'."})
    max_length: int = field(default=256, metadata={"help": "Longest text in tokens."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Texts a device and step."})
    num_train_epochs: float = field(default=5.0, metadata={"help": "Epochs."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} must be in 0..1.")

    def method_weights(self) -> dict[str, float]:
        return {"mrl": self.alpha, "sia": 1 - self.alpha, "pic": 1 - self.alpha}


class MIPICTrainer(RegularizedTrainer):
    """
    Trains an encoder with MIPIC.

    Args:
        args ([`MIPICConfig`]): How to train.
        kwargs: As for [`EmbeddingTrainer`].
    """

    _name = "MIPIC"
    _tag_names = ("mipic", "matryoshka", "sentence-similarity")
    _paper = papers.MIPIC
    _equation = "section 3: MRL, SIA and PIC"
