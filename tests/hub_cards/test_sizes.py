"""The sizes of an elastic repository that need no code: their names, their folders, and their branches on the Hub."""

from __future__ import annotations

import json
import re

import pytest
from huggingface_hub import HfApi, constants
from sentence_transformers import SentenceTransformer

from m3bert.commands import export
from m3bert.hub_cards import upload
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.publication import Options, laid_out
from m3bert.hub_cards.sizes import choose_sizes, plain_sizes
from m3bert.hub_cards.upload import Publication
from m3bert.trainers import Granularity, Projection
from tests.conftest import assert_close
from tests.elastic_repositories import WIDTH, save_sizes


TEXTS = ["read the list", "a name", "open the file and read of it by name"]
SIZES = {"2-layers": Granularity(2, 32), "4-layers": Granularity(4, 32), "table": Granularity(0, 32)}


@pytest.fixture
def elastic(tmp_path, tiny_tokenizer):
    save_sizes(tmp_path / "model", tiny_tokenizer, normalize=True)
    return tmp_path / "model"


def test_a_size_is_one_whose_export_gives_the_same_vectors(elastic, tmp_path, tiny_tokenizer, minilm):
    """Not depth 3, whose exit reads the table; a projection is of the last layer and of exits alone."""
    assert plain_sizes(Checkpoint(elastic)) == SIZES
    assert [*choose_sizes(Checkpoint(elastic), ["table", "4", "4-layers"])] == ["table", "4-layers"]
    save_sizes(tmp_path / "projected", tiny_tokenizer, projection=Projection(WIDTH, 12))
    assert plain_sizes(Checkpoint(tmp_path / "projected")) == {"table": Granularity(0, 12)}
    with pytest.raises(ValueError, match="--sizes all: .* has no such size .*; legal values: none"):
        choose_sizes(Checkpoint(tmp_path / "model-source"), ["all"])


def test_every_size_is_a_plain_folder(elastic, tmp_path, capsys):
    """With the vectors of the elastic model, and a README whose code runs."""
    (tmp_path / "out" / "5-layers").mkdir(parents=True)
    arguments = ["--format", "native", "--model", str(elastic), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="holds 5-layers: pass --overwrite"):
        export.main([*arguments, "--sizes", "all"])
    export.main([*arguments, "--sizes", "all", "--overwrite"])
    assert {folder.name for folder in (tmp_path / "out").iterdir()} == SIZES.keys()
    assert "4-layers: BertModel, 4x32 of" in capsys.readouterr().out
    for name, size in SIZES.items():
        folder = tmp_path / "out" / name
        assert not [*folder.rglob("*.py"), *folder.rglob("*_Dense"), *folder.rglob("elastic")]
        options = {"trust_remote_code": True, "model_kwargs": {"output_layer": size.layer}}
        expected, found = (
            SentenceTransformer(str(source), device="cpu", **own).encode(TEXTS, prompt_name="query")
            for source, own in ((elastic, options), (folder, {}))
        )
        assert_close(found, expected)
        card = (folder / "README.md").read_text().replace("user/name", str(folder))
        for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
            exec(code, found_names := {})
            assert found_names["vectors"].shape == (2, 32)
    assert "with layers 1, 2, 5, 6 of an elastic encoder, made of `maker/encoder`" in (
        tmp_path / "out" / "4-layers" / "README.md").read_text()  # fmt: skip
    assert "- text-embeddings-inference" in (tmp_path / "out" / "2-layers" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--sizes", "3", "4"],
            "--sizes 3: .* no such size .*; legal values: 2, 4, table, all",
        ),
        (["--sizes", "2", "--granularity", "4x32"], "--sizes are those of --format native, at all dims"),
        (["--onnx", "--format", "static"], "--onnx is for --format native, not static"),
    ],
)
def test_other_sizes_are_refused(elastic, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        export.main(["--format=native", "--model", str(elastic), "--output_dir", str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()


def test_sizes_of_a_part_are_refused(elastic):
    with pytest.raises(ValueError, match="--sizes are those of a whole elastic repository"):
        with laid_out(elastic, "user/model", Options(Granularity(4, 32)), sizes=["2"], dry_run=True):
            pass


def test_graphs_are_written_on_request(elastic, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    arguments = ["--format", "native", "--model", str(elastic), "--output_dir", str(tmp_path / "out")]
    export.main([*arguments, "--sizes", "4", "--onnx"])
    (graph, *_) = json.loads((tmp_path / "out" / "4-layers" / "onnx" / "quality.json").read_text())["graphs"]
    assert (graph["file"], graph["granularity"]) == ("onnx/model.onnx", "4x32")


def test_a_branch_has_the_files_of_its_folder_alone(hub, tmp_path, monkeypatch):
    """Also after another push, and nothing of main, where files of a person stay."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(upload, "HfApi", lambda token: HfApi(hub.url, "hf_user"))
    for names in (["config.json", "old/b.txt"], ["config.json", "new.txt"]):
        main, branch = (tmp_path / names[1][:3] / name for name in ("main", "2-layers"))
        for file in (main / "notes.txt", *(branch / name for name in names)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(file.name)
        Publication(main, "user/model", [], {"2-layers": branch}).upload()
        assert hub.files("user/model", "2-layers").keys() - {".gitattributes"} == {*names}
    assert hub.files("user/model").keys() == {".gitattributes", "notes.txt"}
