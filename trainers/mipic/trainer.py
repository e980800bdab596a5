"""MIPIC: Matryoshka training with self-distilled token relations (SIA) and a chain from shallow to deep (PIC)."""

from __future__ import annotations

from dataclasses import dataclass

from ...utils.help_texts import described
from ..mixture import MixtureConfig, MixtureTrainer


@described
@dataclass
class MIPICConfig(MixtureConfig):
    """
    Configuration of [`MIPICTrainer`], in addition to the fields of [`MixtureConfig`].

    Args:
        alpha (`float`, *optional*, defaults to 0.4): Weight of the contrastive loss; SIA and PIC have the weight
            `1 - alpha` (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), Eq. 18; Table 7: 0.4 for
            TinyBERT and BERT, 0.5 for BGE-M3 and Qwen3).

    The other defaults are the paper's (Table 7, A.3): unsupervised, `pooling="cls"` unless the model was
    published with another one, the sum over dims, texts of up to 256 tokens, 5 epochs, batches of 16, cosine schedule.
    The default layers and chain are close to those of the paper; the recipes `mipic_*` have the exact ones. A causal
    backbone needs `pooling="lasttoken"`.
    """

    default_pooling = "cls"
    default_max_length = 256

    alpha: float = 0.4
    unsupervised: bool = True
    per_device_train_batch_size: int = 16
    num_train_epochs: float = 5.0
    lr_scheduler_type: str = "cosine"

    def method_weights(self) -> dict[str, float]:
        return {"mrl": self.alpha, "sia": 1 - self.alpha, "pic": 1 - self.alpha}


class MIPICTrainer(MixtureTrainer):
    """
    MIPIC ([2604.24374](https://huggingface.co/papers/2604.24374), Eq. 18), with a [`MIPICConfig`]:

        L = alpha L_MRL + (1 - alpha) (L_SIA + L_PIC)

    - L_MRL is [`Contrastive`] over the grid.
    - L_SIA ([`SIA`], Eqs. 6 to 13): attention between tokens and CKA of tokens, at each dim d below the hidden size D,
      match those at D: `sum_l sum_d KL(A_d || A_D) + 1 - CKA(H_d, H_D)`.
    - L_PIC ([`PIC`], Eqs. 16 and 17): along a chain of granularities from shallow to deep,
      `sum_i InfoNCE(phi_i(z_i), z_{i+1})`.
    """
