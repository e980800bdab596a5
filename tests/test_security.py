"""Files of other people run no code, are read only in their own folder, and tokens go nowhere: see SECURITY.md."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from m3bert import modeling as modeling_m3bert
from m3bert.data.hub_data import load_hub
from m3bert.data.teacher import Teacher
from m3bert.encode.quantizer import find_quantizer
from m3bert.evaluation import GridEncoder, evaluate_grid, find_tasks
from m3bert.exits.fit import fit_exits
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.hub_cards.publication import Options, prepare
from m3bert.index.corpus import Corpus
from m3bert.index.index import Index
from m3bert.index.plan import Plan
from m3bert.models.auto import load_model
from m3bert.models.conversion import convert_to_m3bert
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Granularity
from m3bert.trainers.core.backbone import backbone_of
from tests.conftest import refused, save
from tests.evaluation_data import write_data
from tests.published import contrastive_trainer


class Payload:
    """Its pickle makes a folder when it is read."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def no_pickles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No pickle is read from a file. Returns the names of the files that torch reads with `weights_only`."""
    read: list[str] = []
    torch_load, numpy_load = torch.load, np.load

    def load(file: Any, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> Any:
        assert weights_only is True, f"torch.load of {file} without weights_only"
        read.append(Path(file).name if isinstance(file, str | os.PathLike) else "a stream")
        return torch_load(file, *args, weights_only=True, **kwargs)

    def load_numpy(file: Any, *args: Any, allow_pickle: bool = False, **kwargs: Any) -> Any:
        assert not allow_pickle, f"np.load of {file} with allow_pickle"
        return numpy_load(file, *args, allow_pickle=False, **kwargs)

    def refuse(file: Any, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(file, io.BytesIO), f"pickle.load of {file}"  # a message between own processes
        return unpickle(file, *args, **kwargs)

    unpickle = pickle.load
    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr(np, "load", load_numpy)
    monkeypatch.setattr(pickle, "load", refuse)
    return read


def test_the_guards_of_this_test_see_pickles(no_pickles, tmp_path):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(1))
    for read in (lambda f: pickle.load(f.open("rb")), torch.load, lambda f: np.load(f, allow_pickle=True)):
        with pytest.raises(AssertionError, match="load of"):
            read(tmp_path / "a.pkl")


def test_no_pickle_is_read_where_models_are_loaded_trained_evaluated_indexed_and_exported(
    no_pickles, tmp_path, tiny_tokenizer, encoder_folder, sentences
):
    """Beside the weights in safetensors lie pickles that make a folder when they are read."""
    output = tmp_path / "run"
    contrastive_trainer(output, tiny_tokenizer, sentences, save_steps=1).train()
    for folder in (output / "checkpoint-1", output / "checkpoint-2"):
        for name in ("pytorch_model.bin", "training_args.bin", "objective.bin", "model.pt"):
            (folder / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    trainer = contrastive_trainer(output, tiny_tokenizer, sentences)
    trainer.train(resume_from_checkpoint=str(output / "checkpoint-1"))
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth"} == set(no_pickles), (
        "of the training run, all else is none"
    )
    no_pickles.clear()

    model = output / "checkpoint-2"
    encoder = GridEncoder.from_pretrained(model, grid="2,6x8,32")
    data = write_data(tmp_path / "data", sentences)
    evaluate_grid(encoder, find_tasks(["stsb", "cranfield"]), data, folder=tmp_path / "parts")
    Teacher(str(model)).embed(sentences[:4], tmp_path / "cache")
    corpus = Corpus([str(data / "cranfield" / "corpus.jsonl.gz")], id_column="id")
    plan = Plan(Granularity(6, 8))
    index = Index.build(tmp_path / "index", "faiss", plan, encoder, corpus)
    index.close()
    assert Index.open(tmp_path / "index", encoder).search(sentences[:1])
    fit_exits(AutoModel.from_pretrained(model), tiny_tokenizer, sentences, layers=[2])
    save(tmp_path / "converted", convert_to_m3bert(encoder_folder), tiny_tokenizer)
    export_native(Checkpoint(tmp_path / "converted"), tmp_path / "native", Granularity(1, 20))
    (tmp_path / "staged").mkdir()
    prepare(Checkpoint(model), tmp_path / "staged", "user/model")
    assert not no_pickles and not (tmp_path / "ran").exists()
    assert not [*(tmp_path / "staged").rglob("*.bin")]


@pytest.fixture
def pickled(tmp_path, encoder_folder) -> Path:
    """An encoder whose weights are a pickle."""
    folder = Path(shutil.copytree(encoder_folder, tmp_path / "pickled"))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    return folder


@pytest.fixture
def sharded(tmp_path, encoder_folder) -> Path:
    """An encoder whose index names weights in another folder."""
    folder = Path(shutil.copytree(encoder_folder, tmp_path / "sharded"))
    other = tmp_path / "other.safetensors"
    (folder / "model.safetensors").rename(other)
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors.part")
    index = {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


LOADERS: dict[str, Callable[[Path], Any]] = {
    "load_model": load_model,
    "GridEncoder": GridEncoder.from_pretrained, "trainer": lambda folder: backbone_of(str(folder), None, AutoModel),
    "convert": convert_to_m3bert, "teacher": lambda folder: Teacher(str(folder)).load(), "Checkpoint": Checkpoint,
}  # fmt: skip


@pytest.mark.parametrize("name", LOADERS)
def test_weights_that_are_a_pickle_are_refused(name, pickled, tmp_path):
    with pytest.raises((OSError, ValueError), match="safetensors"):
        LOADERS[name](pickled)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", LOADERS)
def test_an_index_of_weights_names_files_of_its_folder_only(name, sharded):
    if name == "Checkpoint":
        shutil.copy(sharded.parent / "other.safetensors", sharded / "model-1.safetensors")
    refused(r"index.json names '../other.safetensors', which is not a file of its folder", LOADERS[name], sharded)


def test_a_quantizer_is_read_from_its_folder_only(sharded):
    shutil.move(sharded, sharded.parent / "model" / "quantizer")
    (sharded.parent / "model" / "quantizer" / "config.json").write_text('{"model_type": "m3bert_quantizer"}')
    refused("which is not a file of its folder", find_quantizer, str(sharded.parent / "model"))


@pytest.mark.parametrize("path", ["../other", "/etc", "..", "a/../../b", "1_Pooling/../.."])
def test_a_module_is_in_a_folder_of_its_model(path, tiny_checkpoint):
    kinds = {"Transformer": "", "Pooling": path}
    modules = [{"idx": 0, "path": at, "type": f"sentence_transformers.models.{kind}"} for kind, at in kinds.items()]
    Path(tiny_checkpoint, "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=f"modules.json of .* names '{path}', which is not a folder of the model"):
        EmbeddingSettings.find(tiny_checkpoint)


@pytest.mark.parametrize("code", ["/etc/passwd.Model", "../../elsewhere.Model", "user/other--../x.Model"])
def test_a_config_names_code_of_its_folder_only(code, tiny_checkpoint):
    file = Path(tiny_checkpoint, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {"AutoModel": code}}))
    with pytest.raises(ValueError, match=r"config.json names the code .*, which is not a Python file of its folder"):
        Checkpoint(Path(tiny_checkpoint)).code()


@pytest.mark.parametrize("path", ["../secret.csv", "{folder}/secret.csv"])
def test_the_card_of_a_data_set_names_files_of_its_folder_only(path, tmp_path):
    (tmp_path / "secret.csv").write_text("text\nsecret\n")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("text\nours\n")
    assert load_hub(str(tmp_path / "set"))["text"][:] == ["ours"]
    named = path.format(folder=tmp_path)
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {named}\n---\n"
    (tmp_path / "set" / "README.md").write_text(card)
    refused(r"secret.csv, which is outside of the data set\.$", load_hub, str(tmp_path / "set"))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("how", ["pickle", "torch", "cut"])
def test_the_state_of_a_strangers_run_runs_no_code(name, how, tmp_path, tiny_tokenizer, sentences):
    output = tmp_path / "run"
    contrastive_trainer(output, tiny_tokenizer, sentences, save_steps=1).train()
    file = output / "checkpoint-1" / name
    if how == "pickle":
        file.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    elif how == "torch":
        torch.save({"state": Payload(tmp_path / "ran")}, file)
    else:
        file.write_bytes(file.read_bytes()[:100])
    trainer = contrastive_trainer(output, tiny_tokenizer, sentences)
    refused(r"state in .*checkpoint-1 cannot be read: .+", trainer.train, str(output / "checkpoint-1"))
    assert not (tmp_path / "ran").exists()


def test_code_that_is_not_the_packages_is_published_only_if_told(tiny_checkpoint, tmp_path):
    checkpoint, file = Checkpoint(Path(tiny_checkpoint)), Path(tiny_checkpoint, "modeling_m3bert.py")
    assert checkpoint.other_code() == []
    file.write_text(file.read_text() + "\nprint('ours')\n")
    for name in ("refused", "told"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"^modeling_m3bert.py in .* differs from .*: remove it .*\(--own_code\)"):
        prepare(checkpoint, tmp_path / "refused", "user/model")
    published = prepare(checkpoint, tmp_path / "told", "user/model", Options(own_code=True)).folder
    card = (published / "README.md").read_text()
    digests = Checkpoint(published).code_digests()
    assert len(digests) >= 2 and all(f"| `{name}` | `{digest}` |" in card for name, digest in digests.items())
    file.unlink()
    (tmp_path / "again").mkdir()
    again = prepare(checkpoint, tmp_path / "again", "user/model").folder
    own = Path(modeling_m3bert.__file__).with_name(file.name)
    assert (again / file.name).read_bytes() == own.read_bytes()
