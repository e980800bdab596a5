"""
The modules of sentence-transformers that a checkpoint brings: what `SentenceTransformer(folder)` does with the states
of the encoder. The only place that writes their files; neither writing nor reading needs sentence-transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from transformers.utils.hub import cached_file

from .nested import POOLINGS, Pooling


if TYPE_CHECKING:
    from .projection import Projection

MODULES_FILE = "modules.json"
ENCODER_FILE, SIMILARITY_FILE = "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING_FOLDER, PROJECTION_FOLDER = "1_Pooling", "2_Dense"
# The poolings of sentence-transformers -> their switches in its files.
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
    pooling: Pooling = "mean",
    causal: bool = False,
    max_length: int | None = None,
    prompts: Mapping[str, str] = {},
    projection: Projection | None = None,
) -> list[str]:
    """
    Write pooling, and a projection where there is one, beside an encoder and its tokenizer: `SentenceTransformer` then
    gives the embedding that was trained. The files are spelled as by sentence-transformers before its version 5.4:
    every version reads that, and vLLM reads nothing else.

    Args:
        folder (`Path`): Where the encoder is.
        width (`int`): Dims of the states that the checkpoint gives by default; see [`width_of`].
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, or `"anchor"`.
        causal (`bool`, *optional*, defaults to `False`): Whether the anchor is the last token, not the first.
        max_length (`int`, *optional*): Longest text in tokens; `None` is the tokenizer's limit.
        prompts (`Mapping[str, str]`, *optional*): Role (`"query"`, `"document"`) -> words put before such texts.
        projection ([`Projection`], *optional*): Of the pooled embedding.

    Returns:
        `list[str]`: The files, relative to the folder.

    Raises:
        ValueError: if the pooling is unknown, or the projection reads another width.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")
    if projection is not None and projection.in_features != width:
        raise ValueError(f"The projection reads {projection.in_features} dims; the encoder gives {width}.")
    mode, length = mode_of(pooling, causal), {} if max_length is None else {"max_seq_length": max_length}
    files: dict[str, Any] = {
        ENCODER_FILE: length | {"do_lower_case": False},
        SIMILARITY_FILE: {"prompts": dict(prompts), "default_prompt_name": None, "similarity_fn_name": "cosine"},
        f"{POOLING_FOLDER}/config.json": {
            "word_embedding_dimension": width,
            **{switch: name == mode for name, switch in SWITCHES.items()},
            "include_prompt": True,
        },
    }
    # No Normalize: modules come before the cut to `truncate_dim`, and a vector of unit length is of another one after
    # it. Who wants unit length says `encode(..., normalize_embeddings=True)`, which cuts first.
    folders = {"Transformer": "", "Pooling": POOLING_FOLDER}
    if projection is not None:
        folders["Dense"] = PROJECTION_FOLDER
        files[f"{PROJECTION_FOLDER}/config.json"] = dense_config(projection.in_features, projection.out_features)
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
    save_file({"linear.weight": projection.weight.detach().cpu().contiguous()}, folder / weights)
    return [*files, weights]


def mode_of(pooling: Pooling, causal: bool) -> str:
    """A pooling in the words of sentence-transformers."""
    if pooling == "mean":
        return "mean"
    return "lasttoken" if causal else "cls"


def dense_config(in_features: int, out_features: int) -> dict[str, Any]:
    """Of a linear map that adds nothing and bends nothing: what a [`Projection`] is."""
    return {
        "in_features": in_features,
        "out_features": out_features,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }


def width_of(config: Any) -> int:
    """Dims of the states that a model of this config gives by default."""
    return config.resolve_granularity()[1] if config.model_type == "m3bert" else config.hidden_size


def published_pooling(name_or_path: str, *, causal: bool | None = None, **hub_options: Any) -> Pooling | None:
    """
    The pooling that an encoder was published with, by any version of sentence-transformers.

    Args:
        name_or_path (`str`): Folder or Hub id.
        causal (`bool`, *optional*): Whether the encoder's anchor is its last token; `None` takes either for one.
        hub_options (*optional*): `revision` and the like.

    Returns:
        `str`: `"mean"` or `"anchor"`; `None` where none was published.

    Raises:
        ValueError: if it is another one.
    """
    folders = published_modules(name_or_path, "Pooling", **hub_options)
    if not folders:
        return None
    config = read_published(name_or_path, f"{folders[0]}/config.json", **hub_options)
    # Older files have a switch a mode, and the mean where none is on.
    modes = config.get("pooling_mode", [name for name, switch in SWITCHES.items() if config.get(switch)] or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    anchors = [mode_of("anchor", either) for either in ([False, True] if causal is None else [causal])]
    legal: dict[str, Pooling] = {"mean": "mean", **dict.fromkeys(anchors, "anchor")}
    if len(modes) != 1 or modes[0] not in legal:
        raise ValueError(
            f"{name_or_path} was published with the pooling {' + '.join(modes)!r}; legal values: {', '.join(legal)}."
        )
    return legal[modes[0]]


def published_options(name_or_path: str, **hub_options: Any) -> dict[str, Any]:
    """`max_length` and `prompts` that an encoder was published with, as [`write_modules`] takes them."""
    encoder, similarity = (
        read_published(name_or_path, file, _raise_exceptions_for_missing_entries=False, **hub_options) or {}
        for file in (ENCODER_FILE, SIMILARITY_FILE)
    )
    return {"max_length": encoder.get("max_seq_length"), "prompts": similarity.get("prompts", {})}


def published_modules(name_or_path: str, kind: str, **hub_options: Any) -> list[str]:
    """Folders of the modules of a kind, such as `"Pooling"`, that an encoder was published with."""
    modules = read_published(name_or_path, MODULES_FILE, _raise_exceptions_for_missing_entries=False, **hub_options)
    return [module["path"] for module in modules or [] if module["type"].rpartition(".")[2] == kind]


def read_published(name_or_path: str, file: str, **hub_options: Any) -> Any:
    """What a JSON file of a folder or a Hub id holds; `None` for a missing one, where the options allow that."""
    found = cached_file(name_or_path, file, **hub_options)
    return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
