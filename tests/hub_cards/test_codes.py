"""A published quantizer: it travels with the encoder that it reads, and the card's lines load it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModel, BertConfig, BertModel

from hub_cards.card import CardSource, render_card
from hub_cards.checkpoint import Checkpoint
from hub_cards.codes import without_learned_codes
from hub_cards.mteb_meta import weight_bytes
from hub_cards.native_export import export_native
from hub_cards.publication import Options, prepare
from modeling_m3bert import M3BertQuantizer, M3BertQuantizerConfig
from tests.evaluation_data import write_data
from tests.modeling_m3bert.test_native_m3bert import BIASES, POST_NORM
from tests.published import save_with_exits
from trainers import Granularity, Grid
from trainers.core.objective import Identity
from trainers.core.papers import QAMA
from trainers.evaluation import GridResults, evaluate_grid, find_tasks
from trainers.hub.quantizer import write_quantizer
from trainers.hub.training_record import TrainingRecord, parts_of


QUANTIZER_FILES = {"quantizer/config.json", "quantizer/model.safetensors"}
CODE = "quantization_m3bert.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_tokenizer, sentences) -> Path:
    """A post-norm m3BERT with exits, which can be cut and exported, and a quantizer for layers 2 and 6."""
    folder = tmp_path_factory.mktemp("quantizer") / "model"
    save_with_exits(folder, tiny_tokenizer, sentences, **POST_NORM, **BIASES)
    save_quantizer(folder, layers=(2, 6))
    return folder


def save_quantizer(folder: Path, width: int = 32, layers: Sequence[int] = (6,)) -> M3BertQuantizer:
    """A quantizer beside the encoder of a checkpoint."""
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=width, layers=list(layers))).eval()
    quantizer.initialize(torch.randn(300, width, generator=torch.Generator().manual_seed(0)))
    write_quantizer(folder, quantizer)
    return quantizer


def lay_out(source: Path, folder: Path, results: GridResults | None = None, **options):
    folder.mkdir()
    return prepare(Checkpoint(source), folder, "user/model", Options(**options), results)


def section(card: str, name: str) -> str:
    return re.search(rf"<!-- section: {name} \w+ -->\n(.*?)<!-- end", card, re.DOTALL)[1]


def run_example(card: str, folder: Path) -> dict:
    """The variables of the card's example of codes, run on a folder in place of the Hub."""
    (example,) = re.findall(r"```python\n(.*?)```", section(card, "codes"), re.DOTALL)
    space: dict = {}
    exec(example.replace("user/model", str(folder)), space)
    return space


def test_a_quantizer_travels_with_the_code_that_loads_it(saved, tmp_path, run_bare):
    source = Path(shutil.copytree(saved, tmp_path / "source"))
    (source / CODE).unlink()  # lost on the way
    (source / "quantizer" / "notes.md").write_text("mine")
    publication = lay_out(source, tmp_path / "staged")
    files = set(publication.sizes())
    assert QUANTIZER_FILES | {CODE} < files and "quantizer/notes.md" not in files
    own = Checkpoint(saved).quantizer
    vectors = torch.randn(4, 32)
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
    assert f"{own.fingerprint} {own.encode(vectors, 'qama-2').packed.tolist()}" in printed


def test_the_lines_of_the_card_give_codes(saved, tmp_path):
    folder = lay_out(saved, tmp_path / "staged").folder
    card = (folder / "README.md").read_text()
    space = run_example(card, folder)
    quantizer = Checkpoint(folder).quantizer
    expected = Checkpoint(folder).encoder(Grid.parse("6x32")).encode(["a man plays the guitar"], role="document")
    codes = quantizer.encode(expected.widest(6), "qama-2")
    assert torch.equal(space["codes"].packed[:1], codes.packed) and space["codes"].packed.shape == (2, 12)
    assert "uint8, 12 bytes per vector" in card and "the 32 numbers of depths 2 and 6" in card
    assert "| `qama-2` | one of 4 learned levels per dim | 12 |" in card
    assert "quality of the codes of its quantizer" in section(card, "limits")
    assert QAMA.link in section(card, "codes") and QAMA.title in section(card, "citation")


def test_a_checkpoint_without_a_quantizer_says_nothing_of_one(run, tmp_path):
    folder = lay_out(run / "output", tmp_path / "staged").folder
    assert not any("quantiz" in name for name in lay_out(run / "output", tmp_path / "again").sizes())
    card = (folder / "README.md").read_text()
    assert "quantizer" not in card and QAMA.title not in card and "section: codes" not in card


