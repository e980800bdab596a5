"""
What makes an encoder an embedding model: pooling, projection, normalisation, prompts, longest text. The files of
sentence-transformers beside the encoder hold them. Only this module reads and writes these, without the library.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils.hub import cached_file


logger = logging.getLogger(__name__)
Pooling = Literal["mean", "cls", "lasttoken"]
POOLINGS = ("mean", "cls", "lasttoken")
MODULES_FILE = "modules.json"
INDEX_FILE = "model.safetensors.index.json"
ENCODER_FILE, SIMILARITY_FILE = "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING_FOLDER, PROJECTION_FOLDER = "1_Pooling", "2_Dense"
# The names that the first of them has had, in the order in which sentence-transformers looks for them.
ENCODER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Entries that only some versions write and read. Without them, these values hold.
STANDARD: dict[str, Any] = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
    "model_type": "SentenceTransformer",
}
# Modules that are read and written, in this order; the first two are required.
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
# Poolings of sentence-transformers -> their switches in its files.
SWITCHES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@dataclass(frozen=True)
class EmbeddingSettings:
    """
    How hidden states of tokens become the embedding of a text.

    Args:
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, `"cls"` or `"lasttoken"`.
        projection (`nn.Linear`, *optional*): Map of the pooled embedding.
        normalize (`bool`, *optional*, defaults to `False`): Whether embeddings are L2-normalised in the end.
        prompts (`Mapping[str, str]`, *optional*): Name (`"query"`, `"document"`, ...) -> prompt before a text.
        default_prompt_name (`str`, *optional*): Name of the prompt that `SentenceTransformer.encode` puts before texts
            unless it is told otherwise.
        max_length (`int`, *optional*): Longest text in tokens; longer texts are truncated. `None` if it is unknown.
        similarity (`str`, *optional*, defaults to `"cosine"`): How embeddings are compared, by its name in
            sentence-transformers.
        others (`Mapping[str, Mapping]`, *optional*): File -> entries that are none of these, such as `do_lower_case`.
            They are written as they were.

    Raises:
        ValueError: if the pooling is unknown.

    ```python
    >>> settings = EmbeddingSettings.read("BAAI/bge-small-en-v1.5")  # doctest: +SKIP
    >>> settings.pooling, settings.normalize, settings.max_length  # doctest: +SKIP
    ('cls', True, 512)
    ```
    """

    pooling: Pooling = "mean"
    projection: nn.Linear | None = None
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_length: int | None = None
    similarity: str = "cosine"
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling={self.pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")

    @classmethod
    def read(cls, name_or_path: str | Path, **hub_options: Any) -> EmbeddingSettings:
        """As [`~EmbeddingSettings.find`]; the defaults if the encoder was not published as an embedding model."""
        return cls.find(name_or_path, **hub_options) or cls()

    @classmethod
    def find(cls, name_or_path: str | Path, **hub_options: Any) -> EmbeddingSettings | None:
        """
        The settings that an encoder was published with, by any version of sentence-transformers.

        Args:
            name_or_path (`str`): Folder or Hub id.
            hub_options (*optional*): Options for the Hub, such as `revision`.

        Returns:
            [`EmbeddingSettings`], or `None` if it has no `modules.json`.

        Raises:
            ValueError: if it has another pooling, or modules other than a pooling, linear maps without activation, and
                normalisation; or if a file has another form, or names a folder outside of the model's.
            OSError: if the files cannot be read.
        """
        folder = _Files(str(name_or_path), hub_options)
        modules = folder.json(MODULES_FILE, required=False)
        if modules is None:
            return None
        paths = _paths_by_kind(str(name_or_path), _modules_in(str(name_or_path), modules))
        # Files without one of these are older than it.
        found = (folder.json(name, required=False) for name in ENCODER_FILES)
        encoder: dict[str, Any] = next((content for content in found if content is not None), {})
        similarity = folder.json(SIMILARITY_FILE, required=False) or {}
        prompts = {name: prompt or "" for name, prompt in _value(similarity, "prompts", dict, {}).items()}
        if not all(isinstance(prompt, str) for prompt in prompts.values()):
            raise ValueError(f"{SIMILARITY_FILE} of {name_or_path} has a prompt that is not text.")
        pooling = folder.json(f"{paths['Pooling']}/config.json")
        if not pooling.get("include_prompt", True) and any(prompts.values()):
            raise ValueError(f"{name_or_path} leaves prompts out of its pooling, which is not supported.")
        return cls(
            pooling=_pooling_of(str(name_or_path), pooling),
            projection=_in_a_row([_projection_of(folder, path) for path in paths["Dense"]]),
            normalize="Normalize" in paths,
            prompts=prompts,
            default_prompt_name=_value(similarity, "default_prompt_name", str),
            max_length=_value(encoder, "max_seq_length", int),
            similarity=_value(similarity, "similarity_fn_name", str, "cosine"),
            others={
                ENCODER_FILE: _unnamed(encoder, "max_seq_length"),
                SIMILARITY_FILE: _unnamed(
                    similarity, "prompts", "default_prompt_name", "similarity_fn_name", "__version__"
                ),
            },
        )

    @classmethod
    def of(cls, encoder: Any) -> EmbeddingSettings | None:
        """
        The settings of an encoder in memory: those that it was converted with, or else those of the folder or Hub id
        that it was loaded from, as its config says.

        Args:
            encoder ([`~transformers.PreTrainedModel`]): An encoder without a head.

        Returns:
            [`EmbeddingSettings`], or `None` if there are none. Where the files cannot be read, it says so in the log.

        Raises:
            ValueError: as [`~EmbeddingSettings.find`].
        """
        if (own := getattr(encoder, "embedding_settings", None)) is not None:
            return own
        name, revision = encoder.config.name_or_path, getattr(encoder.config, "_commit_hash", None)
        if not name or not (Path(name).is_dir() or hub_id(name)):
            return None  # new weights, or a folder that is gone
        try:
            return cls.find(name, revision=revision)
        except OSError as error:
            reason = str(error).strip().partition("\n")[0]
            logger.warning(f"The pooling and prompts of {name} are unknown, and taken to be a mean and none: {reason}")
            return None

    @classmethod
    def of_sentence_transformer(cls, model: Any) -> EmbeddingSettings:
        """
        The settings of a [`~sentence_transformers.SentenceTransformer`].

        Raises:
            ValueError: as [`~EmbeddingSettings.find`].
        """
        parts = _paths_by_kind("The model", [(type(part).__name__, part) for part in model])
        pooling = parts["Pooling"]
        if not pooling.include_prompt and any(model.prompts.values()):
            raise ValueError("The model leaves prompts out of its pooling, which is not supported.")
        for dense in parts["Dense"]:
            if not isinstance(dense.activation_function, nn.Identity) or getattr(dense, "use_residual", False):
                raise ValueError("The Dense module of the model is not one linear map without activation.")
        return cls(
            pooling=_pooling_of("The model", pooling.get_config_dict()),
            projection=_in_a_row([dense.linear for dense in parts["Dense"]]),
            normalize="Normalize" in parts,
            prompts={name: prompt or "" for name, prompt in model.prompts.items()},
            default_prompt_name=model.default_prompt_name,
            max_length=model.max_seq_length,
            similarity=str(model.similarity_fn_name or "cosine"),
            others={ENCODER_FILE: {"do_lower_case": bool(getattr(parts["Transformer"], "do_lower_case", False))}},
        )

    def write(self, folder: str | Path, *, width: int) -> list[str]:
        """
        Write the modules beside an encoder and its tokenizer. The files have the form of sentence-transformers before
        version 5.4, which every version reads, and which is the only one that vLLM reads.

        Args:
            folder (`Path`): Folder of the encoder.
            width (`int`): Dims of the hidden states that the checkpoint gives by default.

        Returns:
            `list[str]`: The files, relative to the folder.

        Raises:
            ValueError: if the maximum length is unknown, or the projection does not fit the hidden size.
        """
        projection, folder = self.projection, Path(folder)
        if self.max_length is None:
            raise ValueError("The longest text is unknown: set max_length.")
        if projection is not None and projection.in_features != width:
            raise ValueError(f"The projection takes {projection.in_features} dims, and the encoder gives {width}.")
        files: dict[str, Any] = {
            # Most tokenizers lower the case themselves, but vLLM ignores the file without both entries.
            ENCODER_FILE: {
                "do_lower_case": False,
                **self.others.get(ENCODER_FILE, {}),
                "max_seq_length": self.max_length,
            },
            SIMILARITY_FILE: {
                **self.others.get(SIMILARITY_FILE, {}),
                "prompts": dict(self.prompts),
                "default_prompt_name": self.default_prompt_name,
                "similarity_fn_name": self.similarity,
            },
            f"{POOLING_FOLDER}/config.json": {
                "word_embedding_dimension": width,
                **{switch: name == self.pooling for name, switch in SWITCHES.items()},
                "include_prompt": True,
            },
        }
        paths = {"Transformer": "", "Pooling": POOLING_FOLDER}
        if projection is not None:
            paths["Dense"] = PROJECTION_FOLDER
            files[f"{PROJECTION_FOLDER}/config.json"] = _dense_config(projection)
        if self.normalize:
            paths["Normalize"] = f"{len(paths)}_Normalize"  # it has no files
        files[MODULES_FILE] = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, path) in enumerate(paths.items())
        ]
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if projection is None:
            return list(files)
        weights = f"{PROJECTION_FOLDER}/model.safetensors"
        named = projection.named_parameters()
        save_file({f"linear.{name}": tensor.detach().cpu().contiguous() for name, tensor in named}, folder / weights)
        return [*files, weights]


@dataclass(frozen=True)
class _Files:
    """The files of a folder, or of a repository on the Hub."""

    name_or_path: str
    hub_options: Mapping[str, Any]

    def json(self, file: str, *, required: bool = True) -> Any:
        """The content of a JSON file; `None` if it is missing and not required."""
        found = cached_file(
            self.name_or_path, file, _raise_exceptions_for_missing_entries=required, **self.hub_options
        )
        return None if found is None else read_json(found, list if file == MODULES_FILE else dict)


def read_json(file: str | Path, kind: type) -> Any:
    """
    The content of a JSON file.

    Raises:
        ValueError: if it is not JSON, or not of this kind (`dict` or `list`).
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(content, kind):
        raise ValueError(f"{file} is not a JSON {'object' if kind is dict else 'array'}.")
    return content


