"""A frozen teacher: it embeds a corpus once, into a cache on disk that training reads."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub import HfApi, is_offline_mode
from safetensors import safe_open
from tqdm.auto import tqdm
from transformers.utils.hub import extract_commit_hash

from ..encode.device import ComputeArguments, autocast, place
from ..encode.embedding_store import EmbeddingStore
from ..encode.identity import config_values, tokenizer_values
from ..encode.ranks import rank
from ..modeling.files_elastic import Source, weight_files
from ..models.settings import safetensors_only
from ..utils.extras import require_sentence_transformers
from ..utils.hashing import fingerprint_of, hash_of, key_of, sha256_of, weights_fingerprint


if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

DTYPES = {"float32": torch.float32, "float16": torch.float16}
ROWS_OF_A_BATCH = 1024  # texts that an interrupted run loses at most
ROWS_OF_A_FIT = 40_000  # as in the released code of IBKD


@dataclass(frozen=True)
class Teacher:
    """
    An embedding model with the settings for embedding texts. It is loaded through sentence-transformers, and only if
    there are texts to embed.

    Args:
        name_or_path (`str`): Hub id or folder of a model of sentence-transformers, or of any encoder.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        pooling (`str`, *optional*): Pooling by its name in sentence-transformers: `"mean"`, `"cls"`, ..., or
            `"pooler"`, the encoder's `pooler_output`. Default: the published pooling, or the mean. Other published
            modules stay.
        prompt (`str`, *optional*, defaults to `""`): Prompt before every text, in place of a published one.
        max_length (`int`, *optional*): Maximum length of a text in tokens. Default: the limit of the model.
        dtype (`str`, *optional*, defaults to `"float32"`): Type of the stored embeddings: `"float32"` or `"float16"`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether to run code from the model's repository.
        batch_size (`int`, *optional*, defaults to 64): Number of texts to embed at a time.
        compute ([`ComputeArguments`], *optional*): Where and how it computes. Default: as sentence-transformers does.
        model ([`~sentence_transformers.SentenceTransformer`], *optional*): The model, if in memory. It is not changed.
    """

    name_or_path: str
    revision: str | None = None
    pooling: str | None = None
    prompt: str = ""
    max_length: int | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False
    batch_size: int = 64
    compute: ComputeArguments | None = None
    model: Any = None

    @cached_property
    def commit(self) -> str:
        """The commit on the Hub, of a model that is neither in memory nor in a folder."""
        commit = extract_commit_hash(Source(self.name_or_path, self.revision).file("config.json"), None)
        if commit is None:
            raise OSError(f"The commit of the teacher {self.name_or_path!r} is unknown.")
        return commit

    def identity(self) -> str:
        """Identifies what the model embeds as, without loading it: a digest of the model in memory or of all files of
        the folder, as they are now, or the commit on the Hub."""
        if self.model is not None:
            model, encoder = self.model, self.model.transformers_model
            values = {"config": None if encoder is None else config_values(encoder.config), "dtype": str(model.dtype)}
            values |= {"tokenizer": tokenizer_values(model.tokenizer), "max_length": model.max_seq_length}
            values |= {"prompts": model.prompts, "default": model.default_prompt_name, "dims": model.truncate_dim}
            return fingerprint_of([str(model), key_of(values), weights_fingerprint(model.state_dict().items())])
        folder = Path(self.name_or_path)
        if not folder.is_dir():
            return self.commit
        parts: list[str] = []
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = file.relative_to(folder)
            if not any(part.startswith((".", "checkpoint-")) for part in name.parts):  # files of a training run
                parts += str(name), sha256_of(file)
        return fingerprint_of(parts)

    def load(self) -> SentenceTransformer:
        """Load the model with these settings. ValueError if it has no pooler, but `pooling` is that."""
        changed = self.pooling is not None or self.max_length is not None or self.compute is not None
        model, weights = copy.deepcopy(self.model) if changed else self.model, list[str]()
        if model is None:
            model, weights = self._loaded()
        if self.pooling == "pooler" and not any("pooler." in name for name in weights or model.state_dict()):
            # Of weights without a pooler, transformers would make a random one.
            raise ValueError(f"The teacher {self.name_or_path} has no pooler: choose another pooling, such as cls.")
        if self.pooling is not None:
            _set_pooling(model, self.pooling)
        if self.compute is not None and model.transformers_model is not None:
            place(model.transformers_model, self.compute)
        if self.max_length is not None:
            model.max_seq_length = self.max_length
        return model

    def _loaded(self) -> tuple[SentenceTransformer, list[str]]:
        """The model as it was published, and the names of its weights in safetensors."""
        library = require_sentence_transformers("A teacher")
        # The commit that the cache is made for: the branch may have moved since then.
        revision = None if Path(self.name_or_path).is_dir() else self.commit
        weights = _safetensors(self.name_or_path, revision)
        if revision is not None and not weights and not is_offline_mode():
            revision = _conversion(self.name_or_path, revision)
            weights = _safetensors(self.name_or_path, revision)
        model = library.SentenceTransformer(
            self.name_or_path,
            revision=revision,
            trust_remote_code=self.trust_remote_code,
            model_kwargs=safetensors_only(self.name_or_path),
            device=None if self.compute is None else str(self.compute.torch_device),
        )
        return model, weights

    def autocast(self, model: SentenceTransformer) -> AbstractContextManager[None]:
        """A context in which the loaded model computes in the type that the arguments name."""
        return autocast(model.device, None if self.compute is None else self.compute.autocast_dtype)

    def embed(self, texts: Iterable[str], cache_dir: str | Path, description: str | None = None) -> TeacherEmbeddings:
        """
        Embed texts, or read their embeddings from the cache. All processes share the work, and an interrupted run
        continues. Another teacher, setting or set of texts has another cache.

        Args:
            texts (`Iterable[str]`): Texts in any order. Each different text is embedded once.
            cache_dir (`Path`): Folder of all caches.
            description (`str`, *optional*): Text before the progress bar; `None` shows no bar.

        Raises:
            ValueError: if an embedding is not finite. The message names a text.
            OSError: if the disk is too small.
        """
        # Longest texts first, so that batches have little padding; ties by text, so that every run has the same order.
        texts = sorted(set(texts), key=lambda text: (-len(text), text))
        name = Path(self.name_or_path).name
        identity = {
            "teacher": name,
            "commit": self.identity(),
            **{setting: getattr(self, setting) for setting in ("pooling", "prompt", "max_length", "dtype")},
            "compute_dtype": None if self.compute is None else self.compute.compute_dtype,
            "texts": len(texts),
            "text_fingerprint": fingerprint_of(texts),
        }
        folder, model = Path(cache_dir) / f"{name}-{key_of(identity)}", None
        if (folder / "manifest.json").is_file():
            width = json.loads((folder / "manifest.json").read_text(encoding="utf-8")).get("width")
        else:
            model = self.load()
            width = model.encode(texts[-1:], show_progress_bar=False).shape[1]
        batches = [
            range(start, min(start + ROWS_OF_A_BATCH, len(texts))) for start in range(0, len(texts), ROWS_OF_A_BATCH)
        ]
        identity["width"] = width
        with EmbeddingStore(folder, identity, {"embeddings": width}, batches, DTYPES[self.dtype]) as store:
            missing = store.missing()
            if missing and model is None:
                model = self.load()
            quiet = description is None or rank() > 0
            for batch in tqdm(missing, description, unit=f" x {ROWS_OF_A_BATCH:,} texts", disable=quiet, leave=False):
                rows = texts[batches[batch].start : batches[batch].stop]
                store.write(batch, {"embeddings": self._encode(model, rows)})
            return TeacherEmbeddings(texts, store.read()["embeddings"])

    def _encode(self, model: Any, texts: list[str]) -> torch.Tensor:
        """Embeddings `(texts, width)` in the dtype of the cache. Raises a ValueError if one is not finite."""
        options = {"batch_size": self.batch_size, "show_progress_bar": False, "convert_to_tensor": True}
        with self.autocast(model):
            vectors = model.encode(texts, prompt=self.prompt or None, **options).to("cpu", DTYPES[self.dtype])
        wrong = (~torch.isfinite(vectors)).any(dim=1).nonzero()
        if len(wrong):
            raise ValueError(
                f"The embeddings of {len(wrong)} of {len(texts)} texts by {self.name_or_path} are not finite as "
                f"{self.dtype}, for example of {texts[int(wrong[0])][:80]!r}."
            )
        return vectors


def _set_pooling(model: SentenceTransformer, pooling: str) -> None:
    """Replace the pooling of a model, or leave it out for the encoder's `pooler_output`."""
    kind = require_sentence_transformers("A teacher").sentence_transformer.modules.Pooling
    for index, part in enumerate(list(model)):
        if isinstance(part, kind) and pooling == "pooler":
            del model[index]
            encoder: Any = model[0]
            encoder.modality_config = {"text": {"method": "forward", "method_output_name": "pooler_output"}}
            encoder.module_output_name = "sentence_embedding"
        elif isinstance(part, kind):
            model[index] = kind(part.embedding_dimension, pooling_mode=pooling)


