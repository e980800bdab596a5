"""MIC: Matryoshka training with less redundant (SCR) and more isotropic (SIR) prefixes."""

from __future__ import annotations

from dataclasses import dataclass

from ...utils.help_texts import described
from ..mixture import MixtureConfig, MixtureTrainer


@described
@dataclass
class MICConfig(MixtureConfig):
    """
    Configuration of [`MICTrainer`], in addition to the fields of [`MixtureConfig`].

    Args:
        gamma (`float`, *optional*, defaults to 0.6): Weight of SCR and SIR (MIC,
            [2605.29987](https://huggingface.co/papers/2605.29987), section 2.3 and Table 4).

    The other defaults are the paper's (Table 4, B.3): unsupervised, the mean over dims, texts of up to 256 tokens, 5
    epochs, batches of 32, cosine schedule. The paper gives no temperature; 0.05 is MIPIC's. For BERT's 12 layers, the
    default layers of SCR and SIR are 8 and 10, as in the paper; for TinyBERT and BGE-M3 see the recipes `mic_*`.
    """

    default_max_length = 256

    gamma: float = 0.6
    reduction: str = "mean"
    unsupervised: bool = True
    num_train_epochs: float = 5.0
    lr_scheduler_type: str = "cosine"

    def method_weights(self) -> dict[str, float]:
        return {"mrl": 1.0, "scr": self.gamma, "sir": self.gamma}


class MICTrainer(MixtureTrainer):
    """
    MIC ([2605.29987](https://huggingface.co/papers/2605.29987), section 2.3), with a [`MICConfig`]:

        L = L_MRL + gamma (L_SCR + L_SIR)

    - L_MRL is [`Contrastive`], the mean over the grid.
    - L_SCR ([`SCR`], section 2.1): the dims behind a prefix do not repeat it, and no dim collapses.
    - L_SIR ([`SIR`], section 2.2): the dims of a prefix vary equally, and its embeddings are spread uniformly.
    """
