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
    """
    powers = [(size / sum(sizes)) ** exponent for size in sizes]
    return [power / sum(powers) for power in powers]


def mix_languages(
    datasets: Sequence[Dataset], *, exponent: float = 0.7, seed: int = 0, tokens: Sequence[int] | None = None
) -> Dataset:
    """
    Sample rows from the datasets of several languages until every row has been drawn at least once. Rows of small
    languages repeat.

    Args:
        datasets (`Sequence[Dataset]`): One dataset per language, with the same columns.
        exponent (`float`, *optional*, defaults to 0.7): See [`smoothed_probabilities`].
        seed (`int`, *optional*, defaults to 0): Seed of the sampling.
        tokens (`Sequence[int]`, *optional*): Tokens of each dataset: the shares of *tokens* are then the
            [`smoothed_probabilities`] of these, and a language whose rows are shorter is drawn more often. Default:
            the shares of rows are those of the row counts.

    Returns:
        [`~datasets.Dataset`]
    """
    if len(datasets) == 1:
        return datasets[0]
    rows = [len(dataset) for dataset in datasets]
    sizes = rows if tokens is None else tokens
    weights = [
        share * count / size
        for share, count, size in zip(smoothed_probabilities(sizes, exponent), rows, sizes, strict=True)
    ]
    return interleave_datasets(
        list(datasets),
        probabilities=[weight / sum(weights) for weight in weights],
        seed=seed,
        stopping_strategy="all_exhausted",
    )
