"""The metrics as modules of the library `evaluate`, loaded from this package without network access."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluate


FOLDER = Path(__file__).parent
METRICS = tuple(sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__"))


def load_metric(name: str, **options: Any) -> evaluate.Metric:
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
    return evaluate.load(str(FOLDER / f"{name}.py"), **options)
