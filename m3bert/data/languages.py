"""Mix languages: sampling probabilities, and one dataset from several."""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset, interleave_datasets


def smoothed_probabilities(sizes: Sequence[float], exponent: float = 0.7) -> list[float]:
    """
    Sampling probabilities of languages from the amounts of text, `P'(L) ~ P(L)^exponent` renormalised (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), section 2.3, stage 2). The exponent 1 keeps the
    proportions, 0 makes all languages equally likely.
    """
    powers = [(size / sum(sizes)) ** exponent for size in sizes]
    return [power / sum(powers) for power in powers]


def mix_languages(
    datasets: Sequence[Dataset], *, exponent: float = 0.7, seed: int = 0, tokens: Sequence[int] | None = None
) -> Dataset:
    """
    Sample rows from the datasets of several languages, with the same columns, until every row has been drawn at least
    once. Rows of small languages repeat. The shares of rows are the [`smoothed_probabilities`] of the row counts. With
    the `tokens` of each dataset, the shares of *tokens* follow these numbers, and a language whose rows are
    shorter is drawn more often.
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
