"""Pipelines and Auto classes of transformers, at the full size and at a granularity, without this project."""

import torch
from safetensors.torch import save_file

from m3bert import modeling as modeling_m3bert
from tests.conftest import save, tiny_config


TEXT = "read the <mask> of a file"
SIZES = {"full": {}, "small": {"output_layer": 4, "output_dim": 8}}
HEADS = {
    "feature-extraction": ("AutoModel", modeling_m3bert.M3BertModel),
    "fill-mask": ("AutoModelForMaskedLM", modeling_m3bert.M3BertForMaskedLM),
    "text-classification": ("AutoModelForSequenceClassification", modeling_m3bert.M3BertForSequenceClassification),
    "token-classification": ("AutoModelForTokenClassification", modeling_m3bert.M3BertForTokenClassification),
}
BARE = """
import torch, transformers
from safetensors.torch import load_file

expected = load_file("expected.safetensors")
close = lambda found, wanted: torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-5, rtol=1e-5)
for size, options in {sizes}.items():
    for task, auto in {autos}.items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(task)
        model = getattr(transformers, auto).from_pretrained(task, trust_remote_code=True, **options).eval()
        inputs = tokenizer({text!r}, return_tensors="pt")
        with torch.no_grad():
            scores = model(**inputs)[0]
        torch.testing.assert_close(scores, expected[f"{{task}} {{size}}"])
        run = transformers.pipeline(task, model=task, trust_remote_code=True, model_kwargs=dict(options))
        chances = scores[0].softmax(-1)
        if task == "feature-extraction":
            close(run({text!r}), scores)
        elif task == "fill-mask":
            (place,) = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0].tolist()
            found = {{entry["token"]: entry["score"] for entry in run({text!r}, top_k=len(tokenizer))}}
            close([found[token] for token in range(len(tokenizer))], chances[place])
        elif task == "text-classification":
            found = {{entry["label"]: entry["score"] for entry in run({text!r}, top_k=None)}}
            close([found["LABEL_0"], found["LABEL_1"]], chances)
        else:
            found = run({text!r})
            assert [entry["entity"] for entry in found] == [f"LABEL_{{row.argmax()}}" for row in chances[1:-1]]
            close([float(entry["score"]) for entry in found], chances[1:-1].amax(-1))
        print("PASSED", size, task)
"""


def test_pipelines_give_what_the_model_gives(tiny_tokenizer, tmp_path, run_bare):
    expected = {}
    for task, (_, head) in HEADS.items():
        model = head(tiny_config(vocab_size=len(tiny_tokenizer))).eval()
        save(tmp_path / task, model, tiny_tokenizer)
        for size, options in SIZES.items():
            with torch.no_grad():
                outputs = model(**tiny_tokenizer(TEXT, return_tensors="pt"), **options)
            expected[f"{task} {size}"] = outputs[0].contiguous()
    save_file(expected, tmp_path / "expected.safetensors")
    assert not any(
        expected[f"{task} full"].shape == expected[f"{task} small"].shape
        and torch.allclose(expected[f"{task} full"], expected[f"{task} small"], atol=1e-3)
        for task in HEADS
    )
    autos = {task: auto for task, (auto, _) in HEADS.items()}
    printed = run_bare(BARE.format(text=TEXT, sizes=SIZES, autos=autos))
    assert printed.count("PASSED") == len(SIZES) * 4
