"""
What makes an encoder an embedding model: pooling, projection, normalisation, prompts, longest text. The files of
sentence-transformers beside the encoder hold them. Only this module reads and writes these, without the library.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from tokenizers.normalizers import Lowercase, Sequence
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from ..modeling.files_elastic import FOLDER, INDEX, SETTINGS_FILES, WEIGHTS, Source, source_of
from ..utils.typed import json_of, read_json


Pooling = Literal["mean", "cls", "lasttoken"]
POOLINGS = ("mean", "cls", "lasttoken")
MODULES_FILE, SIMILARITY_FILE, *ENCODER_FILES = SETTINGS_FILES
POOLING_FOLDER, PROJECTION_FOLDER = "1_Pooling", "2_Dense"
IDENTITY = "torch.nn.modules.linear.Identity"
# Poolings of sentence-transformers -> their switches in its files.
SWITCHES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
# Entries of the encoder's module that change no vectors. Of others, only empty ones can be kept.
HARMLESS = {"do_lower_case", "max_seq_length", "transformer_task", "modality_config", "module_output_name"}
HARMLESS |= {"unpad_inputs", "model_args", "model_kwargs"}  # of the model, which is loaded in its own way
OF_TOKENS = {"query_length", "document_length", "query_expansion"}  # of late interaction, which are kept as they are
Module = tuple[str, Mapping[str, Any], nn.Linear | None]  # kind, config, and the map of a Dense module


@dataclass(frozen=True)
class EmbeddingSettings:
    """
    The way from hidden states of tokens to the embedding of a text.

    Args:
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, `"cls"` or `"lasttoken"`.
        projection (`nn.Linear`, *optional*): Map of the pooled embedding.
        normalize (`bool`, *optional*, defaults to `False`): Whether embeddings are L2-normalised in the end.
        prompts (`Mapping[str, str]`, *optional*): Name (`"query"`, `"document"`, ...) -> prompt before a text.
        default_prompt_name (`str`, *optional*): Name of the prompt that `SentenceTransformer.encode` puts first.
        max_length (`int`, *optional*): Longest text in tokens; longer texts are truncated. `None` if it is unknown.
        similarity (`str`, *optional*, defaults to `"cosine"`): How sentence-transformers compares them.
        do_lower_case (`bool`, *optional*, defaults to `False`): Whether the tokenizer lower-cases texts.
        token_widths (`tuple[int, int]`, *optional*): Of an encoder for late interaction, which has no pooling: the
            dims that its Dense modules read and give for each token.

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
    do_lower_case: bool = False
    token_widths: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling={self.pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")

    @property
    def is_late(self) -> bool:
        """Whether it is for late interaction, with a vector per token."""
        return self.token_widths is not None

    @property
    def used_prompts(self) -> dict[str, str]:
        """Name -> prompt of those of queries, of documents, and by default of other texts, unless they are empty."""
        names = ("query", "document", self.default_prompt_name)
        return {name: prompt for name, prompt in self.prompts.items() if prompt and name in names}

    @classmethod
    def read(cls, name_or_path: str | Path, **hub_options: Any) -> EmbeddingSettings:
        """As [`~EmbeddingSettings.find`]; the defaults if the encoder was not published as an embedding model."""
        return cls.find(name_or_path, **hub_options) or cls()

    @classmethod
    def find(cls, name_or_path: str | Path, **hub_options: Any) -> EmbeddingSettings | None:
        """
        The settings that an encoder in a folder or on the Hub was published with, by any version of
        sentence-transformers; `None` if it has no `modules.json`. Options for the Hub are such as `revision`.

        Raises:
            ValueError: if it has another pooling, or modules other than a pooling, linear maps without activation, and
                normalisation; or if a file is broken, or names a folder outside of the model's.
            OSError: if the files cannot be read.
        """
        return cls.of_source(Source.at(name_or_path, hub_options).with_settings())

    @classmethod
    def of_source(cls, source: Source, *, late: bool = False) -> EmbeddingSettings | None:
        """As [`~EmbeddingSettings.find`], from the files that were read when a model was loaded. With `late`, also
        those of an encoder for late interaction (`MultiVectorEncoder` of sentence-transformers)."""
        name, files = source.name, source.settings

        def content(file: str, kind: type = dict) -> Any:
            return json_of(files[file], f"{name}/{file}", kind) if file in files else None

        if (listed := content(MODULES_FILE, list)) is None:
            return None
        modules: list[Module] = []
        for module in listed:
            kind, path = module["type"].rpartition(".")[2], module["path"]
            if path not in ("", ".") and not re.fullmatch(FOLDER, path):
                raise ValueError(f"{MODULES_FILE} of {name} names {path!r}, which is not a folder of the model.")
            config, weights = (f"{path.rstrip('/')}/{file}" for file in ("config.json", WEIGHTS))
            for file in {"Pooling": (config,), "Dense": (config, weights)}.get(kind, ()):
                if file not in files:
                    raise ValueError(f"{name} has no {file}, which its {MODULES_FILE} needs.")
            linear = _read_linear(files[weights], f"{name}/{weights}") if kind == "Dense" else None
            modules.append((kind, content(config) if kind in ("Pooling", "Dense") else {}, linear))
        token_widths = _token_widths(name, modules)
        if token_widths is not None and not late:
            raise ValueError(
                f"{name} is for late interaction, with a vector per token: `m3bert fit` and `m3bert export --format "
                "native` take it, and MultiVectorEncoder of sentence-transformers embeds with it."
            )
        harmless = HARMLESS if token_widths is None else HARMLESS | OF_TOKENS
        # Files without one of these are older than it.
        encoder: dict[str, Any] = next((values for file in ENCODER_FILES if (values := content(file)) is not None), {})
        if others := [key for key, value in encoder.items() if value and key not in harmless]:
            raise ValueError(f"{name} has {others[0]}={encoder[others[0]]!r} for its encoder, which is not supported.")
        similarity = content(SIMILARITY_FILE) or {}
        return cls._of_modules(
            name,
            modules,
            prompts=similarity.get("prompts") or {},
            default_prompt_name=similarity.get("default_prompt_name"),
            max_length=encoder.get("max_seq_length"),
            similarity=similarity.get("similarity_fn_name") or "cosine",
            do_lower_case=bool(encoder.get("do_lower_case")),
            token_widths=token_widths,
        )

    @classmethod
    def of(cls, encoder: PreTrainedModel, *, late: bool = False) -> EmbeddingSettings | None:
        """The settings of an encoder in memory, without a head: those that it was converted with, or else those that
        were beside it when it was loaded ([`source_of`]), `late` as in [`of_source`]. `None` if there are none."""
        if (settings := getattr(encoder, "embedding_settings", None)) is not None:
            return settings
        return cls.of_source(source_of(encoder), late=late)

    @classmethod
    def of_sentence_transformer(cls, model: Any) -> EmbeddingSettings:
        """The settings of a [`~sentence_transformers.SentenceTransformer`]. Refuses what [`find`] refuses."""
        modules: list[Module] = []
        for module in model:
            kind = type(module).__name__
            config = module.get_config_dict() if kind in ("Pooling", "Dense") else {}
            modules.append((kind, config, getattr(module, "linear", None)))
        return cls._of_modules(
            "The model",
            modules,
            prompts=model.prompts,
            default_prompt_name=model.default_prompt_name,
            max_length=model.max_seq_length,
            similarity=str(model.similarity_fn_name or "cosine"),
            do_lower_case=bool(getattr(model[0], "do_lower_case", False)),
        )

    @classmethod
    def _of_modules(
        cls, name: str, modules: list[Module], *, prompts: Mapping[str, str | None], **others: Any
    ) -> EmbeddingSettings:
        kinds = [kind for kind, _, _ in modules]
        if others.get("token_widths") is not None:
            named = {role: prompt or "" for role, prompt in prompts.items()}
            return cls(prompts=named, normalize="Normalize" in kinds, **others)
        if not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
            raise ValueError(
                f"{name} has the modules {', '.join(kinds)}. Supported are Transformer and Pooling, then Dense and at "
                "most one Normalize."
            )
        pooling = modules[1][1]
        if not pooling.get("include_prompt", True) and any(prompts.values()):
            raise ValueError(f"{name} leaves prompts out of its pooling, which is not supported.")
        # Older files have one switch per pooling; mean if all are off.
        modes = pooling.get("pooling_mode", [mode for mode, switch in SWITCHES.items() if pooling.get(switch)])
        modes = [modes] if isinstance(modes, str) else modes or ["mean"]
        if len(modes) != 1 or modes[0] not in POOLINGS:
            published, legal = " + ".join(map(str, modes)), ", ".join(POOLINGS)
            raise ValueError(f"{name} was published with the pooling {published!r}; legal values: {legal}.")
        maps = [linear for _, _, linear in modules if linear is not None]
        plain = all(
            config.get("activation_function", IDENTITY) == IDENTITY and not config.get("use_residual")
            for kind, config, _ in modules
            if kind == "Dense"
        )
        if not plain or (len(maps) > 1 and any(linear.bias is not None for linear in maps)):
            raise ValueError(f"The Dense modules of {name} are not one linear map without activation.")
        return cls(
            pooling=modes[0],
            projection=_in_a_row(maps),
            normalize="Normalize" in kinds,
            prompts={role: prompt or "" for role, prompt in prompts.items()},
            **others,
        )

    def write(self, folder: str | Path, *, width: int) -> list[str]:
        """
        Write the modules beside an encoder whose hidden states have `width` dims by default, and return the names of
        the files. They have the form of sentence-transformers before version 5.4, which every version reads, and which
        is the only one that vLLM reads. Raises a ValueError if the projection does not fit the hidden size.
        """
        projection, folder = self.projection, Path(folder)
        if projection is not None and projection.in_features != width:
            raise ValueError(f"The projection takes {projection.in_features} dims, and the encoder gives {width}.")
        files: dict[str, Any] = {
            # vLLM ignores the file without both entries.
            ENCODER_FILES[0]: {"do_lower_case": self.do_lower_case, "max_seq_length": self.max_length},
            f"{POOLING_FOLDER}/config.json": {
                "word_embedding_dimension": width,
                **{switch: name == self.pooling for name, switch in SWITCHES.items()},
                "include_prompt": True,
            },
        }
        paths = {"Transformer": "", "Pooling": POOLING_FOLDER}
        if projection is not None:
            paths["Dense"] = PROJECTION_FOLDER
            files[f"{PROJECTION_FOLDER}/config.json"] = {
                "in_features": projection.in_features,
                "out_features": projection.out_features,
                "bias": projection.bias is not None,
                "activation_function": IDENTITY,
            }
        if self.normalize:
            paths["Normalize"] = f"{len(paths)}_Normalize"  # it has no files
        files |= self.listing(paths)
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if projection is None:
            return list(files)
        weights = f"{PROJECTION_FOLDER}/{WEIGHTS}"
        named = projection.named_parameters()
        save_file({f"linear.{name}": tensor.detach().cpu().contiguous() for name, tensor in named}, folder / weights)
        return [*files, weights]

    def listing(self, paths: Mapping[str, str]) -> dict[str, Any]:
        """File -> content of those that name the modules (kind -> folder), and prompts and similarity."""
        return {
            SIMILARITY_FILE: {
                "prompts": dict(self.prompts),
                "default_prompt_name": self.default_prompt_name,
                "similarity_fn_name": self.similarity,
            },
            MODULES_FILE: [
                {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for index, (kind, path) in enumerate(paths.items())
            ],
        }


def load_tokenizer(source: Source, settings: EmbeddingSettings | None, **options: Any) -> Any:
    """The tokenizer of an encoder. If its settings say that texts are lower-cased, it does so itself, as in
    sentence-transformers, also where it is saved. Raises a ValueError if it cannot."""
    tokenizer = AutoTokenizer.from_pretrained(source.name, **source.options, **options)
    if settings is None or not settings.do_lower_case:
        return tokenizer
    if not tokenizer.is_fast:
        raise ValueError(f"{source.name} lower-cases texts, which {type(tokenizer).__name__} cannot do by itself.")
    normalizer = tokenizer.backend_tokenizer.normalizer
    if normalizer is None or "A" in normalizer.normalize_str("A"):
        others = [] if normalizer is None else [normalizer]
        tokenizer.backend_tokenizer.normalizer = Sequence([Lowercase(), *others])
    return tokenizer


def _token_widths(name: str, modules: list[Module]) -> tuple[int, int] | None:
    """The dims that the Dense modules of an encoder for late interaction read and give; `None` for other encoders."""
    kinds = " ".join(kind for kind, _, _ in modules)
    if "Pooling" in kinds or not re.match("Transformer (Dense|MultiVectorMask)", kinds):
        return None
    if not re.fullmatch("Transformer( Dense)+( MultiVectorMask)?( Normalize)?", kinds):
        raise ValueError(
            f"{name} has the modules {kinds.replace(' ', ', ')}. Supported for late interaction are Transformer and "
            "Dense, then at most one MultiVectorMask and one Normalize."
        )
    linears = [linear for _, _, linear in modules if linear is not None]
    return linears[0].in_features, linears[-1].out_features


def _in_a_row(linears: list[nn.Linear]) -> nn.Linear | None:
    """One linear map in place of several, which have no bias."""
    if len(linears) < 2:
        return linears[0] if linears else None
    weight = torch.linalg.multi_dot([linear.weight.detach().double() for linear in reversed(linears)])
    return _linear(weight.float())


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias))
    return linear


def _read_linear(content: bytes, file: str) -> nn.Linear:
    try:
        tensors = {name: tensor.float() for name, tensor in load(content).items()}
        return _linear(tensors["linear.weight"], tensors.get("linear.bias"))
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error


def shards_of(folder: str | Path) -> set[str]:
    """The files that the index of a checkpoint's weights names; none if it has no index. Raises a ValueError if one is
    outside of the folder."""
    file = Path(folder, INDEX)
    shards = set(read_json(file)["weight_map"].values()) if file.is_file() else set()
    if outside := [shard for shard in shards if not re.fullmatch(r"[\w-][\w.-]*", shard)]:
        raise ValueError(f"{file} names {outside[0]!r}, which is not a file of its folder.")
    return shards


def safetensors_only(name_or_path: str | os.PathLike[str], subfolder: str = "") -> dict[str, Any]:
    """
    The arguments of `from_pretrained` with which weights are read from safetensors in the model's own folder. Raises a
    ValueError as [`shards_of`], or if a file of weights in the folder is broken or incomplete.
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


def hub_id(name: str | None) -> str | None:
    """Return `name` if it is a Hub id, else `None`: a local folder means nothing on other machines."""
    if not name or os.path.exists(name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    return name