def _safetensors(name_or_path: str, revision: str | None) -> list[str]:
    """Names of the weights in the safetensors of a folder, or of a commit on the Hub; none if it has none."""
    names: list[str] = []
    for file in weight_files(Source(name_or_path, revision)):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


def _conversion(name: str, commit: str) -> str:
    """The commit at which the Hub's bot converts the weights of a commit to safetensors; the commit itself if none."""
    api, weights = HfApi(), {}
    proposals = api.get_repo_discussions(name, author="SFconvertbot", discussion_status="open")
    for revision in (commit, *(f"refs/pr/{each.num}" for each in proposals if each.is_pull_request)):
        info = api.model_info(name, revision=revision, files_metadata=True)
        weights[info.sha] = {file.blob_id for file in info.siblings or () if file.rfilename.endswith(".bin")}
    return next((other for other in weights if other != commit and weights[other] == weights[commit]), commit)


def teacher_from(given: Any, **settings: Any) -> Teacher:
    """The [`Teacher`] that a user passes: one, or a folder, a Hub id or a model with these arguments."""
    if isinstance(given, Teacher):
        return given
    if isinstance(given, str | os.PathLike):
        return Teacher(str(given), **settings)
    name = getattr(getattr(given.transformers_model, "config", None), "name_or_path", "")
    return Teacher(name or "teacher", model=given, **settings)


