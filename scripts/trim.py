"""
Trim a vocabulary: an encoder in its own repository, with the tokens that your texts use and those that spell all other
text. Most weights of a small multilingual encoder are embeddings of tokens that texts in a few languages never have:

    m3bert trim intfloat/multilingual-e5-small runs/trimmed --files passages.txt queries.txt
    m3bert trim intfloat/multilingual-e5-small runs/trimmed --languages en pt

These texts keep their tokens and hidden states, to the last bit. Other texts may have more, shorter tokens: how many,
is measured on texts that are held out, or on those of --other. --languages reads articles of Wikipedia from the Hub.
"""

from __future__ import annotations


if __name__ == "__main__":
    __import__("as_command").run()

import json
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.text_files import TextFiles
from ..models.repository import MODEL_FILES, copy_source, naming
from ..utils.durable import remove_files, replacing, replacing_files
from .command import argument_parser, next_step, writing_to


if TYPE_CHECKING:
    import torch

Texts = Callable[[], Iterable[str | None]]  # gives the texts, each time that it is called
OTHER_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "*.model", "added_tokens.json")
HELD_OUT, MOST_HELD_OUT = 10, 2000  # every tenth text, up to this number
FIRST_IDS = 100
COMPARED_TEXTS, COMPARED_TOKENS = 8, 16  # in hidden states, before and after
STATE_TOLERANCE = 1e-3  # of the largest value; kernels may round by where tensors lie in memory


def ids_of(model: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, of the `model` of a tokenizer.json."""
    found = model["vocab"]
    return found if isinstance(found, dict) else {piece: number for number, (piece, _) in enumerate(found)}


def unknown_of(model: Mapping[str, Any]) -> int | None:
    """The id of the unknown token, if there is one."""
    return model["unk_id"] if "unk_id" in model else ids_of(model).get(model["unk_token"])


def spelled(token: str, model: Mapping[str, Any]) -> str:
    """A token without the mark of its place in a word."""
    prefix, suffix = (model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    return token.removeprefix(prefix).removesuffix(suffix) or token


def merged(token: str, model: Mapping[str, Any], ranks: Mapping[tuple[str, ...], int]) -> Iterator[str]:
    """The tokens that byte-pair encoding makes on the way from the characters to a token."""
    symbols, suffix = [*spelled(token, model)], model["end_of_word_suffix"] or ""
    symbols[-1] += suffix if token.endswith(suffix) else ""
    while found := [(ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks]:
        at = min(found)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        yield symbols[at]


def tokens_used(tokenizer: Any, model: Mapping[str, Any], texts: Sequence[str]) -> set[int]:
    """The tokens of texts, with special ones. Of an unknown word, they include the pieces that WordPiece takes before
    it finds none: with others in their place, the word might no longer be unknown."""
    encoded, unknown = tokenizer.encode_batch_fast(texts), unknown_of(model)
    used = {token for its in encoded for token in its.ids}
    if model["type"] == "WordPiece" and unknown in used:
        strange = [text for text, its in zip(texts, encoded, strict=True) if unknown in its.ids]
        used |= {piece for text in strange for word in words_of(tokenizer, text) for piece in taken(word, model)}
    return used


def words_of(tokenizer: Any, text: str) -> list[str]:
    """The words of a text, as the tokenizer divides it before it looks for tokens."""
    text = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [text]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def taken(word: str, model: Mapping[str, Any]) -> Iterator[int]:
    """The pieces that WordPiece takes of a word, the longest first, up to where it finds none."""
    ids, start, prefix = model["vocab"], 0, ""
    while start < len(word) <= model["max_input_chars_per_word"]:  # longer words are unknown as a whole
        end = next((end for end in range(len(word), start, -1) if prefix + word[start:end] in ids), None)
        if end is None:
            return
        yield ids[prefix + word[start:end]]
        start, prefix = end, model["continuing_subword_prefix"]


def kept_tokens(tokenizer: Mapping[str, Any], used: Iterable[int], *, every_character: bool = True) -> list[int]:
    """The ids that a trimmed tokenizer keeps, ascending, of the content of a tokenizer.json: those in use, added ones,
    the unknown one, bytes, and single characters (all of them, or those of the other kept tokens).

    Texts in these tokens keep them. WordPiece takes the longest piece and Unigram the most likely pieces, which are
    all there; byte-pair encoding makes each token by the same merges, in the same order."""
    model = tokenizer["model"]
    ids, added, unknown = ids_of(model), {its["id"] for its in tokenizer["added_tokens"]}, unknown_of(model)
    numbers = {*used} - added
    kept = {token for token, number in ids.items() if number in numbers}
    if model["type"] == "BPE":
        ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        kept |= {made for token in kept for made in merged(token, model, ranks)}
    if model["type"] == "Unigram":  # an unknown character costs a constant more than the least likely piece
        kept.add(min(model["vocab"], key=lambda its: its[1])[0])
    of_bytes = "ByteLevel" in json.dumps([tokenizer["normalizer"], tokenizer["pre_tokenizer"]])
    characters = {*chain.from_iterable(kept)}
    for token in ids:
        text = spelled(token, model)
        single = len(text) == 1 and (every_character or of_bytes or text in characters)
        if single or re.fullmatch("<0x[0-9A-F]{2}>", text):
            kept.add(token)
    return sorted({ids[token] for token in kept} | added | (set() if unknown is None else {unknown}))


def trimmed_tokenizer(tokenizer: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The content of a tokenizer.json with these tokens only, which are renumbered in their order."""
    values = json.loads(json.dumps(tokenizer))
    model, new = values["model"], {old: number for number, old in enumerate(kept)}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {token: new[old] for token, old in model["vocab"].items() if old in new}
    else:
        model["vocab"] = [its for old, its in enumerate(model["vocab"]) if old in new]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= model["vocab"].keys()]
    if model.get("unk_id") is not None:
        model["unk_id"] = new[model["unk_id"]]
    for its in values["added_tokens"]:
        its["id"] = new[its["id"]]
    if values["padding"]:
        values["padding"]["pad_id"] = new[values["padding"]["pad_id"]]
    processor = values["post_processor"] or {}
    for its in processor.get("processors", [processor]):
        for name in {"sep", "cls"} & its.keys():
            its[name][1] = new[its[name][1]]
        for special in its.get("special_tokens", {}).values():
            special["ids"] = [new[old] for old in special["ids"]]
    return values


