"""Tasks by name: how they are scored, and where their data is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..utils.help_texts import did_you_mean


@dataclass(frozen=True)
class HubData:
    """
    The data of a task on the Hub.

    Args:
        path (`str`): Id of the data set.
        config (`str`, *optional*): Configuration of the data set; of a collection, of its relevance judgements.
        columns (`dict[str, str]`, *optional*): Column of the task -> column on the Hub, if the names differ.
        labels (`dict`, *optional*): Label on the Hub -> label of the task. Rows with other labels are left out. Empty
            keeps all rows.
        splits (`dict[str, str]`, *optional*): Split of the task -> split on the Hub, if the names differ. Of a
            collection, part -> split. Default: `corpus`, `queries`, and `test` for the relevance judgements.
        benchmark (`str`, *optional*): Id of the task on the Hub's leaderboard of the data set, which is the name of
            MTEB's task. `None` if MTEB does not score the task in this way.
    """

    path: str
    config: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[Any, int] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    benchmark: str | None = None


@dataclass(frozen=True)
class Task:
    """
    A data set and how it is scored.

    Args:
        name (`str`): Name of the task.
        task_type (`str`): `sts`, `classification`, `pair_classification`, `retrieval`, `bitext` or `geometry`.
        folder (`str`, *optional*): Folder of the local files. Default: `name`.
        splits (`tuple[str, ...]`, *optional*, defaults to `("test",)`): Splits to score together, from local files
            `{split}.jsonl.gz`.
        train_split (`str`, *optional*, defaults to `"train"`): Split to fit a classifier on.
        labels (`dict[int, int]`, *optional*): As for [`HubData`], of the local files.
        hub ([`HubData`], *optional*): The same data on the Hub; `None` if it is not there in the same form.
        builtin (`bool`, *optional*, defaults to `False`): Whether the texts come with Python and need no files.
        read (`Callable[[str], list[dict]]`, *optional*): Reads your own data, in place of all of the above: name of a
            split, or of a part of a collection (`corpus`, `queries`, `qrels`) -> its rows. See [`collection_task`],
            [`pairs_task`] and [`labels_task`].
        recall (`tuple[int, ...]`, *optional*, defaults to `(1, 10, 100)`): For retrieval: values of k for Recall@k.
        parallel (`bool`, *optional*, defaults to `False`): For bitext: whether two `splits` have the same sentences in
            two languages, row by row in the column `sentence1`. Repeated ones are left out.
        about (`str`, *optional*): What its texts are, in a few words, for cards.
    """

    name: str
    task_type: str
    folder: str | None = None
    splits: tuple[str, ...] = ("test",)
    train_split: str = "train"
    labels: Mapping[int, int] = field(default_factory=dict)
    hub: HubData | None = None
    builtin: bool = False
    read: Callable[[str], list[dict[str, Any]]] | None = None
    recall: tuple[int, ...] = (1, 10, 100)
    parallel: bool = False
    about: str = ""


def _task(
    name: str, task_type: str, about: str, hub: str | None = None, config: str | None = None, **data: Any
) -> Task:
    return Task(name, task_type, hub=HubData(hub, config, **data) if hub else None, about=about)


def _nanobeir(name: str, about: str) -> Task:
    """A set of NanoBEIR. All 13 are splits of the data set that sentence-transformers' NanoBEIREvaluator reads."""
    split = f"Nano{name}"
    splits = dict.fromkeys(("corpus", "queries", "qrels"), split)
    hub = HubData("sentence-transformers/NanoBEIR-en", "qrels", BEIR_COLUMNS, splits=splits)
    return Task(f"nanobeir-{name.lower()}", "retrieval", splits=(split,), hub=hub, about=f"{about} (NanoBEIR)")


def _beir(name: str, about: str, benchmark: str | None = None) -> Task:
    return _task(name, "retrieval", about, f"mteb/{name}", columns=BEIR_COLUMNS, benchmark=benchmark)


