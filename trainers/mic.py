"""MIC: Matryoshka training whose prefixes do not repeat themselves and fill their space."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import papers
from .regularized import RegularizedConfig, RegularizedTrainer


@dataclass
class MICConfig(RegularizedConfig):
    """
    Configuration of [`MICTrainer`]: that of [`RegularizedConfig`] and

    Args:
        gamma (`float`, *optional*, defaults to 0.6): Of SCR and SIR (MIC,
            [2605.29987](https://huggingface.co/papers/2605.29987), section 2.3 and Table 4).

    The other defaults are the paper's (Table 4, B.3): unsupervised, the mean over dims, texts of 256 tokens, 5 epochs
    of batches of 32, cosine schedule. `isotropy_layers` are 8 and 10 of BERT's 12, as there; for TinyBERT and BGE-M3
    see `scripts/recipes`.

    Raises:
        ValueError: if gamma is negative, and as [`RegularizedConfig`].
    """

    gamma: float = field(default=0.6, metadata={"help": "Weight of SCR and SIR."})
    reduction: str = field(default="mean", metadata={"help": "Of the losses over the grid: 'sum' or 'mean'."})
    unsupervised: bool = field(
        default=True, metadata={"help": "One text column; its positive is itself under another dropout mask."}
    )
    max_length: int = field(default=256, metadata={"help": "Longest text in tokens."})
    num_train_epochs: float = field(default=5.0, metadata={"help": "Epochs."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma < 0:
            raise ValueError(f"gamma={self.gamma} must not be negative.")

    def method_weights(self) -> dict[str, float]:
        return {"mrl": 1.0, "scr": self.gamma, "sir": self.gamma}


class MICTrainer(RegularizedTrainer):
    """
    Trains an encoder with MIC.

    Args:
        args ([`MICConfig`]): How to train.
        kwargs: As for [`EmbeddingTrainer`].
    """

    _name = "MIC"
    _tag_names = ("mic", "matryoshka", "sentence-similarity")
    _paper = papers.MIC
    _equation = "section 2: MRL, SCR and SIR"