def _unnamed(content: Mapping[str, Any], *named: str) -> dict[str, Any]:
    """The entries of a file of sentence-transformers that are neither among these nor of a newer version's form."""
    return {
        name: value
        for name, value in content.items()
        if name not in named and not (name in STANDARD and value == STANDARD[name])
    }


def _value(content: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """An entry of a JSON object; the default where it is missing or null. Raises a ValueError on another type."""
    value = content.get(name)
    if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise ValueError(f"{name}={value!r} must be of type {kind.__name__}.")
    return default if value is None else value


def shards_of(folder: str | Path) -> set[str]:
    """
    The files that the index of a checkpoint's weights names; none if it has no index.

    Raises:
        ValueError: if the index has another form, or names a file outside of the folder.
    """
    file = Path(folder, INDEX_FILE)
    if not file.is_file():
        return set()
    shards = read_json(file, dict).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ValueError(f"{file} must have a weight_map of tensors to files.")
    if outside := [shard for shard in shards.values() if not re.fullmatch(r"[\w-][\w.-]*", shard)]:
        raise ValueError(f"{file} names {outside[0]!r}, which is not a file of its folder.")
    return set(shards.values())


def safetensors_only(name_or_path: str | os.PathLike[str], subfolder: str = "") -> dict[str, Any]:
    """
    The arguments of `from_pretrained` with which weights are read from safetensors in the model's own folder. A
    repository on the Hub has no files outside of it.

    Raises:
        ValueError: as [`shards_of`], or if a file of weights in the folder is broken or incomplete.
    """
    shards_of(Path(name_or_path, subfolder))
    for file in Path(name_or_path, subfolder).glob("model*.safetensors"):
        check_weights(file)
    return {"use_safetensors": True}


def check_weights(file: str | Path) -> None:
    """Raise a ValueError if a file is not whole safetensors. Reads its header only."""
    try:
        with safe_open(file, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read; it may be incomplete: {error}.") from error


def _modules_in(name: str, modules: list[Any]) -> list[tuple[str, str]]:
    """Kind and path of each module in a [`MODULES_FILE`]. Raises a ValueError if a path leads out of the folder."""
    found = []
    for module in modules:
        kind, path = (module.get(key) if isinstance(module, dict) else None for key in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ValueError(f"{MODULES_FILE} of {name} has a module without type and path.")
        if path not in ("", ".") and not re.fullmatch(r"[\w-][\w.-]*/?", path):
            raise ValueError(f"{MODULES_FILE} of {name} names {path!r}, which is not a folder of the model.")
        found.append((kind.rpartition(".")[2], path))
    return found


def _paths_by_kind(name: str, modules: list[tuple[str, Any]]) -> dict[str, Any]:
    """Kind of module -> its path or the module; a list for `"Dense"`. Raises a ValueError if there are others than
    [`KINDS`], in order."""
    kinds, dense = [kind for kind, _ in modules], [its for kind, its in modules if kind == "Dense"]
    if kinds[:2] != list(KINDS[:2]) or kinds != [
        kind for kind in KINDS for _ in range(len(dense) if kind == "Dense" else kind in kinds)
    ]:
        raise ValueError(
            f"{name} has the modules {', '.join(kinds)}. Supported are {' and '.join(KINDS[:2])}, then {KINDS[2]} and "
            f"at most one {KINDS[3]}."
        )
    return {**dict(modules), "Dense": dense}


def _in_a_row(linears: list[nn.Linear]) -> nn.Linear | None:
    """One linear map in place of several. Raises a ValueError if one of several has a bias, or they do not fit."""
    if len(linears) < 2:
        return linears[0] if linears else None
    fit = all(one.out_features == other.in_features for one, other in pairwise(linears))
    if not fit or any(linear.bias is not None for linear in linears):
        raise ValueError("A row of Dense modules with biases or other sizes is not one linear map without activation.")
    weight = torch.linalg.multi_dot([linear.weight.detach().double() for linear in reversed(linears)])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weight.float())
    return joined


def _pooling_of(name: str, config: Mapping[str, Any]) -> Pooling:
    """The pooling in a config of any version. Raises a ValueError if it is not one of [`POOLINGS`]."""
    # Older files have one switch per pooling; mean if all are off.
    modes = config.get("pooling_mode", [mode for mode, switch in SWITCHES.items() if config.get(switch)] or "mean")
    modes = modes if isinstance(modes, list | tuple) else [modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        found, legal = " + ".join(map(str, modes)), ", ".join(POOLINGS)
        raise ValueError(f"{name} was published with the pooling {found!r}; legal values: {legal}.")
    return cast("Pooling", modes[0])


def _dense_config(linear: nn.Linear) -> dict[str, Any]:
    """The config of an affine map without activation."""
    return {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "activation_function": "torch.nn.modules.linear.Identity",
    }


def _projection_of(folder: _Files, path: str) -> nn.Linear:
    """The map in a module. Raises a ValueError if it has an activation or a residual."""
    config = folder.json(f"{path}/config.json")
    inputs, outputs = (_value(config, name, int, 0) for name in ("in_features", "out_features"))
    if min(inputs, outputs) < 1:
        raise ValueError(f"The module {path} of {folder.name_or_path} has no in_features and out_features above 0.")
    linear = nn.Linear(inputs, outputs, bias=_value(config, "bias", bool, True), device="meta")
    plain = _dense_config(linear) | {"use_residual": False}
    if any(config.get(name, plain[name]) != plain[name] for name in plain):
        raise ValueError(f"The module {path} of {folder.name_or_path} is not one linear map without activation.")
    file = cached_file(folder.name_or_path, f"{path}/model.safetensors", **folder.hub_options)
    try:
        tensors = load_file(file)
        named = {name.removeprefix("linear."): tensor.float() for name, tensor in tensors.items()}
        linear.load_state_dict(named, assign=True)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}.") from error
    return linear


def hub_id(name: str | None) -> str | None:
    """Return `name` if it is a Hub id, else `None`: a local folder means nothing on other machines."""
    if not name or os.path.exists(name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    return name
