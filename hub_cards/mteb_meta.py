"""The `ModelMeta` of a published model as a Python file for MTEB's repository. Needs the extra `mteb`."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub import ModelCard
from torch import nn
from transformers import PreTrainedModel

from ..encode.precisions import FLOAT
from ..encode.quantizer import QUANTIZER_FOLDER
from ..evaluation.results import GridResults
from ..utils.extras import require_extra
from .checkpoint import Checkpoint
from .files import CARD, RESULTS
from .router_export import ROUTER_FILE


FRAMEWORKS = ("Sentence Transformers", "PyTorch", "Transformers", "safetensors")  # as MTEB names them
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
    A model as MTEB describes it, by the published files and the card.

    Args:
        folder (`Path`): Folder that is published, with its card: a checkpoint, or a router of [`export_router`], with
            the parameters of both sides.
        repo_id (`str`): The repository, `user/model`.
        revision (`str`, *optional*): The commit of today that holds these files; `None` if nothing was pushed.

    Raises:
        ValueError: if the model does not embed texts, or the extra `mteb` is missing.
    """
    mteb = require_extra("mteb.models.model_meta", "mteb", "A ModelMeta")
    library = require_extra("sentence_transformers", "mteb", "A ModelMeta")
    from mteb.languages.iso_mappings import _hf_langs_to_iso_lang_scripts as languages
    from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
    from mteb.types import Licenses

    from ..evaluation.mteb_models import MTEB_PRECISIONS

    checkpoint = None if (folder / ROUTER_FILE).is_file() else Checkpoint(folder)
    if checkpoint and checkpoint.head != "AutoModel":  # sentence-transformers would drop the head
        raise ValueError(f"mteb_meta describes a model that embeds texts; this is one for {checkpoint.head}.")
    code = checkpoint is not None and checkpoint.needs_code
    model = library.SentenceTransformer(str(folder), device="cpu", trust_remote_code=code)
    dim = model.get_embedding_dimension()
    trained = (checkpoint.trained_grid or ()) if checkpoint else ()
    dims = {g.dim for g in trained if checkpoint and g.layer == checkpoint.full.layer and g.dim < dim}
    stored = [file for file in folder.rglob("*.safetensors") if file.parent.name != QUANTIZER_FOLDER]
    measured = [FLOAT, *(GridResults.load(file).granularities.codes if (file := folder / RESULTS).is_file() else ())]
    card = ModelCard.load(folder / CARD).data.to_dict()
    datasets, license_, link = card.get("datasets", []), card.get("license"), card.get("license_link")
    link = link if str(link).startswith("https://") else None  # MTEB takes no file of the repository
    return mteb.ModelMeta(
        loader=SentenceTransformerEncoderWrapper,
        loader_kwargs={"trust_remote_code": True} if checkpoint and checkpoint.encoder_code() else {},
        name=repo_id,
        model_type=["dense" if checkpoint else "router"],
        revision=revision,
        release_date=date.today().isoformat() if revision is not None else None,
        languages=languages(card.get("language")),
        n_parameters=sum(part.numel() for part in model.parameters()),
        n_embedding_parameters=sum(weight.numel() for weight in token_tables(model)),
        memory_usage_mb=round(sum(file.stat().st_size for file in stored) / 2**20, 1),
        # Of a router, the side that embeds documents: a static table has no limit.
        max_tokens=checkpoint.max_length if checkpoint else model[0].sub_modules["document"][0].max_seq_length,
        embed_dim=sorted({*dims, dim}) if dims else dim,
        license=license_ if license_ in get_args(Licenses) else link,
        open_weights=True,
        public_training_code=None,
        public_training_data=f"https://huggingface.co/datasets/{datasets[0]}" if len(datasets) == 1 else None,
        framework=[*FRAMEWORKS, *(["ONNX"] if any(folder.rglob("*.onnx")) else [])],
        reference=f"https://huggingface.co/{repo_id}",
        similarity_fn_name=model.similarity_fn_name,
        use_instructions=any(model.prompts.values()),
        training_datasets=None,
        adapted_from=card.get("base_model"),
        output_dtypes=[name for code, name in MTEB_PRECISIONS.items() if code in measured],
    )


def token_tables(model: nn.Module) -> set[torch.Tensor]:
    """The tables of token embeddings in a model."""
    modules = [part for part in model.modules() if isinstance(part, nn.EmbeddingBag)]
    modules += [part.get_input_embeddings() for part in model.modules() if isinstance(part, PreTrainedModel)]
    return {module.weight for module in modules}


def write_mteb_meta(file: Path, folder: Path, repo_id: str, revision: str | None = None) -> None:
    """Write the [`mteb_meta`] of what is published to a Python file."""
    meta = mteb_meta(folder, repo_id, revision)
    variable = re.sub(r"\W+|^(?=\d)", "_", repo_id.rpartition("/")[2].lower())
    file.write_text(FILE.format(name=repo_id, variable=variable, meta=meta.to_python()), encoding="utf-8")
