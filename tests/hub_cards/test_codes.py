"""A published quantizer: it travels with the encoder that it reads, and the card's lines load it."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from m3bert.encode.quantizer import write_quantizer
from m3bert.evaluation import GridResults, evaluate_grid, find_tasks
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.sections import parse
from m3bert.modeling import M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers import Granularity, Grid
from tests.conftest import refused, save
from tests.evaluation_data import write_data
from tests.hub_cards.test_publication import lay_out
from tests.models.test_native import BIASES, POST_NORM
from tests.published import save_with_exits


QUANTIZER_FILES = {"quantizer/config.json", "quantizer/model.safetensors"}
CODE = "quantization_m3bert.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_tokenizer, sentences) -> Path:
    """A post-norm m3BERT with exits, which can be cut and exported, and a quantizer for layers 2 and 6."""
    folder = tmp_path_factory.mktemp("quantizer") / "model"
    save_with_exits(folder, tiny_tokenizer, sentences, **POST_NORM, **BIASES)
    save_quantizer(folder, layers=(2, 6))
    return folder


def save_quantizer(folder: Path, layers: Sequence[int]) -> None:
    """A quantizer beside the encoder of a checkpoint."""
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=32, layers=list(layers))).eval()
    quantizer.initialize(torch.randn(300, 32, generator=torch.Generator().manual_seed(0)))
    write_quantizer(folder, quantizer)


def run_example(folder: Path) -> dict:
    """The variables of the card's example of codes, run on its folder in place of the Hub."""
    (codes,) = (part.text for part in parse((folder / "README.md").read_text()) if part.name == "codes")
    (example,) = re.findall(r"```python\n(.*?)```", codes, re.DOTALL)
    space: dict = {}
    exec(example.replace("user/model", str(folder)), space)
    return space


def test_a_quantizer_travels_with_the_code_that_loads_it(saved, tmp_path, run_bare):
    source = Path(shutil.copytree(saved, tmp_path / "source"))
    (source / CODE).unlink()  # lost on the way
    (source / "quantizer" / "notes.md").write_text("mine")
    files = set(lay_out(source, tmp_path / "staged").sizes())
    assert QUANTIZER_FILES | {CODE} < files and "quantizer/notes.md" not in files
    quantizer, vectors = Checkpoint(saved).quantizer, torch.randn(4, 32)
    torch.save(vectors, tmp_path / "vectors.pt")
    printed = run_bare(
        """
        import torch
        from transformers import AutoModel
        quantizer = AutoModel.from_pretrained("staged", subfolder="quantizer", trust_remote_code=True)
        codes = quantizer.encode(torch.load("vectors.pt"), "qama-2")
        print(quantizer.fingerprint, codes.packed.tolist())
        """
    )
    assert f"{quantizer.fingerprint} {quantizer.encode(vectors, 'qama-2').packed.tolist()}" in printed


@pytest.mark.parametrize("layers", [(2, 6), (2,), ()])
def test_the_lines_of_the_card_give_codes_of_the_layer_that_the_quantizer_reads(saved, tmp_path, layers):
    source = Path(shutil.copytree(saved, tmp_path / "source"))
    save_quantizer(source, layers)
    folder = lay_out(source, tmp_path / "staged").folder
    layer = 2 if layers == (2,) else 6
    encoder = Checkpoint(folder).encoder(Grid((Granularity(layer, 32),)))
    expected = encoder.encode(["a man plays the guitar"], role="document").widest(layer)
    codes = Checkpoint(folder).quantizer.encode(expected, "qama-2")
    assert torch.equal(run_example(folder)["codes"].packed[:1], codes.packed)


def test_a_quantizer_of_another_architecture(tmp_path, tiny_tokenizer):
    """Whose encoder needs no remote code, so that the code of the quantizer is put beside it."""
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4}
    save(tmp_path / "bert", BertModel(BertConfig(vocab_size=99, **sizes)), tiny_tokenizer)
    save_quantizer(tmp_path / "bert", layers=(2,))
    (tmp_path / "bert" / CODE).unlink()
    folder = lay_out(tmp_path / "bert", tmp_path / "staged").folder
    checkpoint = Checkpoint(folder)
    assert checkpoint.encoder_code() == set() and checkpoint.quantizer_code() == {CODE} == checkpoint.code().keys()
    assert run_example(folder)["codes"].packed.shape == (2, 12)


@pytest.mark.parametrize("size, fits", [("2x32", True), ("4x32", False), ("6x16", False)])
@pytest.mark.parametrize("format", ["elastic", "native"])
def test_a_part_keeps_the_quantizer_only_where_it_fits(saved, tmp_path, size, fits, format):
    publication = lay_out(saved, tmp_path / "part", granularity=Granularity.parse(size), format=format)
    files = set(publication.sizes())
    assert (QUANTIZER_FILES <= files) == fits == (CODE in files)
    assert ("section: codes" in (publication.folder / "README.md").read_text()) == fits
    if fits:
        assert Checkpoint(publication.folder).quantizer.fingerprint == Checkpoint(saved).quantizer.fingerprint
        assert run_example(publication.folder)["codes"].packed.shape == (2, 12)
    else:
        assert {*publication.left_out} >= {*QUANTIZER_FILES, CODE}


# --- Scores of codes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(saved, tmp_path_factory, sentences) -> GridResults:
    """Scores of the checkpoint in codes."""
    data = tmp_path_factory.mktemp("data")
    write_data(data, sentences)
    encoder = Checkpoint(saved).encoder(Grid.parse("2,6x16,32@float32,int8,qama-2,binary"))
    return evaluate_grid(encoder, find_tasks(["stsb", "cranfield"]), data, asymmetric=False)


def test_a_part_without_the_quantizer_has_no_scores_of_its_codes(scored, saved, tmp_path):
    results = replace(scored, weights=Checkpoint(saved).weights_fingerprint)
    folder = lay_out(saved, tmp_path / "part", results, granularity=Granularity(2, 16)).folder
    left = GridResults.load(folder / "results.json")
    assert left.granularities.codes == ["binary", "int8", "float32"]
    assert not any("qama" in score.granularity for score in left.scores)
    assert {search.code for search in left.rescored_searches} == {"int8", "binary"}
    whole = lay_out(saved, tmp_path / "whole", results, granularity=Granularity(2, 32)).folder
    assert "qama-2" in GridResults.load(whole / "results.json").granularities.codes
    assert "| size | float32 | int8 | qama-2 | binary |" in (whole / "README.md").read_text()


def test_codes_of_another_quantizer_are_refused(scored, saved, tmp_path):
    other = Path(shutil.copytree(saved, tmp_path / "other"))
    save_quantizer(other, layers=(2, 4, 6))
    refused("scores of qama-2 by another quantizer than that of", lay_out, other, tmp_path / "staged", scored)
