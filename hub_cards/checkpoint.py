"""A checkpoint on disk: what it is, what it remembers, and the code that it runs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_imports

from m3bert import modeling as modeling_m3bert

from ..encode.device import device_of
from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity, Grid, is_elastic
from ..encode.projection import Projection
from ..encode.quantizer import QUANTIZER_FOLDER, find_quantizer
from ..encode.states import longest_text
from ..modeling.configuration_elastic import Elasticity, Size, cut_config, resolve_size
from ..modeling.files_elastic import SIZE_TYPE, Source
from ..modeling.quantization_m3bert import M3BertQuantizer, M3BertQuantizerConfig
from ..models.auto import load_config, load_model
from ..models.settings import MODULES_FILE, EmbeddingSettings, check_weights, hub_id, load_tokenizer, shards_of
from ..utils.hashing import sha256_of
from ..utils.typed import read_json
from .files import code_named_by, files_of
from .training_record import TrainingRecord


# Auto class that loads a model -> its task on the Hub.
PIPELINES = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModel": "feature-extraction",
}
# How the name of a model class ends -> the Auto class that loads it.
HEADS = {auto.removeprefix("AutoModel") or "Model": auto for auto in PIPELINES}
PACKAGE = Path(modeling_m3bert.__file__).parent


def full_size(config: PreTrainedConfig, projection: Projection | None = None) -> Granularity:
    """The granularity that a checkpoint is read at by default, from its config and its projection, if it has one."""
    width = getattr(config, "output_dim", None) or config.hidden_size
    return Granularity(config.num_hidden_layers, projection.out_features if projection is not None else width)


@dataclass(frozen=True)
class Checkpoint:
    """
    A complete checkpoint in a folder.

    Args:
        folder (`Path`): The folder.

    Raises:
        ValueError: if its weights are missing or incomplete.
    """

    folder: Path

    def __post_init__(self) -> None:
        weights = [*self.folder.glob("model*.safetensors")]
        if not weights:
            raise ValueError(f"{self.folder} has no weights in safetensors, the only format that is published.")
        if missing := sorted(shards_of(self.folder) - {file.name for file in weights}):
            raise ValueError(f"{self.folder} lacks {', '.join(missing)}, which its index lists.")
        for file in weights:
            check_weights(file)

    @property
    def code_options(self) -> dict[str, bool]:
        """The option that runs the source's code: whoever publishes exits ran it to fit them."""
        return {"trust_remote_code": True} if self.source_code() else {}

    def source_code(self) -> dict[str, str]:
        """Auto class -> class in remote code of the source; empty without such code."""
        elastic = read_json(self.folder / "config.json").get("elastic") or {}
        return elastic.get("source_auto_map", {})

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The config of the model as it is loaded: that of a saved size has its layers alone."""
        config = load_config(self.folder, **self.code_options)
        depth, _ = resolve_size(config)
        if depth < config.num_hidden_layers:
            config = copy.deepcopy(config)
            cut_config(config, depth)
        return config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return load_tokenizer(Source.at(self.folder, {}), self.settings)

    @property
    def elastic(self) -> bool:
        """Whether it can be loaded with fewer layers and dimensions."""
        return is_elastic(self.config)

    @property
    def is_m3bert(self) -> bool:
        """Whether it is an m3BERT."""
        return self.config.model_type == modeling_m3bert.M3BertConfig.model_type

    @property
    def depths(self) -> Elasticity:
        """Exits, paths and static table."""
        return Elasticity.of(self.config)

    def source_layers(self, depth: int) -> list[int]:
        """The layers of the source that a depth runs, counted from 1, also where the checkpoint is a size."""
        return Size.of(self.config, depth).source_layers

    @property
    def paths(self) -> list[int]:
        """Fitted depths that skip layers."""
        return [depth for depth in self.depths.aligned if self.source_layers(depth) != [*range(1, depth + 1)]]

    @cached_property
    def needs_code(self) -> bool:
        """Whether it cannot be loaded at all without its code. A native encoder can, at its full size."""
        values = read_json(self.folder / "config.json")
        names = {"AutoConfig"} & {*(values.get("auto_map") or {})}
        if values.get("elastic") and values["model_type"] not in ("m3bert", SIZE_TYPE):
            names &= {*values["elastic"].get("source_auto_map", {})}
        return bool(names)

    @property
    def source(self) -> str | None:
        """Hub id of the encoder that was converted or that exits were fitted to, if it is known."""
        fit = self.depths.fit or {}
        return getattr(self.config, "converted_from", None) or hub_id(fit.get("source"))

    @cached_property
    def has_weights_of_source(self) -> bool:
        """Whether its weights are the files of its source, byte for byte."""
        digests = (self.depths.fit or {}).get("source_sha256")
        digests = digests if isinstance(digests, dict) else {"model.safetensors": digests}  # in several files
        files = {name: self.folder / name for name in digests}
        return all(file.is_file() and sha256_of(file) == digests[name] for name, file in files.items())

    @property
    def quantized(self) -> bool:
        """Whether its weights are quantised."""
        return getattr(self.config, "quantization_config", None) is not None

    @property
    def head(self) -> str:
        """Name of the Auto class that loads the whole model, head included."""
        architecture = (self.config.architectures or ["Model"])[0]
        if head := head_of(architecture):
            return head
        if (self.folder / MODULES_FILE).is_file():  # an embedding model saved with another head
            return "AutoModel"
        raise ValueError(f"{self.folder} holds a {architecture}; legal endings of a class: {', '.join(HEADS)}.")

    @cached_property
    def record(self) -> TrainingRecord | None:
        """The record of its training, if there is one."""
        return TrainingRecord.find(self.folder)

    @cached_property
    def projection(self) -> Projection | None:
        """Its projection, if there is one."""
        return Projection.of(self.settings.projection)

    @cached_property
    def quantizer_config(self) -> M3BertQuantizerConfig | None:
        """The config of its quantizer, if it has one."""
        if not (self.folder / QUANTIZER_FOLDER / "config.json").is_file():
            return None
        return M3BertQuantizerConfig.from_pretrained(self.folder, subfolder=QUANTIZER_FOLDER)

    @cached_property
    def quantizer(self) -> M3BertQuantizer | None:
        """Its quantizer, if there is one."""
        return find_quantizer(str(self.folder))

    @cached_property
    def quantizer_record(self) -> TrainingRecord | None:
        """The record of the quantizer's own training, if the encoder was frozen."""
        return TrainingRecord.find(self.folder / QUANTIZER_FOLDER) if self.quantizer_config is not None else None

    def quantizer_misfit(self, size: Granularity) -> str | None:
        """Why a part of this size cannot have the quantizer of the checkpoint, if there is one; `None` if it can."""
        config = self.quantizer_config
        if config is None or (size.dim == config.hidden_size and size.layer in config.layers):
            return None
        layers = ", ".join(map(str, config.layers)) or "none on record"
        return f"the quantizer reads {config.hidden_size} dims (layers: {layers}), and this model is {size}"

    @cached_property
    def settings(self) -> EmbeddingSettings:
        """Pooling, projection, prompts and longest text, as published."""
        source = Source.at(self.folder, {}).with_settings()
        return EmbeddingSettings.of_source(source, late=True) or EmbeddingSettings()

    @property
    def exported_from(self) -> dict[str, Any] | None:
        """For a native export: [`~Checkpoint.origin_of`] its granularity in the elastic checkpoint."""
        return getattr(self.config, "exported_from", None)

    def origin_of(self, size: Granularity) -> dict[str, Any]:
        """What an export of this size says of its origin, if known."""
        facts = {"granularity": str(size), "full_size": str(self.full)}
        if not self.settings.is_late:
            facts["weights"] = self.weights_fingerprint
        return {**facts, "converted_from": self.source}

    @cached_property
    def full(self) -> Granularity:
        """The granularity that it is read at by default."""
        return full_size(self.config, self.projection)

    @cached_property
    def trained_grid(self) -> Grid | None:
        """The granularities that it was trained at; `None` if unknown."""
        if self.record is not None:
            known = Grid.parse(self.record.grid)
        elif self.is_m3bert and self.config.is_matryoshka and self.projection is None:
            known = Grid.of(self.config)
        else:
            return None
        members = tuple(g for g in known if g.layer <= self.full.layer and g.dim <= self.full.dim)
        return Grid(members) if members else None

    @property
    def trained(self) -> bool:
        """Whether it was trained at a granularity below the full one."""
        return self.trained_grid is not None and set(self.trained_grid) != {self.full}

    @property
    def query_layers(self) -> list[int]:
        """Depths below the last whose vectors can be compared with those of the last layer."""
        return [depth for depth in self.depths.aligned if depth < self.full.layer]

    @property
    def fitted(self) -> bool:
        """Whether small depths come from a fit, and not from training on record."""
        return bool(self.depths.aligned) and self.record is None

    @cached_property
    def grid(self) -> Grid:
        """The granularities to show: those it was trained at, or a sample if unknown; fitted depths; the full one."""
        sample = Grid.of(self.config) if self.projection is None else Grid((self.full,))
        members = [g for g in self.trained_grid or sample if g.dim <= self.full.dim] + [self.full]
        dims = Grid(tuple(dict.fromkeys(members))).dims
        fitted = [Granularity(depth, dim) for depth in self.depths.aligned for dim in dims]
        return Grid(tuple(dict.fromkeys([*members, *fitted])))

    @property
    def max_length(self) -> int:
        """Longest text in tokens."""
        return longest_text(self.config, self.tokenizer, self.settings.max_length)

    def load(self, **options: Any) -> PreTrainedModel:
        """Load the whole model, head included."""
        return load_model(self.folder, getattr(transformers, self.head), **self.code_options, **options)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """[`GridEncoder.identity`] of the encoder."""
        return self.encoder().identity()

    @property
    def weights_fingerprint(self) -> str:
        """Fingerprint of the weights of encoder and projection."""
        return self.identity["weights"]

    def encoder(self, grid: Grid | None = None) -> GridEncoder:
        """Load the encoder to embed texts over a grid. Default: its own grid."""
        encoder = GridEncoder.from_pretrained(self.folder, grid=grid or self.grid, model_kwargs=self.code_options)
        encoder.model.to(device_of())
        return encoder

    def files(self) -> list[str]:
        """The files that are published, as in [`files_of`]."""
        return files_of(self.folder, self.code())

    def encoder_code(self) -> set[str]:
        """Python files that the config of the encoder names."""
        return code_named_by(self.folder / "config.json")

    def quantizer_code(self) -> set[str]:
        """Python files that only the config of the quantizer names; none without one."""
        file = self.folder / QUANTIZER_FOLDER / "config.json"
        return code_named_by(file) - self.encoder_code() if file.is_file() else set()

    def code(self) -> dict[str, Path]:
        """Python files that loading runs, in the folder, or in this package where the folder lacks them."""
        files: dict[str, Path] = {}
        names = sorted(self.encoder_code() | self.quantizer_code())
        for name in names:  # grows by what each file imports
            if name not in files:
                ours, theirs = PACKAGE / name, self.folder / name
                files[name] = ours if ours.is_file() and not theirs.is_file() else theirs
                names += [f"{module}.py" for module in get_relative_imports(files[name])]
        return files

    def other_code(self) -> list[str]:
        """Those of [`~Checkpoint.code`] that are not the files of this package, byte for byte."""
        ours = {file.name: file.read_bytes() for file in PACKAGE.glob("*.py")}
        return sorted(name for name, file in self.code().items() if file.read_bytes() != ours.get(name))

    def code_digests(self) -> dict[str, str]:
        """SHA-256 of each file of [`~Checkpoint.code`], as `sha256sum` prints it."""
        return {name: sha256_of(file) for name, file in sorted(self.code().items())}


def head_of(architecture: str) -> str | None:
    """Name of the Auto class that loads a class of model; `None` if it is unknown."""
    return next((auto for end, auto in HEADS.items() if architecture.endswith(end)), None)
