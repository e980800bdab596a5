"""The model that the training command starts from: the first layers of another one, with or without dropout."""

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, Qwen3Config, Qwen3Model

from m3bert.commands import train
from m3bert.commands.backbone import BackboneArguments, load_backbone
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.modeling.configuration_elastic import Elasticity
from tests.conftest import refused, save, tiny_config


# Sizes of the tiny models in place of the published ones'.
TINY_MIPIC = [
    "--grid", "6x8,32", "--sia", "{layers: [2, 6], token_shares: [0.2]}", "--pic", "{chain: '2x8,6x32'}",
    "--per_device_train_batch_size", 8, "--bf16", "false",
]  # fmt: skip


def run(*arguments: object) -> None:
    train.main([str(argument) for argument in arguments])


def test_a_model_gets_the_attention_that_was_asked_for(tiny_checkpoint):
    for name in ("eager", "sdpa"):
        options = BackboneArguments(model_name_or_path=tiny_checkpoint, attn_implementation=name, peft="lora")
        model, _ = load_backbone(options, AutoModel)
        assert model.get_base_model().config._attn_implementation == name


def test_the_first_layers_of_an_m3bert_are_trained(text_files, tiny_checkpoint, quick_options):
    run(
        "contrastive", "--model_name_or_path", tiny_checkpoint, "--student_layers", 2, "--grid", "1,2x8",
        "--train_files", text_files / "pairs.jsonl", "--output_dir", text_files / "cut",
        "--per_device_train_batch_size", 8, *quick_options(max_steps=1),
    )  # fmt: skip
    assert len(M3BertModel.from_pretrained(text_files / "cut").layers) == 2


@pytest.mark.parametrize("layers", ["2", "1,4,6"])
def test_a_student_starts_with_the_layers_that_were_chosen(tiny_checkpoint, encoder_folder, tiny_tokenizer, layers):
    """Of an m3BERT with exits, with and without a head, and of a BERT."""
    chosen = [1, 2] if layers == "2" else [1, 4, 6]
    source = M3BertForMaskedLM(tiny_config())
    source.model.set_depths(exits={layer: (torch.eye(32), torch.zeros(32)) for layer in (2, 4)})
    source.save_pretrained(tiny_checkpoint)
    options = BackboneArguments(model_name_or_path=tiny_checkpoint, student_layers=layers)
    for auto_class in (AutoModel, AutoModelForMaskedLM):
        model, _ = load_backbone(options, auto_class)
        encoder = model.base_model
        assert len(encoder.layers) == encoder.config.num_hidden_layers == len(chosen)
        assert Elasticity.of(encoder.config).exits == ([2] if layers == "2" else [])
        for layer, number in zip(encoder.layers, chosen, strict=True):
            expected = source.model.layers[number - 1].state_dict()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in layer.state_dict().items())
    options = BackboneArguments(model_name_or_path=str(encoder_folder), student_layers=2)
    model, _ = load_backbone(options, AutoModel)
    assert len(model.layers) == 2 and model.config.name_or_path == str(encoder_folder)


def test_a_backbone_without_dropout_gets_some(text_files, quick_options):
    """As in the recipes of Qwen3: through an adapter, or through a value of the config."""
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 6, "num_attention_heads": 4}
    tokenizer = AutoTokenizer.from_pretrained(text_files / "tokenizer")
    qwen = Qwen3Config(vocab_size=99, num_key_value_heads=2, head_dim=8, pad_token_id=1, **sizes)
    save(text_files / "qwen", Qwen3Model(qwen), tokenizer)
    shared = ["--model_name_or_path", text_files / "qwen", "--train_files", text_files / "en.txt"]
    for recipe in ("mipic_qwen3", "mipic_qwen3_lora"):
        output = ["--output_dir", text_files / recipe]
        run("mipic", "--config", recipe, *shared, *output, *quick_options(max_steps=2), *TINY_MIPIC)
    assert (text_files / "mipic_qwen3" / "model.safetensors").is_file()
    assert (text_files / "mipic_qwen3_lora" / "adapter_model.safetensors").is_file()
    wrong = ["mipic", *shared, "--output_dir", text_files / "wrong", "--use_cpu", "--pooling", "lasttoken"]
    refused("Qwen3Model has no dropout", run, *wrong)
    with pytest.raises(ValueError, match="--model_config has values that the config of qwen3 lacks: atention_dropout"):
        run(*wrong, "--model_config", "{atention_dropout: 0.1}")
