"""Push and load, over HTTP, with the real clients: the local Hub is all that differs from the real one."""

import json
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from m3bert import modeling as modeling_m3bert
from m3bert.commands.push_to_hub import without_dry_run
from m3bert.hub_cards.adapter import Adapter
from m3bert.hub_cards.metadata import Statements
from m3bert.hub_cards.publication import Options, prepare
from m3bert.trainers import Granularity
from tests.conftest import HIDE_PROJECT, padded_batch, refused, save, tiny_config
from tests.elastic_repositories import save_sizes
from tests.published import GRID, contrastive_trainer, evaluated, save_with_exits


ROOT = Path(__file__).parent.parent.parent
TOKEN = "hf_user"
HEADS = {"masked-lm": "MaskedLM", "token": "TokenClassification"}


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_tokenizer, sentences) -> Path:
    """A folder with a finished run in `output`, its results beside it, and checkpoints with exits and of each head."""
    folder = tmp_path_factory.mktemp("run")
    trainer = contrastive_trainer(folder / "output", tiny_tokenizer, sentences)
    trainer.train()
    trainer.save_model()
    evaluated(folder / "output", folder / "data", sentences, latency=False).save(folder / "results.json")
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4}
    save(folder / "bert", transformers.BertModel(transformers.BertConfig(vocab_size=99, **sizes)), tiny_tokenizer)
    save_with_exits(folder / "exits", tiny_tokenizer, sentences)
    for name, head in HEADS.items():
        save(folder / name, getattr(modeling_m3bert, f"M3BertFor{head}")(tiny_config()), tiny_tokenizer)
    return folder


