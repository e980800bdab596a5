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
            [`smoothed_probabilities`] of these. Default: the shares of rows are those of the row counts.

    Returns:
        [`~datasets.Dataset`]
    """
    if len(datasets) == 1:
        return datasets[0]
    rows = [len(dataset) for dataset in datasets]
    probabilities = smoothed_probabilities(rows if tokens is None else tokens, exponent)
    if tokens is not None:
        probabilities = row_probabilities(probabilities, rows, tokens)
    return interleave_datasets(
        list(datasets), probabilities=probabilities, seed=seed, stopping_strategy="all_exhausted"
    )


def row_probabilities(probabilities: Sequence[float], rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """
    How often to draw a row of each language, so that the shares of the drawn tokens are `probabilities`: a language
    whose rows are shorter is drawn more often.

    Args:
        probabilities (`Sequence[float]`): The share of tokens of each language.
        rows (`Sequence[int]`): The number of rows of each language.
        tokens (`Sequence[int]`): The number of tokens of each language.
    """
    weights = [share * count / size for share, count, size in zip(probabilities, rows, tokens, strict=True)]
    return [weight / sum(weights) for weight in weights]