class TeacherEmbeddings:
    """
    A teacher's embeddings, looked up by text, so that teacher and student need not share a tokenizer. Worker processes
    of a data loader share the memory-mapped file.

    Args:
        texts (`Sequence[str]`): Texts without duplicates.
        vectors (`np.ndarray` of shape `(texts, width)`): Embeddings of the texts, in memory or in a memory-mapped
            file `.npy`.
    """

    def __init__(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        self._file = str(vectors.filename) if isinstance(vectors, np.memmap) else None
        if self._file is None:
            self.vectors = vectors
        keys = np.fromiter(map(hash_of, texts), np.int64, len(texts))
        self._rows = keys.argsort()
        self._keys = keys[self._rows]

    @classmethod
    def write(cls, texts: Sequence[str], vectors: torch.Tensor, file: str | Path) -> TeacherEmbeddings:
        """
        Keep embeddings that you have, of any model, as a teacher.

        Args:
            texts (`Sequence[str]`): Texts without duplicates.
            vectors (`torch.Tensor` of shape `(texts, width)`): Embeddings of the texts.
            file (`Path`): File `.npy` to write, which the teacher reads from.
        """
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        np.save(file, vectors.numpy(force=True))
        return cls(texts, np.load(file, mmap_mode="r"))

    @cached_property
    def vectors(self) -> np.ndarray:
        """All embeddings `(texts, width)`. Changes stay in memory: torch warns of read-only arrays."""
        return np.load(str(self._file), mmap_mode="c")

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "vectors" or not self._file}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def width(self) -> int:
        """Number of dims of an embedding."""
        return self.vectors.shape[1]

    def of(self, texts: Sequence[str]) -> torch.Tensor:
        """The embeddings `(len(texts), width)` of texts, in float32. ValueError if a text is not in the cache."""
        keys = np.fromiter(map(hash_of, texts), np.int64, len(texts))
        places = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
        absent = (self._keys[places] != keys).nonzero()[0]
        if len(absent):
            raise ValueError(f"The teacher has no embedding of {texts[absent[0]][:80]!r}: embed all texts first.")
        return torch.from_numpy(self.vectors[self._rows[places]].astype(np.float32))

    def checked(self, texts: Sequence[str]) -> torch.Tensor:
        """As [`~TeacherEmbeddings.of`], and a ValueError that names a text if its embedding is zero or not finite."""
        vectors = self.of(texts)
        wrong = (~vectors.isfinite().all(dim=1) | ~vectors.any(dim=1)).nonzero()
        if len(wrong):
            raise ValueError(f"The teacher's embedding is zero or not finite: {texts[int(wrong[0])][:80]!r}.")
        return vectors

    def principal_components(self, dim: int) -> torch.Tensor:
        """
        The first principal components of the embeddings `(dim, width)`, orthonormal and by descending variance, to
        which HPD compresses its teacher ([2203.07687](https://huggingface.co/papers/2203.07687)). Of 80,000 embeddings
        or more, an evenly spaced sample of at least 40,000 is used.
        """
        step = max(1, len(self) // ROWS_OF_A_FIT)
        covariance = torch.cov(torch.from_numpy(self.vectors[::step].astype(np.float64)).T)
        return torch.linalg.eigh(covariance)[1].flip(1)[:, :dim].T.float()