@pytest.fixture
def in_process(hub, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Run Python code whose Hub is the local one, with an empty cache; `bare` hides the project."""

    def call(code: str, *, token: str | None = TOKEN, bare: bool = False, **variables: str):
        environment = {k: v for k, v in os.environ.items() if not (bare and k == "PYTHONPATH")}
        cache = tmp_path / f"cache-{len(list(tmp_path.glob('cache-*')))}"
        environment |= {**hub.environment(cache, token), **variables}
        return subprocess.run(
            [sys.executable, *(["-I"] if bare else []), "-c", (HIDE_PROJECT if bare else "") + textwrap.dedent(code)],
            cwd=tmp_path if bare else ROOT, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    return call


@pytest.fixture
def push(in_process) -> Callable[..., subprocess.CompletedProcess]:
    """`python -m m3bert.commands.push_to_hub`; several command lines take turns in one process."""

    def call(*lines: list[object], **options):
        commands = [[str(part) for part in line] for line in lines]
        return in_process(
            f"""
            import sys
            from m3bert.commands import push_to_hub
            from m3bert.commands.command import run_command
            for line in {commands!r}:
                sys.argv = ["push_to_hub", *line]
                run_command(push_to_hub.main)
            """,
            **options,
        )

    return call


def error_line(done: subprocess.CompletedProcess) -> str:
    """What a failed command said: one line that begins with "error:", and no traceback."""
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and done.stderr.rstrip().endswith(lines[0]), done.stderr
    return lines[0]


@pytest.mark.slow
def test_every_kind_of_checkpoint_comes_back_from_an_empty_cache(run, hub, push, in_process, tmp_path):
    """And the examples of its card run, as they stand there."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    output = run / "output"
    done = push(
        [output, "user/base", "--results", run / "results.json", "--onnx", "2x8"],
        [output, "user/cut", "--granularity", "4x16"], [output, "user/quantized", "--quantize"],
        [run / "bert", "user/bert"], [run / "exits", "user/exits"],
        [run / "exits", "user/table", "--granularity", "0x16"], *([run / name, f"user/{name}"] for name in HEADS),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(hub.repos[f"user/{name}"].private for name in ("base", "cut", "quantized", *HEADS))
    first = hub.commits("user/base")[0].oid

    batch = padded_batch()
    save_file(batch, tmp_path / "batch.safetensors")
    loaded = in_process(
        f"""
        import sys, torch, transformers
        from huggingface_hub import hf_hub_download
        from safetensors.torch import load_file, save_file
        try:
            from m3bert import modeling as modeling_m3bert
            raise SystemExit("the project is visible")
        except ModuleNotFoundError:
            pass
        batch = load_file("batch.safetensors")
        outputs = {{}}
        def run(name, auto="AutoModel", **options):
            repo = "user/" + name.split("@")[0]
            model = getattr(transformers, auto).from_pretrained(repo, trust_remote_code=True, **options).eval()
            with torch.no_grad():
                outputs[name] = model(**batch)[0].contiguous()
        run("base", revision={first!r})
        run("base@4x16", output_layer=4, output_dim=16)
        run("cut")
        run("quantized")
        run("exits")
        run("exits@0x16", output_layer=0, output_dim=16)
        run("table")
        for name, head in {HEADS!r}.items():
            run(name, "AutoModelFor" + head)
        save_file(outputs, "outputs.safetensors")

        from sentence_transformers import SentenceTransformer
        options = {{"truncate_dim": 8, "model_kwargs": {{"output_layer": 2}}}}
        model = SentenceTransformer("user/base", trust_remote_code=True, **options)
        vectors = model.encode(["open the file", "read a list of names"])
        import onnxruntime
        session = onnxruntime.InferenceSession(hf_hub_download("user/base", "onnx/model_2x8.onnx"))
        tokenizer = transformers.AutoTokenizer.from_pretrained("user/base")
        inputs = tokenizer(["open the file", "read a list of names"], padding=True, return_tensors="np")
        feed = {{name: inputs[name] for name in ("input_ids", "attention_mask")}}
        print("onnx", abs(session.run(["sentence_embedding"], feed)[0] - vectors).max() < 1e-5, vectors.shape)

        import re
        ran = 0
        for name in {["base", "cut", "quantized", "bert", "exits", "table", *HEADS]!r}:
            card = open(hf_hub_download("user/" + name, "README.md")).read()
            for code in re.findall(r"^```python\\n(.*?)^```$", card, re.DOTALL | re.MULTILINE):
                assert "user/" + name in code
                exec(compile(code, "card of " + name, "exec"), {{}})
                ran += 1
        print("snippets", ran)
        """,
        bare=True,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert "onnx True (2, 8)" in loaded.stdout
    # transformers and sentence-transformers for each encoder, asymmetric search, ONNX, and one for each head.
    assert f"snippets {2 * 6 + 1 + 1 + len(HEADS)}" in loaded.stdout
    outputs = load_file(tmp_path / "outputs.safetensors")
    with torch.no_grad():
        model = transformers.AutoModel.from_pretrained(output).eval()
        assert torch.equal(outputs["base"], model(**batch)[0])
        assert torch.equal(outputs["base@4x16"], model(**batch, output_layer=4, output_dim=16)[0])
        assert torch.equal(outputs["cut"], outputs["base@4x16"])
        model = transformers.AutoModel.from_pretrained(run / "exits").eval()
        assert torch.equal(outputs["exits"], model(**batch)[0])
        assert torch.equal(outputs["table"], model(**batch, output_layer=0, output_dim=16)[0])
        assert torch.equal(outputs["table"], outputs["exits@0x16"])
        assert 0 < (outputs["quantized"] - outputs["base"]).abs().max() < 0.2
        for name, head in HEADS.items():
            model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(run / name).eval()
            assert torch.equal(outputs[name], model(**batch)[0]), name


@pytest.mark.slow
def test_every_size_is_a_revision_that_needs_no_code(hub, push, in_process, tmp_path, tiny_tokenizer):
    """Its vectors are those of the elastic model on `main`, which is the source without code."""
    folder, depths = tmp_path / "elastic", {"2-layers": 2, "4-layers": 4, "table": 0, "main": 6}
    save_sizes(folder, tiny_tokenizer)
    assert "legal values: 2, 4, table, all" in error_line(push([folder, "user/model", "--sizes", "5", "table"]))
    assert not hub.repos
    done = push([folder, "user/model", "--sizes", "all", "--license", "mit"])
    assert done.returncode == 0 and f"{hub.url}/user/model/tree/4-layers" in done.stdout, done.stderr
    loaded = in_process(
        f"""
        import re, torch
        from huggingface_hub import hf_hub_download
        from sentence_transformers import SentenceTransformer
        from transformers import AutoModel
        for name, depth in {depths!r}.items():
            code = {{"trust_remote_code": True, "model_kwargs": {{"output_layer": depth}}}}
            models = SentenceTransformer("user/model", revision=name), SentenceTransformer("user/model", **code)
            vectors = [model.encode(["open the file"], normalize_embeddings=True) for model in models]
            assert abs(vectors[0] - vectors[1]).max() < 1e-5, name
            if depth:
                model = AutoModel.from_pretrained("user/model", revision=name)
                assert type(model).__name__ == "BertModel" and len(model.encoder.layer) == depth
            if depth < 6:
                card = open(hf_hub_download("user/model", "README.md", revision=name)).read()
                snippets = re.findall(r"```python\\n(.*?)```", card, re.DOTALL)
                assert snippets and "license: mit" in card
                for snippet in snippets:
                    exec(snippet, run := {{}})
                    assert len(run["vectors"]) == 2 and f'revision="{{name}}"' in snippet
        """,
        bare=True,
    )
    assert loaded.returncode == 0, loaded.stderr


def test_a_dry_run_lists_everything_and_touches_nothing(run, hub, push, tmp_path):
    laid_out, line = tmp_path / "laid-out", ["user/model", "--dry_run"]
    done = push(
        [run / "output", *line, "--results", run / "results.json", "--output_dir", laid_out],
        *([run / "exits", *line, "--granularity", size] for size in ("2x16", "0x8")),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Nothing was pushed") == 3
    assert "stays here  checkpoint-2/optimizer.pt" in done.stdout
    written = {path.relative_to(laid_out).as_posix() for path in laid_out.rglob("*") if path.is_file()}
    assert {"README.md", "model.safetensors", "config.json", "results.json"} <= written
    assert all(re.search(rf"^ *[\d,]+  {re.escape(name)}$", done.stdout, re.MULTILINE) for name in written)
    assert not hub.repos and {request.method for request in hub.requests} <= {"HEAD", "GET"}


def test_the_command_after_a_dry_run_pushes():
    assert [*without_dry_run(["run", "--dry-run", "--output_dir=a", "me/it", "--output-dir", "a"])] == ["run", "me/it"]


@pytest.mark.slow
def test_a_second_push_changes_only_what_changed(run, hub, push, in_process):
    """And keeps what a person edits on the Hub, but no figures and graphs that it does not have itself."""
    line = [run / "output", "user/model", "--results", run / "results.json", "--onnx", "2x8"]
    done = push(line)
    assert done.returncode == 0, done.stderr
    first = hub.commits("user/model")
    graphs = {"onnx/model.onnx", "onnx/model_quantized.onnx", "onnx/model_2x8.onnx", "onnx/quality.json"}
    assert {"README.md", *graphs, "figures/heat_map_sts.png"} < set(first[0].changed)

    sent = len(hub.requests)
    assert push(line).returncode == 0
    assert [commit.oid for commit in hub.commits("user/model")] == [commit.oid for commit in first]
    assert not [request for request in hub.requests[sent:] if request.method == "PUT"]

    edit = in_process(
        """
        from huggingface_hub import HfApi, hf_hub_download
        card = open(hf_hub_download("user/model", "README.md")).read()
        card = card.replace("## Limits", "## Limits\\n\\n- Not for poetry.")
        HfApi().upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id="user/model")
        """
    )
    assert edit.returncode == 0, edit.stderr
    assert push([*line, "--license", "mit"]).returncode == 0
    assert list(hub.commits("user/model")[0].changed) == ["README.md"]
    card = hub.files("user/model")["README.md"].decode()
    assert "- Not for poetry." in card and "license: mit" in card

    assert push([run / "output", "user/model", "--onnx", "4x8", "--onnx_int8", "--onnx_fp16"]).returncode == 0
    files = set(hub.files("user/model"))
    assert "onnx/model_2x8.onnx" not in files and not any(name.startswith("figures/") for name in files)
    assert {"onnx/model_4x8_quantized.onnx", "onnx/model_4x8_fp16.onnx", "onnx/model_fp16.onnx"} < files


@pytest.mark.slow
def test_an_interrupted_upload_goes_on_where_it_stopped(run, hub, push, tmp_path, tiny_tokenizer):
    folder = tmp_path / "sharded"
    modeling_m3bert.M3BertModel(tiny_config()).save_pretrained(folder, max_shard_size="60KB")
    tiny_tokenizer.save_pretrained(folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) >= 3
    hub.uploads_left = 1
    assert "push again to continue" in error_line(push([folder, "user/model"]))

    def arrived(start: int = 0) -> int:
        return sum(r.received for r in hub.requests[start:] if r.method == "PUT" and r.status == 200)

    before, start = arrived(), len(hub.requests)
    assert before > 0 and len(hub.commits("user/model")) == 1
    hub.uploads_left = math.inf
    assert push([folder, "user/model"]).returncode == 0
    assert before + arrived(start) == sum(shard.stat().st_size for shard in shards)
    files = hub.files("user/model")
    assert all(files[shard.name] == shard.read_bytes() for shard in shards)


@pytest.mark.slow
def test_what_goes_wrong_ends_in_one_clear_line(run, hub, push):
    for message, repo, options in (
        ("401", "user/model", {"token": "hf_wrong"}),
        ("401", "user/model", {"token": None}),
        ("no right to write to the namespace other", "other/model", {}),
    ):
        assert message in error_line(push([run / "output", repo], **options))
    assert "Invalid rev id: v2" in error_line(push([run / "output", "user/model", "--revision", "v2"]))


@pytest.mark.slow
def test_the_token_is_in_no_file_log_or_traceback(run, hub, push, in_process, tmp_path):
    """With a token of the real form, every log switched on, and uploads that fail and that do not."""
    token = "hf_" + "Zq7" * 12
    hub.tokens = {token: "user"}
    debug = {"HF_DEBUG": "1", "TRANSFORMERS_VERBOSITY": "debug", "HF_HUB_VERBOSITY": "debug"}
    hub.uploads_left = 0
    outputs = [push([run / "output", "user/model"], token=token, **debug)]
    hub.uploads_left = math.inf
    outputs.append(push([run / "output", "user/model"], token=token, **debug))
    code = "from pathlib import Path; from m3bert.hub_cards.publication import publish; "
    code += f"publish(Path({str(run / 'output')!r}), 'nobody/model', token={token!r})"
    outputs.append(in_process(code, token=None, **debug))
    assert [done.returncode for done in outputs] == [1, 0, 1]
    assert "Traceback" in outputs[-1].stderr
    assert not any(token in done.stdout + done.stderr for done in outputs)
    files = [file for folder in (tmp_path, run) for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 20 and not any(token.encode() in file.read_bytes() for file in files)


@pytest.mark.slow
def test_a_trainer_publishes_what_the_command_does(run, hub, in_process):
    """`push_to_hub=True`, while it trains and at the end, and by hand with results; blocking and not."""
    done = in_process(
        f"""
        import json
        from transformers import AutoTokenizer
        from tests.published import contrastive_trainer, evaluated
        from m3bert.evaluation import GridResults
        from pathlib import Path
        run = Path({str(run)!r})
        tokenizer = AutoTokenizer.from_pretrained(run / "output")
        sentences = ["open the file", "read a list", "on the name", "to be or not"] * 12
        folder = run / "pushed"
        trainer = contrastive_trainer(
            folder, tokenizer, sentences, push_to_hub=True, hub_model_id="user/trained", hub_strategy="every_save",
            hub_token="hf_user", save_steps=1,
        )
        trainer.train()
        trainer._finish_current_push()
        print(trainer.push_to_hub(license="mit", language="en", tags="mine").oid)
        results = evaluated(folder, run / "data", sentences, latency=False)
        print(trainer.push_to_hub("With results", blocking=False, license="mit", results=results).result().oid)
        """,
        token=None,
    )
    assert done.returncode == 0, done.stderr
    history = hub.commits("user/trained")
    assert hub.repos["user/trained"].private
    assert history[0].message == "With results" and history[0].oid in done.stdout and len(history) >= 4
    steps = [commit.message for commit in history if "in progress" in commit.message]
    assert any("step 1" in message for message in steps)
    files = hub.files("user/trained")
    assert {"README.md", "results.json", "training.json", "modules.json", "model.safetensors"} < set(files)
    assert not any("optim" in name or "training_args" in name or "checkpoint" in name for name in files)
    card = files["README.md"].decode()
    assert "license: mit" in card and "- mine" in card and "spearman at 2x8" in card
    everything = [file for file in (run / "pushed").rglob("*") if file.is_file()]
    assert not any(b"hf_user" in file.read_bytes() for file in everything)


@pytest.fixture
def adapter(tmp_path, tiny_tokenizer, sentences) -> Path:
    """A folder with a `base` and the `adapter` that was trained for it."""
    save(tmp_path / "base", modeling_m3bert.M3BertModel(tiny_config()), tiny_tokenizer)
    base = modeling_m3bert.M3BertModel.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    trainer = contrastive_trainer(tmp_path / "adapter", tiny_tokenizer, sentences, adapted, learning_rate=0.1)
    trainer.train()
    trainer.save_model()
    return tmp_path


@pytest.mark.slow
def test_an_adapter_comes_back_on_its_base(adapter, hub, push, in_process):
    """As a repository of peft, in every library; and the examples of its card run, as they stand there."""
    line = [adapter / "adapter", "user/adapter", "--base_model", "user/base"]
    done = push([adapter / "base", "user/base"], line)
    assert done.returncode == 0, done.stderr
    files = hub.files("user/adapter")
    assert set(files) >= {"adapter_config.json", "adapter_model.safetensors", "training.json", "modules.json"}
    assert not {"model.safetensors", "config.json", "training_args.json"} & set(files)
    assert not [name for name, content in files.items() if str(adapter).encode() in content]
    card = ModelCard(files["README.md"].decode())
    described = {name: card.data[name] for name in ("base_model", "base_model_relation", "library_name")}
    assert described == {"base_model": "user/base", "base_model_relation": "adapter", "library_name": "peft"}
    assert {"lora", "matryoshka", "generated_from_trainer"} <= set(card.data.tags)
    assert "Objective: MRL" in card.text and f"`{GRID}`" in card.text

    batch = padded_batch()
    save_file(batch, adapter / "batch.safetensors")
    loaded = in_process(
        """
        import re, torch
        from huggingface_hub import ModelCard
        from peft import AutoPeftModelForFeatureExtraction, PeftModel
        from safetensors.torch import load_file, save_file
        from sentence_transformers import SentenceTransformer
        from transformers import AutoModel
        code = {"trust_remote_code": True}
        base = AutoModel.from_pretrained("user/base", **code)
        models = {
            "base": AutoModel.from_pretrained("user/base", **code),
            "peft": PeftModel.from_pretrained(base, "user/adapter"),
            "automatic": AutoPeftModelForFeatureExtraction.from_pretrained("user/adapter", **code),
            "transformers": AutoModel.from_pretrained("user/adapter", **code),
            "sentence_transformers": SentenceTransformer("user/adapter", device="cpu", **code).transformers_model,
        }
        batch = load_file("batch.safetensors")
        with torch.no_grad():
            outputs = {name: model.eval()(**batch)[0].contiguous() for name, model in models.items()}
        card = str(ModelCard.load("user/adapter"))
        examples = re.findall(r"^```python\\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
        for example in examples:
            space = {}
            exec(compile(example, "card", "exec"), space)
            if "small" in space:
                with torch.no_grad():
                    outputs["small"] = space["small"].eval()(**batch)[0].contiguous()
        print("examples", len(examples))
        save_file(outputs, "outputs.safetensors")
        """,
        bare=True,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert "examples 3" in loaded.stdout
    outputs = load_file(adapter / "outputs.safetensors")
    base = modeling_m3bert.M3BertModel.from_pretrained(adapter / "base")
    ours = PeftModel.from_pretrained(base, adapter / "adapter").eval()
    with torch.no_grad():
        expected, small = ours(**batch)[0], ours(**batch, output_layer=2, output_dim=8)[0]
    assert not torch.allclose(outputs.pop("base"), expected, atol=1e-3)
    torch.testing.assert_close(outputs.pop("small"), small)
    for name, output in outputs.items():
        torch.testing.assert_close(output, expected, msg=name)


def test_an_adapter_needs_its_base_and_stays_as_it_is(adapter):
    refused("which is not on the Hub: push the base model first", Adapter, adapter / "adapter")
    options = Options(Granularity.parse("2x8"), statements=Statements(base_model="user/base"))
    with pytest.raises(ValueError, match="published as it is: for results, granularity"):
        prepare(Adapter(adapter / "adapter", "user/base"), adapter, "user/adapter", options)


@pytest.mark.slow
def test_a_whole_model_and_an_adapter_replace_each_other(adapter, hub, push):
    line = [adapter / "adapter", "user/model", "--base_model", "user/base"]
    for lines, name in (([line, [adapter / "base", "user/model"]], "config.json"), ([line], "adapter_config.json")):
        assert push(*lines).returncode == 0
        files = {"config.json", "model.safetensors", "adapter_config.json"} & set(hub.files("user/model"))
        assert files == ({"config.json", "model.safetensors"} if name == "config.json" else {name})


@pytest.mark.slow
def test_a_trainer_publishes_its_adapter(adapter, hub, push, in_process):
    """With `push_to_hub`, for a base model on the Hub: while it trains, and at the end."""
    assert push([adapter / "base", "user/base"]).returncode == 0
    done = in_process(
        f"""
        from pathlib import Path
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModel, AutoTokenizer
        from tests.published import contrastive_trainer
        adapted = get_peft_model(AutoModel.from_pretrained("user/base"), LoraConfig(target_modules="all-linear"))
        sentences = ["open the file", "read a list", "on the name", "to be or not"] * 12
        trainer = contrastive_trainer(
            Path({str(adapter / "pushed")!r}), AutoTokenizer.from_pretrained("user/base"), sentences, adapted,
            push_to_hub=True, hub_model_id="user/pushed", hub_strategy="every_save", save_steps=1,
        )
        trainer.train()
        trainer.push_to_hub(license="mit")
        trainer.create_model_card("user/pushed", license="apache-2.0")
        assert "license: apache-2.0" in (Path(trainer.args.output_dir) / "README.md").read_text()
        """
    )
    assert done.returncode == 0, done.stderr
    files = hub.files("user/pushed")
    assert "adapter_model.safetensors" in files and "training_args.json" not in files
    assert any("step 1" in commit.message for commit in hub.commits("user/pushed"))
    card = ModelCard(files["README.md"].decode()).data
    assert (card.base_model, card.license) == ("user/base", "mit")


def test_a_trainers_card_is_that_of_its_run(tmp_path, tiny_tokenizer, sentences):
    trainer = contrastive_trainer(tmp_path / "run", tiny_tokenizer, sentences)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card("user/model", license="mit", dataset=["a/b"])
    card = (tmp_path / "run" / "README.md").read_text()
    assert "license: mit" in card and "Objective: MRL" in card and "of the data set [a/b](" in card
    assert json.loads((tmp_path / "run" / "training.json").read_text())["steps"] == 2