ENTAILED_OR_CONTRADICTED = {0: 1, 2: 0}  # neutral pairs are left out
NLI_COLUMNS = {"sentence1": "premise", "sentence2": "hypothesis"}
BEIR_COLUMNS = {"id": "_id"}
STSB = "pairs of sentences from news, captions and forums, with a similarity score (STS Benchmark)"
SEMEVAL = "pairs of sentences with a similarity score (SemEval 20{})"
SICK = "pairs of sentences about images and videos, with a relatedness score (SICK, {})"
EXTRACTION = "3 sentiments of tweets (Kaggle's Tweet Sentiment Extraction)"
SCITAIL = "whether a sentence supports an answer to a question of school science (SciTail)"
SNLI = "whether a sentence follows from a caption of an image or contradicts it (SNLI)"
MINI = "5,000 passages of web pages, searched by queries of a search engine (MS MARCO)"
STDLIB = (
    "documentation of Python's standard library: the first line of a docstring finds the text below it. `m3bert "
    "example_data` and `m3bert quickstart` write, fit and train on texts of other modules of the same library, so a "
    "model that was made with them is tested here on texts much like those it has seen"
)
# The local files of tweeteval-sentiment have the texts from which the official training texts were drawn. MTEB removes
# documents with the id of the query from the results of FiQA and ArguAna: other scores than ours.
TWEETS = HubData("cardiffnlp/tweet_eval", "sentiment", splits={"train_reconstructed": "train"})
SNLI_DATA = HubData("stanfordnlp/snli", None, NLI_COLUMNS, ENTAILED_OR_CONTRADICTED)
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _task("stsb", "sts", STSB, "mteb/stsbenchmark-sts", benchmark="STSBenchmark"),
        *(
            _task(f"sts{year}", "sts", SEMEVAL.format(year), f"mteb/sts{year}-sts", benchmark=f"STS{year}")
            for year in (12, 13, 14, 15, 16)
        ),
        _task("sick", "sts", SICK.format("its test split")),
        Task("sickr", "sts", "sick", ("train", "dev", "test"), about=SICK.format("all splits")),
        _task("banking77", "classification", "77 intents of a bank's customers", "mteb/banking77"),
        _task("emotion", "classification", "6 emotions in tweets", "mteb/emotion"),
        _task(
            "tweeteval-emotion", "classification", "4 emotions in tweets (TweetEval)", TWEETS.path, "emotion"
        ),
        Task(
            "tweeteval-sentiment", "classification", train_split="train_reconstructed", hub=TWEETS,
            about="3 sentiments of tweets (TweetEval)",
        ),
        _task("tweet-sentiment-extraction", "classification", EXTRACTION, "mteb/tweet_sentiment_extraction"),
        _task(
            "mrpc", "pair_classification", "whether two sentences of the news are paraphrases (MRPC)", "nyu-mll/glue",
            "mrpc",
        ),
        _task("wic", "pair_classification", "whether a word has one meaning in two sentences (WiC)"),
        _task(
            "scitail", "pair_classification", SCITAIL, "allenai/scitail", "tsv_format", columns=NLI_COLUMNS,
            labels={"entails": 1, "neutral": 0},
        ),
        Task("snli", "pair_classification", labels=ENTAILED_OR_CONTRADICTED, hub=SNLI_DATA, about=SNLI),
        _task("cranfield", "retrieval", "abstracts on aerodynamics, searched by questions"),
        _task("cisi", "retrieval", "abstracts on library science, searched by questions"),
        _task("npl", "retrieval", "abstracts on electronics, searched by short descriptions"),
        _task("msmarco-mini", "retrieval", MINI),
        _beir("scifact", "abstracts of papers, searched by scientific claims", "SciFact"),
        _beir("nfcorpus", "abstracts on medicine, searched by questions on nutrition", "NFCorpus"),
        _beir("fiqa", "answers to questions on finance"),
        _beir("arguana", "arguments of debates, searched by the arguments that they counter"),
        _nanobeir("ClimateFEVER", "passages of Wikipedia, searched by claims on the climate"),
        _nanobeir("DBPedia", "descriptions of entities, searched by their names and by questions"),
        _nanobeir("FEVER", "passages of Wikipedia, searched by claims"),
        _nanobeir("FiQA2018", "answers to questions on finance"),
        _nanobeir("HotpotQA", "passages of Wikipedia, two of which answer a question"),
        _nanobeir("MSMARCO", "passages of web pages, searched by queries of a search engine"),
        _nanobeir("NFCorpus", "abstracts on medicine, searched by questions on nutrition"),
        _nanobeir("NQ", "passages of Wikipedia, searched by questions to a search engine"),
        _nanobeir("QuoraRetrieval", "questions, searched by the same question in other words"),
        _nanobeir("SCIDOCS", "papers that a paper cites, searched by its title"),
        _nanobeir("ArguAna", "arguments of debates, searched by the arguments that they counter"),
        _nanobeir("SciFact", "abstracts of papers, searched by scientific claims"),
        _nanobeir("Touche2020", "arguments of debates, searched by controversial questions"),
        Task("stdlib", "retrieval", builtin=True, about=STDLIB),
        Task(
            "stsb-geometry", "geometry", "stsb", hub=HubData("mteb/stsbenchmark-sts"),
            about="the sentences of STS Benchmark",
        ),
    )
}  # fmt: skip
BITEXT_LANGUAGES = ("ara", "bul", "cmn", "deu", "ell", "fra", "hin", "rus", "spa", "swh", "tha", "tur", "urd", "vie")
XNLI_LANGUAGES = ("ar", "bg", "zh", "de", "el", "fr", "hi", "ru", "es", "sw", "th", "tr", "ur", "vi")
STS_NAMES = tuple(name for name, task in TASKS.items() if task.task_type == "sts")
CLASSIFICATION_NAMES = tuple(name for name, task in TASKS.items() if task.task_type == "classification")
LOCAL_RETRIEVAL = ("cranfield", "cisi", "npl", "msmarco-mini")
GROUPS: dict[str, tuple[str, ...]] = {
    # The data sets of the MIPIC, MIC and IBKD papers; small collections replace m3BERT's and QAMA's.
    "paper": (*STS_NAMES, *CLASSIFICATION_NAMES, "mrpc", "wic", "scitail", *LOCAL_RETRIEVAL, "stsb-geometry"),
    "sts": STS_NAMES,
    "classification": CLASSIFICATION_NAMES,
    "pair_classification": ("mrpc", "wic", "scitail", "snli"),
    "retrieval": LOCAL_RETRIEVAL,
    "builtin": ("stdlib",),
    "beir": ("scifact", "nfcorpus", "fiqa", "arguana"),
    "nanobeir": tuple(name for name in TASKS if name.startswith("nanobeir-")),
    "bitext": tuple(f"tatoeba-{language}" for language in BITEXT_LANGUAGES),
    "xnli-pairs": tuple(f"xnli-pairs-{language}" for language in XNLI_LANGUAGES),
    "geometry": ("stsb-geometry",),
}
# Names of tasks that exist once per language.
BY_LANGUAGE = "tatoeba-LANGUAGE, xnli-LANGUAGE, xnli-pairs-LANGUAGE"


