"""The sizes of an elastic repository that need no code: their names, their folders, and their branches on the Hub."""

import re
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from m3bert.commands import export
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.exports import choose_sizes, plain_sizes
from m3bert.hub_cards.publication import Options, prepare
from m3bert.hub_cards.upload import Publication
from m3bert.trainers import Granularity, Projection
from tests.conftest import assert_close, refused
from tests.elastic_repositories import WIDTH, save_sizes


SIZES = {"2-layers": Granularity(2, 32), "4-layers": Granularity(4, 32), "table": Granularity(0, 32)}


@pytest.fixture
def elastic(tmp_path, tiny_tokenizer) -> Path:
    save_sizes(tmp_path / "model", tiny_tokenizer, normalize=True)
    return tmp_path / "model"


def test_a_size_is_one_whose_export_gives_the_same_vectors(elastic, tmp_path, tiny_tokenizer):
    """Not depth 3, whose exit reads the table. A projection is of all depths in the space of the last layer."""
    assert plain_sizes(Checkpoint(elastic)) == SIZES
    assert [*choose_sizes(Checkpoint(elastic), ["table", "4", "4-layers"])] == ["table", "4-layers"]
    save_sizes(tmp_path / "projected", tiny_tokenizer, projection=Projection(WIDTH, 12))
    projected = {"4-layers": Granularity(4, 12), "table": Granularity(0, 12)}
    assert plain_sizes(Checkpoint(tmp_path / "projected")) == projected


def test_every_size_is_a_plain_folder(elastic, tmp_path):
    """With the vectors of the elastic model, and a README whose code runs. An older export is replaced."""
    (tmp_path / "out" / "5-layers").mkdir(parents=True)
    arguments = ["--format=native", "--model", str(elastic), "--output_dir", str(tmp_path / "out"), "--sizes", "all"]
    refused("holds 5-layers: pass --overwrite", export.main, arguments)
    export.main([*arguments, "--overwrite"])
    assert {folder.name for folder in (tmp_path / "out").iterdir()} == SIZES.keys()
    for name, size in SIZES.items():
        folder = tmp_path / "out" / name
        assert not [*folder.rglob("*.py"), *folder.rglob("*_Dense"), *folder.rglob("elastic")]
        code = {"trust_remote_code": True, "model_kwargs": {"output_layer": size.layer}}
        expected = SentenceTransformer(str(elastic), device="cpu", **code).encode(["read the list", "a name"])
        assert_close(SentenceTransformer(str(folder), device="cpu").encode(["read the list", "a name"]), expected)
        card = (folder / "README.md").read_text().replace("user/name", str(folder))
        snippets = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        assert len(snippets) == (2 if name == "table" else 1)  # model2vec reads the table, too
        for snippet in snippets:
            exec(snippet, space := {})
            assert space["vectors"].shape == (2, 32)
        assert size.layer != 4 or ("layers 1, 2, 5, 6 of an" in card and "- text-embeddings-inference" in card)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["3", "4"], "--sizes 3: .* no such size .*; legal values: 2, 4, table, all"),
        (["2", "--granularity", "4x32"], "--sizes needs --format native, and no --granularity"),
    ],
)
def test_other_sizes_are_refused(elastic, tmp_path, options, message):
    where = ["--model", str(elastic), "--output_dir", str(tmp_path / "out")]
    refused(message, export.main, ["--format=native", *where, "--sizes", *options])
    assert not (tmp_path / "out").exists()
    refused("sizes are those of a whole elastic repository", Options, Granularity(4, 32), sizes=("2",))


def test_the_card_names_the_branches_and_loads_one(elastic, tmp_path):
    folders = {name: tmp_path / "laid-out" / name for name in ("main", "2-layers", "table")}
    folders["main"].mkdir(parents=True)
    publication = prepare(Checkpoint(elastic), folders["main"], "user/model", Options(sizes=("2", "table")))
    assert publication.branches == {name: folders[name] for name in ("2-layers", "table")}
    card = (folders["main"] / "README.md").read_text()
    assert "The branches `2-layers`, `table` of this repository hold one size each." in card
    (line,) = re.findall(r"`(SentenceTransformer\(.*revision=.*\))`", card)
    assert eval(line, {"SentenceTransformer": lambda name, revision: (name, revision)}) == ("user/model", "2-layers")
    assert "branches" not in (folders["2-layers"] / "README.md").read_text()


def test_a_branch_has_the_files_of_its_folder_alone(only_hub, tmp_path):
    """Also after another push, and nothing of main, where files of a person stay."""
    for names in (["config.json", "old/a.txt"], ["config.json", "new.txt"]):
        main, branch = (tmp_path / names[1][:3] / name for name in ("main", "2-layers"))
        for file in (main / "notes.txt", *(branch / name for name in names)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(file.name)
        Publication(main, "user/model", [], {"2-layers": branch}).upload(token="hf_user")
        assert only_hub.files("user/model", "2-layers").keys() - {".gitattributes"} == {*names}
    assert only_hub.files("user/model").keys() == {".gitattributes", "notes.txt"}
