"""The `ModelMeta` of a checkpoint as a Python file for MTEB's repository. Needs the extra `mteb`."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoModel

from trainers.core.extras import require_extra
from trainers.hub.quantizer import QUANTIZER_FOLDER

from .checkpoint import Checkpoint
from .costs import costs
from .upload import CARD


FILE = '''"""
{name}. Put this file into `mteb/models/model_implementations/` of MTEB's repository, once the model is public.

`None` means unknown. Fill in what you know, above all `training_datasets`: the names of the tasks of MTEB whose
data the model, or one that it was made from, was trained on. MTEB reads it to tell which scores are zero-shot.
"""

from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper


{variable} = {meta}
'''


def mteb_meta(checkpoint: Checkpoint, repo_id: str, revision: str | None = None) -> Any:
    """
    What MTEB wants to know about a model, as far as the published checkpoint and its card say it.

    Args:
        checkpoint ([`Checkpoint`]): The checkpoint in its published form, with its card.
        repo_id (`str`): The repository, `user/model`.
        revision (`str`, *optional*): The commit of today that holds these files; `None` if nothing was pushed.

    Returns:
        `mteb.models.ModelMeta`

    Raises:
        ValueError: if the checkpoint does not embed texts, or the extra `mteb` is missing.
    """
    mteb = require_extra("mteb.models.model_meta", "mteb", "A ModelMeta")
    wrapper = require_extra("mteb.models.sentence_transformer_wrapper", "mteb", "A ModelMeta")
    # MTEB's own reading of the languages of a card.
    languages = require_extra("mteb.languages.iso_mappings", "mteb", "A ModelMeta")._hf_langs_to_iso_lang_scripts
    if checkpoint.head != "AutoModel":
        raise ValueError(f"mteb_meta describes a model that embeds texts; this is one for {checkpoint.head}.")
    card = ModelCard.load(checkpoint.folder / CARD).data.to_dict()
    full, projection, trained = checkpoint.full, checkpoint.projection, checkpoint.trained_grid
    dims = [g.dim for g in trained or () if g.layer == full.layer and g.dim < full.dim]
    parameters = costs(checkpoint.config, [full])[full].parameters
    datasets = card.get("datasets", [])
    with torch.device("meta"):
        embeddings = AutoModel.from_config(checkpoint.config).get_input_embeddings()
    exported = ["ONNX"] if any(checkpoint.folder.rglob("*.onnx")) else []
    return mteb.ModelMeta(
        loader=wrapper.SentenceTransformerEncoderWrapper,
        loader_kwargs={"trust_remote_code": True} if checkpoint.encoder_code() else {},
        name=repo_id,
        revision=revision,
        release_date=date.today().isoformat() if revision is not None else None,
        languages=languages(card.get("language")),
        n_parameters=parameters + (0 if projection is None else sum(part.numel() for part in projection.parameters())),
        n_embedding_parameters=embeddings.weight.numel(),
        memory_usage_mb=round(weight_bytes(checkpoint.folder) / 2**20, 1),
        max_tokens=checkpoint.max_length,
        embed_dim=sorted({*dims, full.dim}) if dims else full.dim,
        license=known_license(card),
        open_weights=True,
        public_training_code=None,
        public_training_data=f"https://huggingface.co/datasets/{datasets[0]}" if len(datasets) == 1 else None,
        framework=["Sentence Transformers", "PyTorch", "Transformers", "safetensors", *exported],
        reference=f"https://huggingface.co/{repo_id}",
        similarity_fn_name=mteb.ScoringFunction(checkpoint.settings.similarity),
        use_instructions=any(checkpoint.prompts.values()),
        training_datasets=None,
        adapted_from=card.get("base_model"),
    )


def write_mteb_meta(file: Path, checkpoint: Checkpoint, repo_id: str, revision: str | None = None) -> None:
    """Write the [`mteb_meta`] of a checkpoint to a Python file."""
    meta = mteb_meta(checkpoint, repo_id, revision)
    variable = re.sub(r"\W+|^(?=\d)", "_", repo_id.rpartition("/")[2].lower())
    file.write_text(FILE.format(name=repo_id, variable=variable, meta=meta.to_python()), encoding="utf-8")


def known_license(card: dict[str, Any]) -> str | None:
    """The license of a card as MTEB names it: one of its identifiers, or the address of another license."""
    if card.get("license") in get_args(require_extra("mteb.types", "mteb", "A ModelMeta").Licenses):
        return card["license"]
    link = card.get("license_link")
    return link if link and link.startswith("https://") else None


def weight_bytes(folder: Path) -> int:
    """Bytes of all tensors of a checkpoint without its quantizer, as they are stored."""
    total = 0
    for file in folder.rglob("*.safetensors"):
        if file.parent.name == QUANTIZER_FOLDER:
            continue
        with safe_open(file, "pt") as weights:
            total += sum(weights.get_tensor(name).nbytes for name in weights.keys())
    return total
