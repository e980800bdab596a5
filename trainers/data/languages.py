"""Mix languages: sampling probabilities, and one dataset from several."""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset, interleave_datasets


def smoothed_probabilities(sizes: Sequence[float], exponent: float = 0.7) -> list[float]:
    """
    Sampling probabilities of languages, `P'(L) ~ P(L)^exponent` renormalised
    (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), section 2.3, stage 2).

    Args:
        sizes (`Sequence[float]`): Amount of text in each language, in any unit.
        exponent (`float`, *optional*, defaults to 0.7): 1 keeps the proportions, 0 makes all languages equally likely.

    Returns:
        `list[float]`: probabilities that sum to 1.

    Raises:
        ValueError: if a size is not positive.
    """
    if not sizes or min(sizes) <= 0:
        raise ValueError(f"Every language needs a size above 0; sizes={list(sizes)}.")
    powers = [(size / sum(sizes)) ** exponent for size in sizes]
    return [power / sum(powers) for power in powers]


def mix_languages(datasets: Sequence[Dataset], *, exponent: float = 0.7, seed: int = 0) -> Dataset:
    """
    Sample from the datasets of several languages with the [`smoothed_probabilities`] of their row counts, until every
    row has been drawn at least once. Rows of small languages repeat.

    Args:
        datasets (`Sequence[Dataset]`): One dataset per language, with the same columns.
        exponent (`float`, *optional*, defaults to 0.7): See [`smoothed_probabilities`].
        seed (`int`, *optional*, defaults to 0): Seed of the sampling.

    Returns:
        [`~datasets.Dataset`]
    """
    if len(datasets) == 1:
        return datasets[0]
    probabilities = smoothed_probabilities([len(dataset) for dataset in datasets], exponent)
    return interleave_datasets(
        list(datasets), probabilities=probabilities, seed=seed, stopping_strategy="all_exhausted"
    )