def find_task(name: str) -> Task:
    """
    The task of this name: one of [`TASKS`], or one language of Tatoeba (`tatoeba-deu`, a code of three letters), of
    XNLI (`xnli-de`, a code of two letters), or of XNLI's premises and their English originals (`xnli-pairs-de`).

    Raises:
        ValueError: if there is no such task. The message names the existing ones.
    """
    if name in TASKS:
        return TASKS[name]
    collection, _, language = name.partition("-")
    if collection == "tatoeba" and language:
        pair = f"{language}-eng"
        return Task(
            name,
            "bitext",
            "tatoeba",
            (pair,),
            hub=HubData("mteb/tatoeba-bitext-mining", pair, splits={pair: "test"}),
            about=f"sentences in the language `{language}` and their English translations (Tatoeba)",
        )
    if name.startswith("xnli-pairs-"):
        other = name.removeprefix("xnli-pairs-")
        about = f"sentences in the language `{other}` and their English originals (premises of XNLI)"
        return Task(name, "bitext", "xnli", (f"{other}-dev", "en-dev"), parallel=True, about=about)
    if collection == "xnli" and language:
        split = f"{language}-dev"
        hub = HubData("facebook/xnli", language, NLI_COLUMNS, ENTAILED_OR_CONTRADICTED, {split: "validation"})
        about = f"whether a sentence in the language `{language}` follows from another or contradicts it (XNLI)"
        return Task(
            name, "pair_classification", "xnli", (split,), labels=ENTAILED_OR_CONTRADICTED, hub=hub, about=about
        )
    raise ValueError(
        f"There is no task {name!r}{did_you_mean(name, [*TASKS, *GROUPS])}. Tasks: {', '.join(TASKS)}, "
        f"{BY_LANGUAGE}; groups: {', '.join(GROUPS)}."
    )


def find_tasks(names: Iterable[str]) -> list[Task]:
    """The tasks of these names and groups, in this order, without duplicates."""
    members: Sequence[str] = [member for name in names for member in GROUPS.get(name, (name,))]
    return [find_task(name) for name in dict.fromkeys(members)]