@pytest.mark.parametrize("layers, expected", [((2,), 'model_kwargs={"output_layer": 2}'), ((), None)])
def test_the_example_reads_the_layer_that_the_quantizer_reads(saved, tmp_path, layers, expected):
    source = Path(shutil.copytree(saved, tmp_path / "source"))
    save_quantizer(source, layers=layers)
    card = str(render_card(CardSource("user/model", Checkpoint(source))))
    assert ("output_layer" in section(card, "codes")) == (expected is not None)
    assert expected is None or expected in section(card, "codes")
    assert run_example(card, source)["codes"].packed.shape == (2, 12)


def test_a_quantizer_of_another_architecture(tmp_path, tiny_tokenizer):
    """Whose encoder needs no remote code, so that the code of the quantizer is put beside it."""
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=99, **sizes)).save_pretrained(tmp_path / "bert")
    tiny_tokenizer.save_pretrained(tmp_path / "bert")
    save_quantizer(tmp_path / "bert", layers=(2,))
    (tmp_path / "bert" / CODE).unlink()
    folder = lay_out(tmp_path / "bert", tmp_path / "staged").folder
    checkpoint = Checkpoint(folder)
    assert checkpoint.encoder_code() == set() and checkpoint.quantizer_code() == {CODE} == checkpoint.code().keys()
    card = (folder / "README.md").read_text()
    assert 'config_kwargs={"num_hidden_layers": 2}' in card and "The encoder needs no remote code." in card
    assert run_example(card, folder)["codes"].packed.shape == (2, 12)


def test_the_training_of_a_quantizer_is_told(saved, tmp_path):
    source = Path(shutil.copytree(saved, tmp_path / "source"))
    record_of(source / "quantizer")
    publication = lay_out(source, tmp_path / "staged")
    assert "quantizer/training.json" in publication.sizes()
    codes = section((publication.folder / "README.md").read_text(), "codes")
    assert "`QAMATrainer`, 7 steps of 8 rows, of 48 rows" in codes and "`temperature`" in codes
    assert f"| QAMA | sum of losses | [{QAMA.title}]({QAMA.link}) |" in codes, "a paper that is not on arXiv"
    assert Checkpoint(publication.folder).record is None


def record_of(folder: Path) -> None:
    TrainingRecord(
        trainer="QAMATrainer",
        objective="QAMA",
        parts=parts_of(Identity("QAMA", "sum of losses", (QAMA,), ())),
        tags=[],
        grid="6x8,16,32",
        base_model=None,
        earlier=[],
        settings={"temperature": 0.1},
        columns=["text"],
        rows=48,
        datasets=[],
        steps=7,
        batch_size=8,
        seed=0,
    ).save(folder)


# --- A part of the checkpoint -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, kept", [("6x32", True), ("2x32", True), ("4x32", False), ("6x16", False), ("2x8", False)]
)
@pytest.mark.parametrize("format", ["elastic", "native"])
def test_a_part_keeps_the_quantizer_only_where_it_fits(saved, tmp_path, size, kept, format):
    publication = lay_out(saved, tmp_path / "part", granularity=Granularity.parse(size), format=format)
    files = set(publication.sizes())
    assert (QUANTIZER_FILES <= files) == kept == (CODE in files)
    card = (publication.folder / "README.md").read_text()
    assert ("section: codes" in card) == kept
    if kept:
        checkpoint = Checkpoint(publication.folder)
        assert checkpoint.quantizer.fingerprint == Checkpoint(saved).quantizer.fingerprint
        assert run_example(card, publication.folder)["codes"].packed.shape == (2, 12)
        assert not QUANTIZER_FILES & {*publication.left_out}
    else:
        assert not any("quantiz" in name for name in files)
        assert {*publication.left_out} >= {*QUANTIZER_FILES, CODE}


def test_a_native_export_says_what_it_leaves_out(saved, tmp_path, caplog):
    export_native(Checkpoint(saved), tmp_path / "whole")
    assert not caplog.records and (tmp_path / "whole" / "quantizer" / "model.safetensors").is_file()
    quantizer = AutoModel.from_pretrained(tmp_path / "whole", subfolder="quantizer", trust_remote_code=True)
    assert quantizer.fingerprint == Checkpoint(saved).quantizer.fingerprint
    export_native(Checkpoint(saved), tmp_path / "part", Granularity(4, 16))
    assert (
        "The quantizer is left out: the quantizer reads 32 dims (layers: 2, 6), and this model is 4x16." in caplog.text
    )
    assert not (tmp_path / "part" / "quantizer").exists()


