"""The `ModelMeta` of a checkpoint as a Python file for MTEB's repository. Needs the extra `mteb`."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, PreTrainedModel

from trainers.core.codes import FLOAT
from trainers.core.extras import require_extra
from trainers.evaluation.results import GridResults
from trainers.hub.quantizer import QUANTIZER_FOLDER

from .checkpoint import Checkpoint
from .costs import costs
from .router_export import ROUTER_FILE
from .upload import CARD, RESULTS


FILE = '''"""
{name}. Put this file into `mteb/models/model_implementations/` of MTEB's repository, once the model is public.

`None` means unknown. Fill in what you know, above all `training_datasets`: the names of the tasks of MTEB whose
data the model, or one that it was made from, was trained on. MTEB reads it to tell which scores are zero-shot.
"""

from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from mteb.types import OutputDType


{variable} = {meta}
'''


def mteb_meta(folder: Path, repo_id: str, revision: str | None = None) -> Any:
    """
    What MTEB wants to know about a model, as far as the published files and the card say it.

    Args:
        folder (`Path`): What is published, with its card: a checkpoint, or a router of [`export_router`], whose
            `model_type` is `["router"]`.
        repo_id (`str`): The repository, `user/model`.
        revision (`str`, *optional*): The commit of today that holds these files; `None` if nothing was pushed.

    Returns:
        `mteb.models.ModelMeta`

    Raises:
        ValueError: if the model does not embed texts, or the extra `mteb` is missing.
    """
    mteb = require_extra("mteb.models.model_meta", "mteb", "A ModelMeta")
    wrapper = require_extra("mteb.models.sentence_transformer_wrapper", "mteb", "A ModelMeta")
    # MTEB's own reading of the languages of a card.
    languages = require_extra("mteb.languages.iso_mappings", "mteb", "A ModelMeta")._hf_langs_to_iso_lang_scripts
    router = (folder / ROUTER_FILE).is_file()
    described = router_values(folder) if router else checkpoint_values(Checkpoint(folder))
    card = ModelCard.load(folder / CARD).data.to_dict()
    datasets = card.get("datasets", [])
    return mteb.ModelMeta(
        loader=wrapper.SentenceTransformerEncoderWrapper,
        name=repo_id,
        revision=revision,
        release_date=date.today().isoformat() if revision is not None else None,
        languages=languages(card.get("language")),
        memory_usage_mb=round(weight_bytes(folder) / 2**20, 1),
        license=known_license(card),
        open_weights=True,
        public_training_code=None,
        public_training_data=f"https://huggingface.co/datasets/{datasets[0]}" if len(datasets) == 1 else None,
        reference=f"https://huggingface.co/{repo_id}",
        training_datasets=None,
        adapted_from=card.get("base_model"),
        output_dtypes=precisions(folder),
        **described,
    )


def checkpoint_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """What only a checkpoint of an encoder says."""
    if checkpoint.head != "AutoModel":
        raise ValueError(f"mteb_meta describes a model that embeds texts; this is one for {checkpoint.head}.")
    full, projection, trained = checkpoint.full, checkpoint.projection, checkpoint.trained_grid
    dims = [g.dim for g in trained or () if g.layer == full.layer and g.dim < full.dim]
    parameters = costs(checkpoint.config, [full])[full].parameters
    with torch.device("meta"):
        embeddings = AutoModel.from_config(checkpoint.config).get_input_embeddings()
    exported = ["ONNX"] if any(checkpoint.folder.rglob("*.onnx")) else []
    return {
        "loader_kwargs": {"trust_remote_code": True} if checkpoint.encoder_code() else {},
        "n_parameters": parameters
        + (0 if projection is None else sum(part.numel() for part in projection.parameters())),
        "n_embedding_parameters": embeddings.weight.numel(),
        "max_tokens": checkpoint.max_length,
        "embed_dim": sorted({*dims, full.dim}) if dims else full.dim,
        "framework": ["Sentence Transformers", "PyTorch", "Transformers", "safetensors", *exported],
        "similarity_fn_name": checkpoint.settings.similarity,
        "use_instructions": any(checkpoint.prompts.values()),
    }


def router_values(folder: Path) -> dict[str, Any]:
    """What only a router says. Its parameters are those of both sides."""
    model = require_extra("sentence_transformers", "mteb", "A ModelMeta").SentenceTransformer(
        str(folder), device="cpu"
    )
    tables = [part for part in model.modules() if isinstance(part, nn.EmbeddingBag)]
    tables += [part.get_input_embeddings() for part in model.modules() if isinstance(part, PreTrainedModel)]
    return {
        "model_type": ["router"],
        "n_parameters": sum(part.numel() for part in model.parameters()),
        "n_embedding_parameters": sum(table.weight.numel() for table in tables),
        "max_tokens": model[0].sub_modules["document"][0].max_seq_length,  # a table has no limit
        "embed_dim": model.get_embedding_dimension(),
        "framework": ["Sentence Transformers", "PyTorch", "Transformers", "safetensors"],
        "similarity_fn_name": model.similarity_fn_name,
        "use_instructions": any(model.prompts.values()),
    }


def precisions(folder: Path) -> list[Any]:
    """The precisions of vectors that the published results have scores of, as MTEB names them; at least float32."""
    from trainers.evaluation.mteb_models import PRECISIONS

    file = folder / RESULTS
    measured = GridResults.load(file).granularities.codes if file.is_file() else []
    return [name for code, name in PRECISIONS.items() if code == FLOAT or code in measured]


def write_mteb_meta(file: Path, folder: Path, repo_id: str, revision: str | None = None) -> None:
    """Write the [`mteb_meta`] of what is published to a Python file."""
    meta = mteb_meta(folder, repo_id, revision)
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
