"""Write the folders that `check.py` loads, and what they give here: `python -m tests.loading.write OUT`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModel, BertTokenizer, PreTrainedModel, set_seed

from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.modeling import M3BertForMaskedLM
from m3bert.modeling.modeling_elastic import make_elastic
from m3bert.models.conversion import convert_to_m3bert
from m3bert.trainers import Granularity
from tests.conftest import WORDS, save, tiny_config
from tests.loading.check import outputs_of
from tests.modeling_m3bert.static_models import affine, give_table
from tests.modeling_m3bert.test_elastic import config_of, give_depths
from tests.models.test_conversion import random_encoder
from tests.static_checkpoints import save_static


def write(model: PreTrainedModel, folder: Path) -> None:
    save(folder, model, tokenizer(), max_length=40)


def tokenizer() -> BertTokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    names = ["input_ids", "attention_mask"]
    vocabulary = {word: row for row, word in enumerate(words)}
    return BertTokenizer(vocab=vocabulary, model_max_length=40, model_input_names=names)


def write_masked_lm(folder: Path) -> None:
    """Pre-norm and rotary, with a tied head and exits."""
    model = M3BertForMaskedLM(tiny_config(position_embedding_type="rope", tie_word_embeddings=True))
    model.base_model.set_depths(exits={layer: affine() for layer in (2, 4)})
    write(model, folder)


def write_converted(folder: Path) -> None:
    model = convert_to_m3bert(random_encoder("Bert", {"pad_token_id": 0}))
    give_table(model, layers=(0, 2), paths={2: [1, 3]})
    write(model, folder)


def write_elastic(family: str) -> Callable[[Path], None]:
    """A repository of a native encoder."""

    def writer(folder: Path) -> None:
        model = make_elastic(AutoModel.from_config(config_of(family)))
        give_depths(model)
        write(model, folder)

    return writer


def write_size(folder: Path) -> None:
    """A path that was loaded, and saved again."""
    source = folder.with_name("modernbert")
    save(folder, AutoModel.from_pretrained(source, trust_remote_code=True, output_layer=4), tokenizer())


CUT = {"output_layer": 2, "output_dim": 8}
# Class that loads the folder, whether with the code in it, keywords of the model.
REMOTE = [(kind, True, keywords) for kind in ("AutoModel", "SentenceTransformer") for keywords in ({}, CUT)]
TABLE = ("AutoModel", True, {"output_layer": 0})
NATIVE = [("AutoModel", False, {}), ("SentenceTransformer", False, {})]
ELASTIC = [
    (kind, True, {"output_layer": depth}) for kind in ("AutoModel", "SentenceTransformer") for depth in (0, 2, 4, 6)
]
# Folder: its writer, the lowest version of transformers, its loads. Below that version, they fail and name it.
FOLDERS = {
    "static": (lambda folder: save_static(folder, tokenizer()), "5.0", [*REMOTE, TABLE]),
    "masked_lm": (write_masked_lm, "5.0", [*REMOTE, ("AutoModelForMaskedLM", True, {})]),
    "converted": (write_converted, "5.0", [*REMOTE, TABLE]),
    "native": (
        lambda folder: export_native(Checkpoint(folder.with_name("converted")), folder, Granularity(2, 8)),
        "4.0",
        NATIVE,
    ),
    "bert": (write_elastic("bert"), "4.57", [*NATIVE, *ELASTIC]),
    "modernbert": (write_elastic("modernbert"), "4.57", [*NATIVE, *ELASTIC]),
    "size": (write_size, "4.57", [("AutoModel", True, {}), ("SentenceTransformer", True, {})]),
}


def main(out: Path) -> None:
    cases, expected = [], {}
    for name, (writer, lowest, loads) in FOLDERS.items():
        set_seed(0)
        writer(out / name)
        for load in loads:
            expected[str(len(cases))] = outputs_of(out / name, *load)
            cases.append((name, lowest, *load))
    save_file(expected, out / "expected.safetensors")
    (out / "cases.json").write_text(json.dumps(cases))


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
