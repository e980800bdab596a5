"""The command that converts an encoder, and why it sometimes cannot."""

from __future__ import annotations

import pytest
import transformers

from modeling_m3bert import M3BertModel
from scripts.convert import main


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


def test_pooling_and_prompts_are_kept_or_left_out(minilm, tmp_path):
    main([minilm, str(tmp_path / "model")])
    assert (tmp_path / "model" / "modules.json").is_file() and (tmp_path / "model" / "1_Pooling").is_dir()
    main([minilm, str(tmp_path / "encoder"), "--encoder_only"])
    assert (tmp_path / "encoder" / "model.safetensors").is_file()
    assert not (tmp_path / "encoder" / "modules.json").exists()


def test_a_student_of_chosen_layers_is_written(minilm, tmp_path, capsys):
    main([minilm, str(tmp_path / "student"), "--student_layers", "1,4,6"])
    assert "3 layers, hidden size 384" in capsys.readouterr().out
    student = M3BertModel.from_pretrained(tmp_path / "student")
    assert student.config.source_layers == [1, 4, 6] and (tmp_path / "student" / "modules.json").is_file()
    with pytest.raises(ValueError, match="--student_layers 1,7 must be within 1..6, the depth of "):
        main([minilm, str(tmp_path / "none"), "--student_layers", "1,7"])


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path, tiny_tokenizer, run_module):
    config = transformers.ModernBertConfig(
        vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, cls_token_id=0, sep_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.ModernBertModel(config).save_pretrained(tmp_path / "source")
    tiny_tokenizer.save_pretrained(tmp_path / "source")
    done = run_module("scripts.convert", tmp_path / "source", tmp_path / "out")
    assert done.returncode == 1
    assert "ModernBertConfig cannot be converted exactly: model type 'modernbert' is no BERT" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_a_source_that_is_not_there_is_said_in_one_line(tmp_path, run_module):
    done = run_module("scripts.convert", tmp_path / "nowhere", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "nowhere" in done.stderr and "Traceback" not in done.stderr


def test_a_model_is_replaced_on_request_and_nothing_else(encoder_folder, tmp_path):
    source, out = str(encoder_folder), tmp_path / "out"
    main([source, str(out)])
    (out / "notes.txt").write_text("mine")
    (out / "1_Pooling").mkdir(exist_ok=True)
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    with pytest.raises(ValueError, match="out holds config.json: pass --overwrite to replace it, or name"):
        main([source, str(out)])
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before
    main([source, str(out), "--overwrite", "--encoder_only"])
    assert (out / "model.safetensors").is_file() and (out / "notes.txt").read_text() == "mine"
    assert not (out / "1_Pooling").exists()
    with pytest.raises(ValueError, match="is the source: name another folder for the result"):
        main([source, source, "--overwrite"])
    with pytest.raises(ValueError, match="is an m3BERT, so it is elastic already"):
        main([str(out), str(tmp_path / "again")])


def test_a_wrong_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(OSError, match=f"^{name} is not a folder, and could not be loaded from the Hub: "):
            main([name, "out"])
