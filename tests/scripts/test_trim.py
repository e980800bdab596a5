"""Vocabularies of real tokenizers, trimmed to some texts: equal tokens and hidden states, a smaller repository."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from m3bert.commands.trim import main as trim
from m3bert.modeling import M3BertForMaskedLM
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.models.trim import trim as trim_to
from m3bert.models.vocabulary import Vocabulary
from tests.conftest import refused, save, tiny_config
from tests.elastic_repositories import WIDTH, save_elastic


ROOT = Path(__file__).parents[2]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PROMPTS = {"query": "query: ", "document": "passage: "}
LINES = [line.strip() for line in (ROOT / "docs" / "exits.md").read_text("utf-8").splitlines() if line.strip()]
OTHERS = ["Ein Haus für Zürich", "naïve ~ quux", "fitted", "日本 text 日", "a  b"]
KINDS = ["wordpiece", "byte-level bpe", "bpe with byte fallback", "bpe with suffix", "unigram", "unigram with bytes"]


def trained(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one kind, trained on a page of the documentation."""
    options = {"vocab_size": 700, "special_tokens": SPECIAL, "show_progress": False}
    bytes_of = [f"<0x{number:02X}>" for number in range(256)]
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(**options)
    elif kind == "byte-level bpe":
        tokenizer, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=level.alphabet(), **options)
    elif kind == "bpe with byte fallback":
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(**{**options, "special_tokens": SPECIAL + bytes_of, "vocab_size": 950})
    elif kind == "bpe with suffix":
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(end_of_word_suffix="</w>", **options)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="[UNK]", **options)
    tokenizer.train_from_iterator(LINES, trainer)
    if kind == "unigram with bytes":
        values = json.loads(tokenizer.to_str())
        values["model"]["vocab"] += [[token, -20.0] for token in bytes_of]
        values["model"]["byte_fallback"] = True
        tokenizer = Tokenizer.from_str(json.dumps(values))
    frame = [("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=frame
    )
    tokenizer.add_special_tokens(["[EXTRA]"])  # after the model's own tokens
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]")
    tokenizer.enable_truncation(16)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)


def sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """A tiny encoder with more rows than tokens."""
    return {
        "vocab_size": len(tokenizer) + 7, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


@pytest.fixture
def corpus(tmp_path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(LINES[:40]), encoding="utf-8")
    return file


def saved(folder: Path, tokenizer: PreTrainedTokenizerFast, model: torch.nn.Module | None = None) -> str:
    model = model or BertModel(BertConfig(**sizes(tokenizer)))
    return str(save(folder, model, tokenizer, prompts=PROMPTS, max_length=64))


def spelled(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """What the tokens of a text spell, without the marks of words."""
    return "".join(tokenizer.decode([token]).strip("#▁ ") for token in tokenizer(text)["input_ids"])


@torch.no_grad()
def states(folder: str | Path, texts: list[str], auto=AutoModel, **options) -> torch.Tensor:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), auto.from_pretrained(folder, **options).eval()
    fields = {"padding": True, "truncation": True, "return_tensors": "pt", "return_token_type_ids": False}
    return model(**tokenizer(texts, **fields))[0]


@pytest.mark.parametrize("characters", ["all", "texts"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_keep_their_tokens_and_hidden_states(kind, characters, corpus, tmp_path, capsys):
    old = trained(kind)
    source, out = saved(tmp_path / "source", old), str(tmp_path / "out")
    trim([source, out, "--files", str(corpus), "--characters", characters])
    new = AutoTokenizer.from_pretrained(out)
    covered = [prompt + text for text in LINES[:40] for prompt in ("", *PROMPTS.values())]
    for text in covered:
        assert new.tokenize(text) == old.tokenize(text)
    assert torch.equal(states(out, covered), states(source, covered))
    config = AutoModel.from_pretrained(out).config
    assert config.vocab_size == len(new) < len(old) and config.pad_token_id == new.pad_token_id
    assert new.all_special_tokens == old.all_special_tokens and "[EXTRA]" in new.get_vocab()
    printed = capsys.readouterr().out
    assert (
        f"{len(old) / 1000:.1f}" in printed
        and f"{len(new) / 1000:.1f}" in printed
        and "held-out texts have" in printed
    )
    for text in OTHERS if characters == "all" else ():
        unknown = [its(text)["input_ids"].count(its.unk_token_id) for its in (old, new)]
        assert unknown[1] == unknown[0] and spelled(new, text) == spelled(old, text)


def test_no_token_is_kept_without_a_reason(corpus, tmp_path):
    old = trained("byte-level bpe")
    source = saved(tmp_path / "source", old)
    trim([source, str(tmp_path / "out"), "--files", str(corpus)])
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    texts = [prompt + text for text in LINES[:40] for prompt in ("", *PROMPTS.values())]
    used = {token for text in texts for token in old.tokenize(text)}
    more = {token for token in vocabulary if len(token) > 1} - used - {*SPECIAL, "[EXTRA]"}
    assert all(any(token in other for other in used) for token in more), "merges on the way to a used token"
    whole = len({token for token in old.get_vocab() if any(token in other for other in used)})
    assert len(vocabulary) < whole + 256 and len(more) < whole - len(used)


def test_an_unknown_word_stays_unknown(tmp_path):
    """ "abcd" is unknown after "abc". Without "abc", it would be "ab" and "##cd"."""
    vocabulary = [*SPECIAL, "a", "##a", "##b", "##c", "b", "c", "ab", "abc", "##cd", "zz"]
    tokenizer = Tokenizer(models.WordPiece({its: at for at, its in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    old = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    source, file = saved(tmp_path / "source", old), tmp_path / "texts.txt"
    file.write_text("abcd\nab\nacd")
    trim([source, str(tmp_path / "out"), "--files", str(file)])
    new = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [new.tokenize(text) for text in ("abcd", "ab", "acd")] == [["[UNK]"], ["ab"], ["a", "##cd"]]
    assert "zz" not in new.get_vocab()


def test_the_work_grows_with_the_length_of_a_word_without_spaces():
    """Counted are the characters that tokenizers and normalizers read, and what is looked up in the vocabulary."""

    class Counting(dict):
        def __contains__(self, piece):
            work.append(1)
            return super().__contains__(piece)

    def counted(value):
        work.append(sum(map(len, value)))
        return tokenizer.encode_batch_fast(value)

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    content, counts = json.loads(tokenizer.to_str()), []
    content["model"]["vocab"] = Counting(content["model"]["vocab"])
    several = SimpleNamespace(
        encode_batch_fast=counted, normalizer=None, pre_tokenizer=None, no_truncation=list, no_padding=list
    )
    for length in (5_000, 10_000):
        for text in ("ab" * length, "abz " * length):
            work: list[int] = []
            tokenizer.pre_tokenizer = several.pre_tokenizer = pre_tokenizers.Whitespace()
            vocabulary = Vocabulary(several, content)
            vocabulary.add_texts([text])
            assert vocabulary.used_ids == ({0} if " " not in text else {0, 1, 2})
            counts.append(sum(work))
    assert counts[2] <= 2 * counts[0] and counts[3] <= 2 * counts[1]


@pytest.mark.parametrize("place", [0, 13, 150])
def test_positions_that_count_from_the_padding_token(place, tmp_path):
    names = [*SPECIAL[1:], *(f"w{number}" for number in range(200))]
    vocabulary = {its: at for at, its in enumerate([*names[:place], "[PAD]", *names[place:]])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    old = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=30
    )
    model = RobertaModel(RobertaConfig(**{**sizes(old), "max_position_embeddings": place + 40}))
    source, file, texts = saved(tmp_path / "source", old, model), tmp_path / "texts.txt", ["w190 w191", "w192"]
    file.write_text("\n".join(texts))
    arguments = [source, str(tmp_path / "out"), "--files", str(file)]
    if place >= 100:
        refused("'w190 w191' would have other hidden states: .* needs the ids of its", trim, arguments)
        return
    trim(arguments)
    torch.testing.assert_close(states(tmp_path / "out", texts), states(source, texts))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token_id == place


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_other_texts_are_measured(kind, corpus, tmp_path):
    source, others = saved(tmp_path / "source", trained(kind)), [*LINES[40:], *OTHERS]
    (tmp_path / "out").mkdir()
    found = trim_to(source, tmp_path / "out", lambda: LINES[:40], other=lambda: others)["other"]
    old, new = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("source", "out"))
    pieces = [[its(text, add_special_tokens=False)["input_ids"] for text in others] for its in (old, new)]
    counts = [sum(map(len, its)) for its in pieces]
    rare = [sum(text.count(its.unk_token_id) for text in texts) for its, texts in zip((old, new), pieces, strict=True)]
    assert found["texts"] == len(others) and counts[1] > counts[0] and rare[0] > 0
    assert found["longer"] == pytest.approx(counts[1] / counts[0] - 1)
    assert found["unknown_before"] == pytest.approx(rare[0] / counts[0])
    assert found["unknown_after"] == pytest.approx(rare[1] / counts[1])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["bert", "llama", "m3bert"])
def test_heads_keep_the_logits_of_kept_tokens(kind, tied, corpus, tmp_path):
    tokenizer = trained("byte-level bpe")
    values = {**sizes(tokenizer), "tie_word_embeddings": tied}
    if kind == "m3bert":
        model = M3BertForMaskedLM(tiny_config(**values, matryoshka_layers=[1, 2]))
    else:
        config, cls = {"bert": (BertConfig, BertForMaskedLM), "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
        model = cls(config(**values, bos_token_id=tokenizer.cls_token_id, eos_token_id=[tokenizer.sep_token_id]))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    source, out = saved(tmp_path / "source", tokenizer, model), tmp_path / "out"
    trim([source, str(out), "--files", str(corpus)])
    auto = AutoModelForCausalLM if kind == "llama" else AutoModelForMaskedLM
    new = AutoTokenizer.from_pretrained(out)
    kept = [tokenizer.convert_tokens_to_ids(token) for token in new.convert_ids_to_tokens(range(len(new)))]
    found, expected = (states(folder, LINES[:4], auto) for folder in (out, source))
    torch.testing.assert_close(found, expected[..., kept], rtol=1e-6, atol=1e-6)  # of a product of another shape
    if kind == "llama":
        config = AutoModel.from_pretrained(out).config
        assert [config.bos_token_id, config.eos_token_id] == [new.cls_token_id, [new.sep_token_id]]


def test_an_elastic_repository_keeps_its_depths_and_its_table(tiny_tokenizer, sentences, tmp_path, run_bare):
    source, out, texts = tmp_path / "source", tmp_path / "out", tmp_path / "texts.txt"
    save_elastic(source, tiny_tokenizer)
    texts.write_text("\n".join(sentences[:3]))
    trim([str(source), str(out), "--files", str(texts), "--other", str(texts)])
    old, new = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(out)
    assert len(new) < len(old)
    for depth in (0, 2, 4, 6):
        size = {"trust_remote_code": True, "output_layer": depth}
        assert torch.equal(states(out, sentences[:3], **size), states(source, sentences[:3], **size))
    assert torch.equal(states(out, sentences[:3]), states(source, sentences[:3])), "as the native model"
    spec = Elasticity.of(AutoModel.from_pretrained(out, trust_remote_code=True).config)
    assert {*spec.ignored_ids} == {*new.all_special_ids} and "source_sha256" not in spec.fit
    printed = run_bare(f"""
        from transformers import AutoModel
        model = AutoModel.from_pretrained({str(out)!r}, trust_remote_code=True, output_layer=0)
        print(tuple(model.get_input_embeddings().weight.shape))
    """)
    assert f"({len(new)}, {WIDTH})" in printed


def test_sentence_transformers_embeds_the_same(corpus, tmp_path):
    from sentence_transformers import SentenceTransformer

    source = saved(tmp_path / "source", trained("unigram"))
    trim([source, str(tmp_path / "out"), "--files", str(corpus)])
    old, new = (SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("source", "out"))
    for encode in ("encode_query", "encode_document"):
        found, expected = (getattr(model, encode)(LINES[:9], convert_to_tensor=True) for model in (new, old))
        assert torch.equal(found, expected)
    assert new.prompts == old.prompts and new.max_seq_length == old.max_seq_length


def test_weights_in_several_files(corpus, tmp_path):
    tokenizer = trained("wordpiece")
    source, out = saved(tmp_path / "source", tokenizer), tmp_path / "out"
    model = AutoModel.from_pretrained(source)
    (tmp_path / "source" / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="40KB")
    trim([source, str(out), "--files", str(corpus)])
    assert len([*out.glob("model-*.safetensors")]) > 1
    assert torch.equal(states(out, LINES[:4]), states(source, LINES[:4]))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * AutoModel.from_pretrained(out).num_parameters()


def test_articles_of_wikipedia(monkeypatch, tmp_path):
    asked = []

    def load_dataset(*names, **options):
        asked.append((names, options))
        return datasets.IterableDataset.from_generator(lambda: ({"title": "x", "text": text} for text in LINES))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    old = trained("unigram")
    trim([saved(tmp_path / "source", old), str(tmp_path / "out"), "--languages", "en", "pt", "--articles", "5"])
    streamed = {"split": "train", "streaming": True}
    assert asked == [(("wikimedia/wikipedia", f"20231101.{its}"), streamed) for its in ("en", "pt")]
    new = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [new.tokenize(text) for text in LINES[:5]] == [old.tokenize(text) for text in LINES[:5]]
    assert len(new) < len(old)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("slow", "source has no tokenizer.json"),
        ("no weights", "needs weights in safetensors"),
        ("alike", "a vocab_size of at least its [0-9]+ tokens that no other setting equals"),
        ("few rows", "a vocab_size of at least its [0-9]+ tokens"),
        ("no texts", "There are no texts, or all are empty"),
    ],
)
def test_bad_input_is_one_line(broken, message, corpus, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    saved(source, trained("wordpiece"))
    if broken == "slow":
        (source / "tokenizer.json").unlink()
    elif broken == "no weights":
        (source / "model.safetensors").unlink()
    elif broken in ("alike", "few rows"):
        values = json.loads((source / "config.json").read_text())
        changes = {"vocab_size": 9} if broken == "few rows" else {"hidden_size": values["vocab_size"]}
        (source / "config.json").write_text(json.dumps({**values, **changes}))
    else:
        corpus.write_text("\n \n\n")
    refused(message, trim, [str(source), str(out), "--files", str(corpus)])
    assert not out.exists()
