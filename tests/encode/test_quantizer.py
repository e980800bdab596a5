"""The quantizer of a checkpoint is found and used by the command line."""

import pytest
import torch

from m3bert.commands.encoder import EncoderArguments, load_encoder
from m3bert.encode.quantizer import find_quantizer, write_quantizer
from m3bert.modeling.quantization_m3bert import M3BertQuantizer, M3BertQuantizerConfig
from tests.conftest import save


@pytest.fixture
def checkpoint(tiny_model, tiny_tokenizer, tmp_path) -> str:
    return str(save(tmp_path, tiny_model, tiny_tokenizer))


@pytest.fixture
def quantizer() -> M3BertQuantizer:
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=32, layers=[6]))
    quantizer.initialize(torch.randn(200, 32))
    return quantizer


def test_a_written_quantizer_is_found_and_gives_the_same_codes(checkpoint, quantizer):
    assert find_quantizer(checkpoint) is None
    write_quantizer(checkpoint, quantizer)
    actual, vectors = find_quantizer(checkpoint), torch.randn(9, 32)
    assert actual.fingerprint == quantizer.fingerprint and not actual.training
    for code in ("qama-2", "qama-0.5"):
        assert torch.equal(actual.encode(vectors, code, 13).packed, quantizer.encode(vectors, code, 13).packed)


def test_a_command_reads_codes_with_the_quantizer_of_the_checkpoint(checkpoint, quantizer):
    grid = "6x16@float32,int8,qama-2"
    with pytest.raises(ValueError, match="6x16@qama-2: these precisions need a quantizer, and the encoder has none"):
        load_encoder(EncoderArguments(model_name_or_path=checkpoint, grid=grid))
    write_quantizer(checkpoint, quantizer)
    encoder = load_encoder(EncoderArguments(model_name_or_path=checkpoint, grid=grid))
    assert encoder.quantizer.fingerprint == quantizer.fingerprint and str(encoder.grid) == "6x16@qama-2,int8,float32"
    with pytest.raises(ValueError, match="2x16@qama-2: the quantizer is for embeddings of layer 6"):
        load_encoder(EncoderArguments(model_name_or_path=checkpoint, grid="2x16@qama-2"))
