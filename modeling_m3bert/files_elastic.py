"""
Elastic encoders, 2 of 5: the files of a repository.

A repository is its source and a little more: `config.json` of the source with the key `elastic`, the source's weights
as they are, `elastic/weights.safetensors` with exits, refitted matrices and table (the *parts*), the files of
sentence-transformers as they were, and these five files, `*_elastic.py`, as remote code.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import create_branch, create_repo, upload_folder
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging
from transformers.utils.hub import cached_file, extract_commit_hash
from transformers.utils.peft_utils import find_adapter_config_file

from .configuration_elastic import SIZE, Elasticity, entries, resolve_size


CODE_FILES = tuple(f"{name}_elastic.py" for name in ("configuration", "files", "parts", "loading", "modeling"))
PARTS_FOLDER, PARTS_FILE = "elastic", "elastic/weights.safetensors"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZE_TYPE = "elastic_size"  # model type of a saved size: without this code, it must not load as the native model
HUB_OPTIONS = ("cache_dir", "local_files_only", "token", "revision", "subfolder")
CODE_OPTIONS = ("code_revision", "trust_remote_code")
MODEL_OPTIONS = ("dtype", "torch_dtype", "quantization_config")  # a config would keep them: "auto" is no type
# All heads that encoders of transformers have. One that is not named here would get all layers, some of them random.
HEADS = (
    *("CausalLM", "MaskedLM", "MultipleChoice", "NextSentencePrediction", "PreTraining", "QuestionAnswering"),
    *("SequenceClassification", "TokenClassification"),
)
AUTO_CLASSES = {
    "AutoConfig": "ElasticConfig",
    "AutoModel": "ElasticModel",
    "AutoModelForTextEncoding": "ElasticModel",
    **{f"AutoModelFor{head}": f"ElasticFor{head}" for head in HEADS},
}
logger: Any = logging.get_logger(__name__)
DYNAMIC_MODULES = "transformers_modules."  # package of remote code
FOLDER = r"[\w-][\w.-]*/?"  # name of a module's folder, which does not lead out of the repository
# Files of sentence-transformers at the root of a repository, under all names that it has had.
SETTINGS_FILES = ("modules.json", "config_sentence_transformers.json") + tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True)
class Source:
    """
    How a model was loaded: a Hub id, or the absolute path of a folder, and options of `from_pretrained`. All files and
    all code of it are found through this, so they are of one commit, `revision`; weights and exits are of one
    `variant`. `settings` are the files of sentence-transformers, by name, when it was loaded. The token is neither
    printed nor pickled.
    """

    name: str
    revision: str | None = None
    code_revision: str | None = None
    trust_remote_code: bool = False
    cache_dir: str | os.PathLike[str] | None = None
    token: str | bool | None = field(default=None, repr=False, compare=False)
    local_files_only: bool = False
    subfolder: str = ""
    variant: str | None = None
    settings: Mapping[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def at(cls, name: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> Source:
        """The source of a name, at the commit of its revision. Raises an OSError if it cannot be reached."""
        given = (*HUB_OPTIONS, *CODE_OPTIONS, "variant")
        options = {key: options[key] for key in given if options.get(key) is not None}
        if __name__.startswith(DYNAMIC_MODULES):  # auto classes load this file at code_revision, and drop the option
            options["trust_remote_code"] = True
            *repository, commit, _ = __name__.removeprefix(DYNAMIC_MODULES).split(".")
            repository = [part.replace("_hyphen_", "-").replace("_dot_", ".").lstrip("_") for part in repository]
            if "/".join(repository) == name:
                options.setdefault("code_revision", commit)
        if not name or os.path.isdir(name):
            options.pop("revision", None)
            return cls(os.path.abspath(name) if name else "", **options)
        source = cls(str(name), **options)
        commit = extract_commit_hash(source.file("config.json"), None)
        return source if commit is None else replace(source, revision=commit)

    @property
    def hub(self) -> dict[str, Any]:
        """The options that find the same files."""
        return {key: value for key in HUB_OPTIONS if (value := getattr(self, key)) is not None}

    @property
    def options(self) -> dict[str, Any]:
        """The options of an auto class that find the same files and code."""
        code = {key: value for key in CODE_OPTIONS if (value := getattr(self, key))}
        return {**self.hub, **code}

    def file(self, name: str, **flags: Any) -> str | None:
        """Path of a file, `None` if there is none. Takes the flags of `cached_file`."""
        flags = {"_raise_exceptions_for_missing_entries": False, **flags}
        return cached_file(self.name, name, **self.hub, **flags) if self.name else None

    def dynamic_class(self, reference: str) -> Any:
        """A class of the model's own code. Raises a ValueError if this may not run."""
        if not self.trust_remote_code:
            raise ValueError(f"{self.name} runs its own code, {reference}: read it, then pass trust_remote_code=True.")
        return get_class_from_dynamic_module(reference, self.name, code_revision=self.code_revision, **self.hub)

    def config(self, kind: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The config, read by a class, and the options that are left for the model."""
        for_model = {key: options[key] for key in (*MODEL_OPTIONS, "force_download") if key in options}
        others = {key: value for key, value in options.items() if key not in MODEL_OPTIONS}
        config, unused = kind.from_pretrained(self.name, return_unused_kwargs=True, **{**others, **self.options})
        return config, {**unused, **self.hub, **for_model}

    def with_settings(self) -> Source:
        """With the files of sentence-transformers, as they are now: none without a `modules.json`."""

        def read(*names: str) -> dict[str, bytes]:
            files = ((name, self.file(name)) for name in names)
            return {name: Path(file).read_bytes() for name, file in files if file is not None}

        if not (files := read(SETTINGS_FILES[0])):
            return self
        files |= read(SETTINGS_FILES[1]) | next(filter(None, map(read, SETTINGS_FILES[2:])), {})
        try:
            paths = [str(module.get("path")) for module in json.loads(files[SETTINGS_FILES[0]])]
        except (ValueError, AttributeError, TypeError):  # EmbeddingSettings refuses the file, and encoders load
            paths = []
        folders = [path.rstrip("/") for path in paths if re.fullmatch(FOLDER, path)]
        names = [f"{folder}/{name}" for folder in folders for name in ("config.json", WEIGHTS)]
        return replace(self, settings={**files, **read(*names)})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "token": None}

    def __deepcopy__(self, memo: object) -> Source:
        return self


def source_of(encoder: PreTrainedModel) -> Source:
    """How an encoder was loaded. If another library has loaded it, only its name is known, and the files of the newest
    commit are read. If they cannot be reached, there are no settings, which is logged."""
    if "loaded_from" in encoder.__dict__:
        return encoder.loaded_from
    name = encoder.config.name_or_path
    try:
        return replace(Source.at(name, {}).with_settings(), revision=None)
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        logger.warning_once(
            f"The pooling and prompts of {name} are unknown, and taken to be a mean and none: {reason}"
        )
        return Source(name)


# Weights and parts


def of_variant(file: str, variant: str | None) -> str:
    """The name of a file of weights in a variant, such as `model.fp16.safetensors`, as the library has it."""
    start, _, end = file.rpartition(".")
    return file if variant is None else f"{start}.{variant}.{end}"


def shards_in(index: str | Path | None) -> list[str]:
    """The files that the index of sharded weights names; none if there is no index."""
    if index is None or not Path(index).is_file():
        return []
    return sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))


def weight_files(source: Source) -> list[str]:
    """The files that the library reads the weights of a folder or repository from: one, or those that its index
    names. Files of other variants are left out."""
    if whole := source.file(of_variant(WEIGHTS, source.variant)):
        return [whole]
    shards = shards_in(source.file(of_variant(INDEX, source.variant)))
    files = (source.file(shard, _raise_exceptions_for_missing_entries=True) for shard in shards)
    return [file for file in files if file is not None]


def fingerprint_of(files: Iterable[str | Path]) -> str:
    """Digest of the names, types and shapes of all tensors in files, and of the first 64 values of each."""
    digest = sha256()
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_slice(name)
                shape = tensor.get_shape()
                row = tensor[:1] if shape else tensors.get_tensor(name)[None]
                digest.update(f"{name} {tensor.get_dtype()} {shape}".encode())
                digest.update(row.flatten()[:64].float().numpy().tobytes())
    return digest.hexdigest()


def read_parts(source: Source, elastic: Elasticity) -> dict[str, torch.Tensor]:
    """The parts of some depths, by their names in the file; none if there is no file. Raises a ValueError if the file
    is broken or incomplete, or was made for other weights than those beside it."""
    file = source.file(of_variant(PARTS_FILE, source.variant))
    if file is None:
        return {}
    try:
        with safe_open(file, "pt") as stored:
            made_for = (stored.metadata() or {}).get("weights")
            if made_for is not None and made_for != fingerprint_of(weight_files(source)):
                raise ValueError(
                    f"The weights of {source.name} have changed since its exits and table were fitted: fit them again "
                    "(m3bert fit)."
                )
            tensors = {name: stored.get_tensor(name) for name in filter(elastic.owns, stored.keys())}
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read; it may be incomplete: {error}.") from error
    for depth in elastic.refitted or ():
        if not any(name.startswith(f"paths.{depth}.") for name in tensors):
            raise ValueError(f"{file}: the refitted matrices of depth {depth} are missing.")
    return tensors


def write_parts(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, exact: bool = False, variant: str | None = None
) -> None:
    """Write the tensors of [`ElasticParts`] beside the weights that they were made for, which are in the folder.
    Unless `exact`, the table becomes float16."""
    file = folder / of_variant(PARTS_FILE, variant)
    if not tensors:
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = {name.replace("table.weight", "table"): value.detach().cpu() for name, value in tensors.items()}
    if "table" in parts and not exact:
        parts["table"] = parts["table"].half()
    metadata = {"format": "pt", "weights": fingerprint_of(weight_files(Source(str(folder), variant=variant)))}
    save_file({name: value.contiguous() for name, value in parts.items()}, file, metadata)


def plain_if_lost(config: PretrainedConfig, source: Source, asked: Mapping[str, Any]) -> PretrainedConfig:
    """The config of the plain encoder, with a warning, if the file of the parts that a config names is not there. This
    happens after a save by the source's class. A saved size cannot fall back, so it is left as it is. Raises a
    ValueError if `asked`, an `output_layer` or an `output_dim`, is less than all of a plain encoder."""
    elastic, file = entries(config), of_variant(PARTS_FILE, source.variant)
    if Elasticity.of(config).has_tensors and "source_layers" not in elastic and not source.file(file):
        warnings.warn(f"{source.name} has no {file}, so it is the plain encoder, at its full size.", stacklevel=2)
        config = copy.deepcopy(config)
        config.elastic, config.auto_map = None, elastic.get("source_auto_map") or {}
        for option in SIZE:
            vars(config).pop(option, None)
    full = config.num_hidden_layers, config.hidden_size
    if not entries(config) and (size := resolve_size(config, *map(asked.get, SIZE))) != full:
        raise ValueError(f"{source.name} has one size, {full[0]} layers and {full[1]} dims, not {size}.")
    return config


# What is written beside the weights


def add_code(folder: Path, *, native: bool) -> None:
    """Put this code beside the config of an elastic model that is no m3BERT, and name it there. Unless the folder
    loads without this code, as the `native` model, its model type is one that needs the code, so that a size never
    loads without its exit."""
    file = folder / "config.json"
    values = json.loads(file.read_text("utf-8"))
    elastic = values["elastic"]
    classes = {auto: f"modeling_elastic.{name}" for auto, name in AUTO_CLASSES.items()}
    values["auto_map"] = {**(elastic.get("source_auto_map") or {}), **classes}
    elastic["model_type"] = elastic.get("model_type") or values["model_type"]
    values["model_type"] = elastic["model_type"] if native else SIZE_TYPE
    if not native and "source" in elastic:
        depth = len(elastic["source_layers"])
        elastic["depths"] = {str(depth): elastic["source_layers"]}
        values |= {**elastic.pop("source"), "output_layer": depth}
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in CODE_FILES:
        shutil.copyfile(Path(__file__).with_name(name), folder / name)


def write_settings(encoder: PreTrainedModel, folder: Path) -> None:
    """Write the settings of sentence-transformers (pooling, prompts, ...) that an encoder was loaded with, unless the
    folder has its own: the library writes its config before the encoder, and `modules.json` in the end."""
    if any((folder / name).exists() for name in SETTINGS_FILES[:2]):
        return
    dim, width = resolve_size(encoder.config)[1], encoder.config.hidden_size
    source = encoder.__dict__.get("loaded_from", Source(""))  # new or converted weights have none
    for name, content in source.settings.items():
        if dim < width and name.endswith("/config.json"):
            values = json.loads(content)
            sizes = {key: dim for key in ("word_embedding_dimension", "embedding_dimension") if key in values}
            content = json.dumps({**values, **sizes}, indent=2).encode() if sizes else content
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def trained_size(adapter: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The size that an adapter was trained at, as its config has it; empty if it does not say."""
    file = find_adapter_config_file(adapter, **options)
    values = {} if file is None else json.loads(Path(file).read_text("utf-8"))
    return (values.get("auto_mapping") or {}).get("elastic", {})


@contextmanager
def uploading(folder: Path, repo_id: str, private: bool | None = None, **options: Any) -> Iterator[None]:
    """Upload the files of a folder that are written meanwhile, to a repository on the Hub, which is made if there is
    none."""

    def times() -> dict[str, int]:
        return {file.relative_to(folder).as_posix(): file.stat().st_mtime_ns for file in folder.rglob("*")}

    before = times()
    yield
    written = [name for name, time in times().items() if before.get(name) != time]
    revision, token = options.get("revision"), options.get("token")
    repo_id = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    if revision is not None:
        create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=written, **options)