def trim_settings(folder: Path, kept: Sequence[int]) -> None:
    """Renumber the tokens in the settings of a model, of its generation and of its tokenizer."""
    new = {old: number for number, old in enumerate(kept)}
    for file in (folder / name for name in ("config.json", "generation_config.json", "tokenizer_config.json")):
        values = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        for name, its in values.items():
            if name.endswith("_token_id"):
                values[name] = [new.get(old, old) for old in its] if isinstance(its, list) else new.get(its, its)
        if "vocab_size" in values:
            values["vocab_size"] = len(kept)
        if elastic := values.get("elastic"):
            elastic["ignored_ids"] = [new[old] for old in elastic.get("ignored_ids", ()) if old in new]
            (elastic.get("fit") or {}).pop("source_sha256", None)  # it no longer has the source's weights
        if added := values.get("added_tokens_decoder"):
            values["added_tokens_decoder"] = {str(new[int(old)]): its for old, its in added.items()}
        if values:
            file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def size_of(tensors: Mapping[str, Any]) -> Counter[str]:
    """Parameters, bytes, and about the bytes of an ONNX graph with 8-bit weights: one per weight of a matrix, four per
    weight of a vector."""
    size: Counter[str] = Counter()
    for its in tensors.values():
        graph = its.numel() * (1 if its.dim() > 1 else 4)
        size += Counter(parameters=its.numel(), bytes=its.nbytes, graph_bytes=graph)
    return size


