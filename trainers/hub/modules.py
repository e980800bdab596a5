"""
The modules of sentence-transformers in a checkpoint: how `SentenceTransformer(folder)` turns the states of the encoder
into an embedding. Only this module writes their files. Writing and reading do not need sentence-transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers.utils.hub import cached_file

from ..core.projection import Projection
from ..core.states import POOLINGS, Pooling, check_pooling


MODULES_FILE = "modules.json"
ENCODER_FILE, SIMILARITY_FILE = "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING_FOLDER, PROJECTION_FOLDER = "1_Pooling", "2_Dense"
# Poolings of sentence-transformers -> their switches in its files.
SWITCHES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def write_modules(
    folder: str | Path,
    *,
    width: int,
    max_length: int,
    pooling: Pooling = "mean",
    prompts: Mapping[str, str] = {},
    projection: Projection | None = None,
) -> list[str]:
    """
    Write the pooling and the projection, if there is one, beside an encoder and its tokenizer. `SentenceTransformer`
    then gives the embedding that was trained. The files have the form of sentence-transformers before version 5.4,
    which every version reads, and which is the only one that vLLM reads.

    Args:
        folder (`Path`): Folder of the encoder.
        width (`int`): Dims of the states that the checkpoint gives by default; see [`width_of`].
        max_length (`int`): Longest text in tokens; servers truncate longer texts. See [`longest_text`].
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, `"cls"` or `"lasttoken"`.
        prompts (`Mapping[str, str]`, *optional*): Role (`"query"`, `"document"`) -> prompt before texts of that role.
        projection ([`Projection`], *optional*): Projection of the pooled embedding.

    Returns:
        `list[str]`: The files, relative to the folder.

    Raises:
        ValueError: if the pooling is unknown, or the projection does not fit the width.
    """
    check_pooling(pooling)
    if projection is not None and projection.in_features != width:
        raise ValueError(f"The projection takes {projection.in_features} dims; width={width}.")
    files: dict[str, Any] = {
        # The tokenizer lowers the case itself, but vLLM ignores the file without both entries.
        ENCODER_FILE: {"max_seq_length": max_length, "do_lower_case": False},
        SIMILARITY_FILE: {"prompts": dict(prompts), "default_prompt_name": None, "similarity_fn_name": "cosine"},
        f"{POOLING_FOLDER}/config.json": {
            "word_embedding_dimension": width,
            **{switch: name == pooling for name, switch in SWITCHES.items()},
            "include_prompt": True,
        },
    }
    # No Normalize module: `truncate_dim` cuts after all modules, and a vector of unit length is shorter once cut.
    # `encode(..., normalize_embeddings=True)` cuts first and normalises then.
    folders = {"Transformer": "", "Pooling": POOLING_FOLDER}
    if projection is not None:
        folders["Dense"] = PROJECTION_FOLDER
        files[f"{PROJECTION_FOLDER}/config.json"] = dense_config(
            projection.in_features, projection.out_features, bias=projection.bias is not None
        )
    files[MODULES_FILE] = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(folders.items())
    ]
    folder = Path(folder)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if projection is None:
        return list(files)
    weights = f"{PROJECTION_FOLDER}/model.safetensors"
    tensors = {f"linear.{name}": tensor.detach().cpu().contiguous() for name, tensor in projection.named_parameters()}
    save_file(tensors, folder / weights)
    return [*files, weights]


def dense_config(in_features: int, out_features: int, *, bias: bool) -> dict[str, Any]:
    """The config of an affine map without activation, which is what a [`Projection`] is."""
    return {
        "in_features": in_features,
        "out_features": out_features,
        "bias": bias,
        "activation_function": "torch.nn.modules.linear.Identity",
    }


def published_pooling(name_or_path: str, **hub_options: Any) -> Pooling | None:
    """
    The pooling that an encoder was published with. Reads the files of any version of sentence-transformers.

    Args:
        name_or_path (`str`): Folder or Hub id.
        hub_options (*optional*): Options for the Hub, such as `revision`.

    Returns:
        `str`: `"mean"`, `"cls"` or `"lasttoken"`; `None` if none was published.

    Raises:
        ValueError: if it is another pooling.
    """
    folders = published_modules(name_or_path, "Pooling", **hub_options)
    if not folders:
        return None
    config = read_published(name_or_path, f"{folders[0]}/config.json", **hub_options)
    # Older files have one switch per pooling; mean if all are off.
    modes = config.get("pooling_mode", [name for name, switch in SWITCHES.items() if config.get(switch)] or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(
            f"{name_or_path} was published with the pooling {' + '.join(modes)!r}; legal values: "
            f"{', '.join(POOLINGS)}."
        )
    return modes[0]


def find_projection(name_or_path: str, **hub_options: Any) -> Projection | None:
    """
    The projection that was published with an encoder, if there is one.

    Args:
        name_or_path (`str`): Folder or Hub id.
        hub_options (*optional*): Options for the Hub, such as `revision`.

    Raises:
        ValueError: if the pooling is followed by more than one map, or by one with an activation or a residual.
    """
    folders = published_modules(name_or_path, "Dense", **hub_options)
    if not folders:
        return None
    residual = {"use_residual": False}  # not in older files
    config = residual | read_published(name_or_path, f"{folders[0]}/config.json", **hub_options)
    plain = residual | dense_config(config["in_features"], config["out_features"], bias=config["bias"])
    if len(folders) > 1 or any(config.get(name) != value for name, value in plain.items()):
        raise ValueError(
            f"{name_or_path} has more after its pooling than one linear map without activation "
            f"({', '.join(folders)}), which is not supported."
        )
    projection = Projection(config["in_features"], config["out_features"], bias=config["bias"])
    tensors = load_file(cached_file(name_or_path, f"{folders[0]}/model.safetensors", **hub_options))
    projection.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in tensors.items()})
    return projection


def published_options(name_or_path: str, **hub_options: Any) -> dict[str, Any]:
    """The arguments `max_length` (`None` if unknown) and `prompts` of [`write_modules`] that an encoder was published
    with."""
    encoder, similarity = (
        read_published(name_or_path, file, _raise_exceptions_for_missing_entries=False, **hub_options) or {}
        for file in (ENCODER_FILE, SIMILARITY_FILE)
    )
    return {"max_length": encoder.get("max_seq_length"), "prompts": similarity.get("prompts", {})}


def published_modules(name_or_path: str, kind: str, **hub_options: Any) -> list[str]:
    """Folders of an encoder's modules of one kind, such as `"Pooling"`."""
    modules = read_published(name_or_path, MODULES_FILE, _raise_exceptions_for_missing_entries=False, **hub_options)
    return [module["path"] for module in modules or [] if module["type"].rpartition(".")[2] == kind]


def read_published(name_or_path: str, file: str, **hub_options: Any) -> Any:
    """The content of a JSON file in a folder or on the Hub; `None` if it is missing and the options allow that."""
    found = cached_file(name_or_path, file, **hub_options)
    return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
