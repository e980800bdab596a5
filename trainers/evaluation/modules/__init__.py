"""The evaluators' metrics as modules of the library `evaluate`, loaded from this package without network access."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from evaluate import Metric


FOLDER = Path(__file__).parent
METRICS = tuple(sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__"))
_ONE_AT_A_TIME = Lock()


def load_metric(name: str, **options: Any) -> Metric:
    """
    Load a metric for use with `add_batch` and `compute`.

    Args:
        name (`str`): One of [`METRICS`].
        options: Arguments of `evaluate.load`: `num_process`, `experiment_id`, ...

    Returns:
        `evaluate.Metric`

    Raises:
        ValueError: if there is no metric of this name.

    ```python
    >>> from trainers.evaluation.modules import load_metric

    >>> load_metric("similarity_spearman").compute(predictions=[0.9, 0.1, 0.5], references=[5.0, 0.0, 3.0])
    {'spearman': 1.0}
    ```
    """
    if name not in METRICS:
        raise ValueError(f"There is no metric {name!r}; legal values: {', '.join(METRICS)}.")
    import evaluate  # takes a second

    return evaluate.load(str(FOLDER / f"{name}.py"), **options)


def compute_metric(name: str, **inputs: Any) -> dict[str, float]:
    """
    Compute a metric in memory. Its module is loaded once; threads take turns.

    Args:
        name (`str`): One of [`METRICS`].
        inputs: Arguments of the metric's `compute`.

    Returns:
        `dict[str, float]`: name -> value.
    """
    with _ONE_AT_A_TIME:
        return _in_memory(name).compute(**inputs)


@cache
def _in_memory(name: str) -> Metric:
    return load_metric(name, keep_in_memory=True)