def trim_weights(folder: Path, kept: Sequence[int], rows: int) -> tuple[Counter[str], Counter[str]]:
    """Leave only the rows of some tokens in tensors with `rows` rows: embeddings, a head and its bias, a static table.
    Other tensors stay as they are. Returns the [`size_of`] the weights before and after, without what a fit added."""
    from safetensors.torch import load_file, save_file

    from ..modeling.modeling_elastic import EXTRAS_FILE, EXTRAS_FOLDER, write_parts

    def trimmed(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        found = load_file(file)
        return found, {name: its[list(kept)] if its.shape[:1] == (rows,) else its for name, its in found.items()}

    extras, index = folder / EXTRAS_FOLDER / EXTRAS_FILE, folder / "model.safetensors.index.json"
    before, after = Counter[str](), Counter[str]()
    for file in folder.glob("model*.safetensors"):
        old, new = trimmed(file)
        before, after = before + size_of(old), after + size_of(new)
        with replacing(file) as draft:
            save_file(new, draft, {"format": "pt"})
    if extras.is_file():
        parts = trimmed(extras)[1]
        extras.unlink()  # not while its tensors are mapped from it
        write_parts(folder, parts, exact=True)  # which records the weights that they are for
    if index.is_file():
        values = {**json.loads(index.read_text("utf-8")), "metadata": {"total_size": after["bytes"]}}
        index.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return before, after


def compare(tokenizers: Sequence[Any], unknown: Sequence[int | None], texts: Iterable[str | None]) -> dict[str, float]:
    """What two tokenizers, of a source and trimmed, make of other texts: how many more tokens there are, as a share,
    and the share of unknown tokens before and after."""
    count, sums, rare = 0, [0, 0], [0, 0]
    for some in batches(texts):
        count += len(some)
        for side, (tokenizer, number) in enumerate(zip(tokenizers, unknown, strict=True)):
            encoded = tokenizer.encode_batch_fast(some, add_special_tokens=False)
            sums[side] += sum(map(len, encoded))
            rare[side] += sum(its.ids.count(number) for its in encoded)
    before, after = (number / max(1, total) for number, total in zip(rare, sums, strict=True))
    longer = sums[1] / max(1, sums[0]) - 1
    return {"texts": count, "longer": longer, "unknown_before": before, "unknown_after": after}


def hidden_states(folder: Path, texts: Sequence[str], **loading: Any) -> list[torch.Tensor]:
    """The last hidden states of the first tokens of some texts, `(1, tokens, hidden_size)` each."""
    import torch
    from transformers import AutoTokenizer

    from ..models.auto import load_model

    tokenizer, model = AutoTokenizer.from_pretrained(folder, **loading), load_model(folder, **loading).eval()
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    options = {"truncation": True, "max_length": COMPARED_TOKENS, "return_tensors": "pt"}
    with torch.inference_mode():
        return [encoder(**tokenizer(text, return_token_type_ids=False, **options))[0] for text in texts]


def batches(texts: Iterable[str | None], size: int = 1000) -> Iterator[list[str]]:
    """The texts that are not empty, in lists."""
    kept = (text for text in texts if text and text.strip())
    while some := list(islice(kept, size)):
        yield some


def texts_of(files: Sequence[str], options: Namespace) -> Texts:
    """The texts of some files, as the source reads them."""
    texts, tokenizer = TextFiles(files, options.text_column), None
    if "+" in options.text_column:  # the tokenizer has the separator of joined columns
        from transformers import AutoTokenizer

        with naming(options.source):
            tokenizer = AutoTokenizer.from_pretrained(options.source, revision=options.revision)
    return lambda: chain(*texts.sources(tokenizer).values())


def articles(languages: Sequence[str], number: int, snapshot: str) -> list[str]:
    """The first articles of Wikipedia in each language, from the Hub."""
    from datasets import load_dataset

    names = [f"{snapshot}.{language}" for language in languages]
    loaded = [load_dataset("wikimedia/wikipedia", name, split="train", streaming=True) for name in names]
    return [row["text"] for rows in loaded for row in islice(rows, number)]


def trim(
    source: str,
    folder: Path,
    texts: Texts,
    *,
    other: Texts | None = None,
    every_character: bool = True,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, dict[str, float]]:
    """Write a repository like another one, a folder or Hub id, with the tokens of some texts ([`kept_tokens`]) into an
    empty folder. It is measured on `other` texts; by default on every tenth text, up to 2,000 of them, with the tokens
    of the others. Returns tokens and [`size_of`] the weights `"before"` and `"after"`, and what [`compare`] finds
    (`"other"`). Raises a ValueError for what cannot be trimmed, or if a text would have other tokens than before, or
    one of the first texts other hidden states."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    def tokenizer_of() -> Any:
        found = AutoTokenizer.from_pretrained(folder).backend_tokenizer
        found.no_truncation()
        found.no_padding()
        return found

    def contents(pattern: str) -> dict[str, Any]:
        return {
            name: its for file in folder.glob(pattern) for name, its in json.loads(file.read_text("utf-8")).items()
        }

    with naming(source):
        copy_source(source, folder, revision, others=("elastic", "quantizer"))
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{source} has no tokenizer.json, which a fast tokenizer has: its vocabulary stays as it is.")
    values = json.loads(Tokenizer.from_file(str(folder / "tokenizer.json")).to_str())
    tokenizer, model, config = tokenizer_of(), values["model"], contents("config.json")
    rows, number = config.get("vocab_size", 0), tokenizer.get_vocab_size()
    alike = [name for name, its in config.items() if its == rows and name != "vocab_size"]
    if rows < number or alike or not [*folder.glob("model*.safetensors")]:
        raise ValueError(
            f"{source} needs weights in safetensors, and in its config a vocab_size of at least its {number} tokens "
            "that no other setting equals."
        )
    prompts = [prompt for prompt in (contents("config_sentence_*").get("prompts") or {}).values() if prompt]
    lower = contents("sentence_*_config.json").get("do_lower_case")

    def as_read(some: Iterable[str]) -> list[str]:
        every = [prompt + text for text in some for prompt in ("", *prompts)]
        return [text.lower() for text in every] if lower else every

    def smaller() -> tuple[list[int], dict[str, Any]]:
        kept = kept_tokens(values, used, every_character=every_character)
        return kept, trimmed_tokenizer(values, kept)

    def measured(texts: Iterable[str | None]) -> dict[str, float]:
        its = smaller()[1]
        tokenizers = tokenizer, Tokenizer.from_str(json.dumps({**its, "truncation": None, "padding": None}))
        return compare(tokenizers, [unknown_of(model), unknown_of(its["model"])], texts)

    special = [its for name, its in config.items() if name.endswith("_token_id") and its is not None]
    used = {*tokenizer.encode("", "").ids, *chain(*(its if isinstance(its, list) else [its] for its in special))}
    if (config.get("pad_token_id") or 0) < FIRST_IDS:  # positions of RoBERTa and its like count from the padding token
        used |= {*range(config.get("pad_token_id") or 0)}
    alone = len(used)
    held: list[str] = []
    for some in batches(texts()):
        apart = some[HELD_OUT - 1 :: HELD_OUT] if other is None and len(held) < MOST_HELD_OUT else []
        held += apart
        used |= tokens_used(tokenizer, model, as_read({*some} - {*apart}))
    if len(used) == alone:
        raise ValueError("There are no texts, or all are empty.")
    measure = measured(held) if other is None else {}
    used |= tokens_used(tokenizer, model, as_read(held))
    first = as_read(next(batches(texts()))[:COMPARED_TEXTS])
    states = hidden_states(folder, first, trust_remote_code=trust_remote_code)
    kept, content = smaller()
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    remove_files(folder, OTHER_VOCABULARIES)
    trim_settings(folder, kept)
    before, after = trim_weights(folder, kept, rows)
    trimmed = tokenizer_of()
    for some in map(as_read, batches(texts())):
        encoded = [its.encode_batch_fast(some) for its in (tokenizer, trimmed)]
        for text, old, new in zip(some, *encoded, strict=True):
            if old.ids != [kept[token] for token in new.ids]:
                raise ValueError(f"{text[:60]!r} would have other tokens: this tokenizer cannot be trimmed.")
    others = hidden_states(folder, first, trust_remote_code=trust_remote_code)
    for text, old, new in zip(first, states, others, strict=True):
        if (old - new).abs().max() > STATE_TOLERANCE * old.abs().max():
            raise ValueError(f"{text[:60]!r} would have other hidden states: {source} needs the ids of its tokens.")
    return {
        "before": {"tokens": number, **before},
        "after": {"tokens": len(kept), **after},
        "other": measure if other is None else measured(other()),
    }


def report(found: Mapping[str, Mapping[str, float]], which: str) -> str:
    """What [`trim`] returns, as a table."""
    titles = {"tokens": "thousand tokens", "parameters": "million parameters", "bytes": "MB of weights"}
    titles |= {"graph_bytes": "MB as an ONNX graph in 8 bits, about"}
    lines, other = [f"{'':<36}{'before':>9}{'after':>9}"], found["other"]
    for name, title in titles.items():
        before, after = (found[side][name] / (1e3 if name == "tokens" else 1e6) for side in ("before", "after"))
        lines.append(f"{title:<36}{before:>9.1f}{after:>9.1f}")
    lines.append(
        f"{other['texts']:,} {which} texts have {other['longer']:.2%} more tokens, {other['unknown_after']:.2%} of "
        f"which are unknown (before: {other['unknown_before']:.2%})."
    )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", help="folder or Hub id of an encoder with a fast tokenizer")
    parser.add_argument("output_dir", help="folder for the trimmed encoder")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--files", nargs="+", help=".txt, .jsonl, .csv or .parquet files, also gzipped")
    chosen.add_argument("--languages", nargs="+", help="languages of Wikipedia, such as en pt")
    parser.add_argument("--text_column", default="text", help="column with the texts; title+text joins two columns")
    parser.add_argument("--articles", type=int, default=10_000, help="articles of Wikipedia per language")
    parser.add_argument("--snapshot", default="20231101", help="date of Wikipedia in the data set wikimedia/wikipedia")
    parser.add_argument("--other", nargs="+", help="files with texts to measure on; default: every tenth text")
    parser.add_argument(
        "--characters",
        choices=["all", "texts"],
        default="all",
        help="single characters to keep: all, or those of the texts, which makes others unknown",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the source")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the source")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that output_dir holds")
    options = parser.parse_args(arguments)
    output = Path(options.output_dir)
    with writing_to(output, MODEL_FILES, options.overwrite, options.source):
        other = texts_of(options.other, options) if options.other else None
        if options.files:
            texts = texts_of(options.files, options)
        else:
            read = articles(options.languages, options.articles, options.snapshot)
            texts = read.copy
        settings = {"every_character": options.characters == "all", "revision": options.revision}
        settings |= {"trust_remote_code": options.trust_remote_code}
        with replacing_files(output, stale=MODEL_FILES if options.overwrite else ()) as draft:
            found = trim(options.source, draft, texts, other=other, **settings)
    print(f"{report(found, 'held-out' if other is None else 'other')}\nSaved to {output}.")
    next_step(model=output, trust_remote_code=options.trust_remote_code)
