"""Texts with the vectors that an index has of them: the space that a fit joins."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from .dataset_checks import require_columns
from .files import load_files
from .formats import file_name
from .teacher import TeacherEmbeddings


SAME = 0.999  # cosine of two vectors of one text: an API gives slightly different ones


def read_target_vectors(
    files: Sequence[str], text_column: str = "text", vector_column: str = "vector"
) -> tuple[dict[str, list[str]], TeacherEmbeddings]:
    """
    Read rows of text and vector, as exports of vector stores have them, into memory: name of each file -> its texts,
    and all vectors by text. A vector is a list of numbers, or a text such as `"[0.1, 0.2]"`, which pgvector gives.
    Rows without text are skipped; of equal texts, the first one counts.

    Raises:
        ValueError: if a file lacks a column, a vector is no list of numbers, is not finite, is zero or has another
            number of dims than the first one, or a text has two vectors with a cosine below 0.999. The message names
            the file and the row, counted from 1.
        OSError: if a file does not exist.
    """
    rows: dict[str, tuple[str, np.ndarray]] = {}  # text -> where it is, and its vector
    sources: dict[str, list[str]] = {}
    width = 0
    for file in files:
        dataset = load_files([file], text=[text_column], streaming=True)
        texts = sources.setdefault(file_name(file), [])
        require_columns(dataset, [text_column, vector_column], file)
        for number, row in enumerate(dataset, start=1):
            text = row[text_column] or ""
            if not text.strip():
                continue
            where = f"{file}, row {number}"
            vector = _vector(row[vector_column], f"{where}: {vector_column!r}")
            width = width or len(vector)
            if len(vector) != width:
                raise ValueError(f"{where}: the vector has {len(vector)} dims, and the first one {width}.")
            first, known = rows.setdefault(text, (where, vector))
            if known @ vector < SAME * np.linalg.norm(known) * np.linalg.norm(vector):
                raise ValueError(f"{where}: the text has another vector than in {first}: {text[:80]!r}.")
            if first == where:
                texts.append(text)
    if not rows:
        raise ValueError(f"No row of {', '.join(files)} has a text in the column {text_column!r}.")
    return sources, TeacherEmbeddings(list(rows), np.stack([vector for _, vector in rows.values()]))


def _vector(value: object, name: str) -> np.ndarray:
    """A vector in float32. Raises a ValueError that names it if it cannot be a target."""
    try:
        with np.errstate(over="ignore"):  # what is too large becomes infinite
            vector = np.asarray(json.loads(value) if isinstance(value, str) else value, np.float32)
    except (TypeError, ValueError):  # text, a dictionary, or lists of several lengths
        vector = np.zeros(0, np.float32)
    if vector.ndim != 1 or not len(vector):
        raise ValueError(f"{name} is not a list of numbers.")
    if not np.isfinite(vector).all() or not vector.any():
        raise ValueError(f"{name} {'is zero' if np.isfinite(vector).all() else 'has numbers that are not finite'}.")
    return vector
