"""The command that converts an encoder, and why it sometimes cannot."""

import pytest

from m3bert.commands.convert import main
from m3bert.modeling import M3BertModel
from tests.conftest import refused


def test_an_elastic_checkpoint_is_written(minilm, tmp_path, run_bare, capsys):
    main([minilm, str(tmp_path / "model")])
    assert "6 layers, hidden size 384" in capsys.readouterr().out
    printed = run_bare(
        """
        from transformers import AutoModel, AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained("model", trust_remote_code=True)
        model = AutoModel.from_pretrained("model", trust_remote_code=True, output_layer=4, output_dim=64)
        print(tuple(model(**tokenizer("a short text", return_tensors="pt")).last_hidden_state.shape))
        """
    )
    assert "(1, 5, 64)" in printed


def test_a_student_of_chosen_layers_is_written(minilm, tmp_path, capsys):
    main([minilm, str(tmp_path / "student"), "--student_layers", "1,4,6"])
    assert "3 layers, hidden size 384" in capsys.readouterr().out
    student = M3BertModel.from_pretrained(tmp_path / "student")
    assert student.config.source_layers == [1, 4, 6] and (tmp_path / "student" / "modules.json").is_file()
    with pytest.raises(ValueError, match="--student_layers 1,7 must be within 1..6, the depth of "):
        main([minilm, str(tmp_path / "none"), "--student_layers", "1,7"])


def test_a_model_is_replaced_on_request_and_nothing_else(encoder_folder, tmp_path):
    source, out = str(encoder_folder), tmp_path / "out"
    main([source, str(out)])
    (out / "notes.txt").write_text("mine")
    (out / "1_Pooling").mkdir(exist_ok=True)
    main([source, str(out), "--overwrite", "--encoder_only"])
    assert (out / "model.safetensors").is_file() and (out / "notes.txt").read_text() == "mine"
    assert not (out / "1_Pooling").exists()
    refused("is the source: name another folder for the result", main, [source, source, "--overwrite"])
    refused("model type 'm3bert' is no BERT", main, [str(out), str(tmp_path / "again")])