def test_mteb_counts_the_encoder_alone(saved, tmp_path):
    before = weight_bytes(saved)
    shutil.rmtree(Path(shutil.copytree(saved, tmp_path / "alone")) / "quantizer")
    assert weight_bytes(tmp_path / "alone") == before


# --- Scores of codes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(saved, tmp_path_factory, sentences) -> GridResults:
    """Scores of the checkpoint in codes."""
    data = tmp_path_factory.mktemp("data")
    write_data(data, sentences)
    encoder = Checkpoint(saved).encoder(Grid.parse("2,6x16,32@float32,int8,qama-2,binary"))
    return evaluate_grid(encoder, find_tasks(["stsb", "cranfield"]), data, asymmetric=False)


def test_the_card_shows_bits(scored, saved, tmp_path):
    folder = lay_out(saved, tmp_path / "staged", scored).folder
    card = (folder / "README.md").read_text()
    evaluation = section(card, "evaluation")
    assert "### Bits" in evaluation and evaluation.count("| size | float32 | int8 | qama-2 | binary |") == 2
    assert "| 20 rescored by codes | 20 rescored by int8 | 20 rescored by float32 |" in evaluation
    assert "](figures/quality_by_code.png)" in evaluation and (folder / "figures/quality_by_code.png").is_file()
    assert "quality of the codes of its quantizer" not in card and "although their bytes are listed" not in card
    stsb = {s.granularity: s.value for s in scored.scores if s.task == "stsb" and s.main}
    qama, whole = stsb["6x32@qama-2"], stsb["6x32"]
    assert f"| {100 * qama:.1f} ({100 * qama / whole:.1f}%, 12 B) |" in evaluation
    assert f"| {100 * stsb['6x32@binary']:.1f} ({100 * stsb['6x32@binary'] / whole:.1f}%, 4 B) |" in evaluation


def test_scores_of_codes_never_pass_as_those_of_the_model(scored, saved, tmp_path):
    folder = lay_out(saved, tmp_path / "staged", scored).folder
    data = ModelCard.load(folder / "README.md").data
    named = {(e.dataset_name, "{layer}x{dim}".format(**e.metric_args)): e.metric_value for e in data.eval_results}
    floats = {(s.task, s.granularity): s.value for s in scored.scores if s.main and "@" not in s.granularity}
    assert named == pytest.approx(floats, abs=1e-6) and len(data.eval_results) == len(floats) == 8


def test_a_part_without_the_quantizer_has_no_scores_of_its_codes(scored, saved, tmp_path):
    results = replace(scored, weights=Checkpoint(saved).weights_fingerprint)
    folder = lay_out(saved, tmp_path / "part", results, granularity=Granularity(2, 16)).folder
    kept = GridResults.load(folder / "results.json")
    assert kept.granularities.codes == ["binary", "int8", "float32"]
    assert not any("qama" in score.granularity for score in kept.scores)
    assert {search.code for search in kept.rescored_searches} == {"int8", "binary"}
    assert "qama" not in section((folder / "README.md").read_text(), "evaluation")
    whole = lay_out(saved, tmp_path / "whole", results, granularity=Granularity(2, 32)).folder
    assert "qama-2" in GridResults.load(whole / "results.json").granularities.codes


def test_codes_of_another_quantizer_are_refused(scored, saved, tmp_path):
    other = Path(shutil.copytree(saved, tmp_path / "other"))
    save_quantizer(other, layers=(2, 4, 6))
    with pytest.raises(ValueError, match="scores of qama-2 by another quantizer than that of"):
        lay_out(other, tmp_path / "staged", scored)
    shutil.rmtree(other / "quantizer")
    with pytest.raises(ValueError, match="scores of qama-2 by another quantizer than that of"):
        lay_out(other, tmp_path / "again", scored)


def test_results_of_nothing_but_learned_codes_cannot_go_without_them(coded):
    grid = Grid.parse("6x8,16@qama-2")
    only = replace(coded, grid=str(grid), scores=[s for s in coded.scores if "qama" in s.granularity])
    with pytest.raises(ValueError, match="codes of a quantizer only .6x8,16@qama-2., which is not published"):
        without_learned_codes(only)
    assert without_learned_codes(coded).granularities == Grid.parse("4,6x8,16@float32,int8,binary")
