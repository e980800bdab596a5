"""QAMA: embeddings in two bits or fewer per dim, with a quantizer that is published with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ...data.teacher import TeacherEmbeddings
from ...encode.granularity import EncoderConfig, Granularity, Grid
from ...encode.quantizer import write_quantizer
from ...encode.ranks import is_sharded
from ...encode.states import shared_layers, unwrap_encoder, width_of
from ...hub_cards.training_record import RECORD_FILE, TrainingRecord
from ...modeling import M3BertQuantizer, M3BertQuantizerConfig
from ...modeling.configuration_elastic import resolve_size
from ...modeling.files_elastic import source_of
from ...models.auto import load_config
from ...models.settings import EmbeddingSettings
from ...utils.help_texts import described
from ..core.checkpoints import part_of, with_weights
from ..core.composition import mapping_of
from ..core.objective import Objective
from ..distillation.trainer import DistillationConfig, DistillationTrainer
from .objective import QAMA


CALIBRATION_TEXTS = 20_000
QUANTIZER_OPTIONS = ("intermediate_size", "skip", "momentum")  # the others follow from the model and the grid
SMALLEST_DIM = 48


@described
@dataclass
class QAMAConfig(DistillationConfig):
    """
    Configuration of [`QAMATrainer`], in addition to the fields of [`DistillationConfig`].

    Args:
        frozen (`bool`, *optional*, defaults to `True`): Train the quantizer alone, on embeddings that are computed
            once, from texts of up to `teacher_max_length` tokens. `False` trains the encoder with it.
        codes (`list[str]`, *optional*): Codes whose similarities are trained. All codes can be used afterwards.
            Default: `qama-2` and `qama-hybrid`. Without `quantized_gradient`, only distances from their thresholds
            are trained.
        quantizer_config (`dict`, *optional*): Arguments of [`M3BertQuantizerConfig`], as JSON or a YAML mapping. The
            paper's are `{skip: none, intermediate_size: 12288}`.
        quantized_gradient (`bool`, *optional*, defaults to `False`): Pass a gradient through quantisation, which the
            paper does not.
        matryoshka (`bool`, *optional*, defaults to `True`): Train every nested dim, not only the widest.
        quantization_loss (`bool`, *optional*, defaults to `True`): Keep numbers away from thresholds, and train the
            similarities of codes.
        regularization (`bool`, *optional*, defaults to `True`): Orthogonality of added dims, and information
            bottleneck.
        variance_control (`bool`, *optional*, defaults to `True`): Adaptive variance control.
        contrast_temperature (`float`, *optional*, defaults to 0.05): Temperature of the contrastive loss, for pairs.
        rank_texts (`int`, *optional*, defaults to 8): Texts per batch in the rank loss, which costs batch^2 numbers
            per text.
        weights (`dict`, *optional*): Name of a term -> weight: sim, kl, rank, contrast, orthogonality, bottleneck,
            quantization, variance.
        level_weights (`dict`, *optional*): Nested dim -> weight of the similarity losses (sim, kl, rank, contrast) at
            it, for every dim of the grid. The paper's w_l^(i) is a matrix, of which only products with `weights` can
            be set. Default: in proportion to the square root of the dim, as in the released code, but with sum 1.
        temperature (`float`, *optional*, defaults to 0.05): Temperature of the KL divergence.
        learning_rate (`float`, *optional*, defaults to 1e-3): Initial learning rate of AdamW.
        per_device_train_batch_size (`int`, *optional*, defaults to 256): Rows per device and step.

    The default grid is the last layer at its hidden size, halved down to 48 dims. A frozen encoder has one layer; its
    exits, which share the space of the last layer, can use the same quantizer. Without `teacher_name_or_path`, the
    teacher is the model itself as it was saved.

    The defaults come from our study. The paper trains for 5 epochs with a learning rate of 1e-4 (recipe
    `qama_paper`). In its released code, similarities weigh about 20 times more (recipe `qama_released`).
    """

    projects = False
    objective_fields = (
        "pooling", "frozen", "codes", "quantized_gradient", "matryoshka", "quantization_loss", "regularization",
        "variance_control", "temperature", "contrast_temperature", "rank_texts", "weights", "level_weights",
    )  # fmt: skip

    frozen: bool = True
    codes: list[str] | None = None
    quantizer_config: dict | str | None = None
    quantized_gradient: bool = False
    matryoshka: bool = True
    quantization_loss: bool = True
    regularization: bool = True
    variance_control: bool = True
    contrast_temperature: float = 0.05
    rank_texts: int = 8
    weights: dict | str | None = None
    level_weights: dict | str | None = None
    temperature: float = 0.05
    learning_rate: float = 1e-3
    per_device_train_batch_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codes = self.codes or ["qama-2", "qama-hybrid"]
        self.quantizer_config = mapping_of("quantizer_config", self.quantizer_config, QUANTIZER_OPTIONS)
        self.weights = mapping_of("weights", self.weights)
        levels = mapping_of("level_weights", self.level_weights)
        self.level_weights = {int(dim) if str(dim).isdigit() else dim: weight for dim, weight in levels.items()}

    def grid_for(self, config: EncoderConfig) -> Grid:
        if self.grid is None:
            dims = [width_of(config)]
            while dims[-1] % 2 == 0 and dims[-1] // 2 >= SMALLEST_DIM:
                dims.append(dims[-1] // 2)
            return Grid.product([config.num_hidden_layers], dims)
        grid = Grid.parse(self.grid).validate(config)
        if grid.dims[-1] != width_of(config) or len(grid) != len(grid.layers) * len(grid.dims):
            raise ValueError(f"The grid {grid} must have the same dims at every layer, up to {width_of(config)}.")
        if self.frozen and grid.layers != [config.num_hidden_layers]:
            raise ValueError(
                f"A frozen encoder is quantised at its last layer, {config.num_hidden_layers}; the grid is {grid}. "
                "Load the model at another depth (output_layer), or set frozen=False."
            )
        return grid

    def for_student(self, model: nn.Module) -> Self:
        config = unwrap_encoder(model).config
        if self.frozen and self.teacher_name_or_path is None and config.name_or_path:
            require_published(unwrap_encoder(model), self.pooling, self.max_length)
        chosen = self.with_student_as_teacher(model)
        return chosen if self.frozen else chosen.with_length_of_student()

    def build_distillation(self, grid: Grid, teacher: TeacherEmbeddings) -> Objective:
        if teacher.width != grid.dims[-1]:
            raise ValueError(
                f"The teacher's embeddings have {teacher.width} dims, the model's {grid.dims[-1]}: a quantizer "
                "starts from embeddings like those that it will read."
            )
        options = mapping_of("quantizer_config", self.quantizer_config)
        config = M3BertQuantizerConfig(hidden_size=grid.dims[-1], dims=grid.dims, layers=grid.layers, **options)
        quantizer = M3BertQuantizer(config)
        quantizer.initialize(sample_of(teacher))
        return QAMA(grid, quantizer=quantizer, **self.objective_arguments())


class QAMATrainer(DistillationTrainer):
    """
    Trains a quantizer for an encoder with [`QAMA`] and a [`QAMAConfig`], and saves it in the subfolder `quantizer` of
    the checkpoint. By default the encoder is frozen, and its embeddings of all texts are computed once; no labels are
    needed. At the end, thresholds are computed again from the training texts.
    """

    trains_quantizer = True

    def __init__(self, model: PreTrainedModel, args: QAMAConfig, *others: Any, **kwargs: Any):
        super().__init__(model, args, *others, **kwargs)
        config = unwrap_encoder(self.backbone).config
        self.earlier_record = TrainingRecord.find(config.name_or_path) if config.name_or_path else None
        if args.frozen:
            self.backbone.requires_grad_(False)
            self.quantizer.config.layers = shared_layers(config)

    @property
    def quantizer(self) -> M3BertQuantizer:
        """The quantizer that is trained."""
        return cast("QAMA", self.nested.objective).quantizer

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        cast("QAMA", self.nested.objective).progress = self.state.global_step / max(1, self.state.max_steps)
        return super().compute_loss(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        output = super().train(*args, **kwargs)
        self.calibrate()
        return output

    @torch.no_grad()
    def calibrate(self) -> None:
        """Set thresholds to the quantiles over training texts, of at most 20,000 embeddings."""
        if is_sharded(self.model):  # only a part of the model is run
            self.model.unshard()
        with self.compute_loss_context_manager():
            self.quantizer.calibrate(self._calibration_embeddings())
        if is_sharded(self.model):
            self.model.reshard()

    def _calibration_embeddings(self) -> torch.Tensor:
        if self.args.frozen:
            assert self.teacher is not None  # DistillationTrainer embeds the texts
            return sample_of(self.teacher).to(self.quantizer.device)
        embeddings, count = [], 0
        self.model.eval()
        for inputs in self.get_train_dataloader():
            texts = self.nested.encode(self._prepare_inputs(inputs))
            pooled = [
                text.pooled(layer, self.args.pooling)
                for text in texts.values()
                for layer in self.quantizer.config.layers
            ]
            embeddings.append(self.accelerator.gather(torch.cat(pooled)))
            count += len(embeddings[-1])
            if count >= CALIBRATION_TEXTS:
                break
        return torch.cat(embeddings)

    def save_modules(self, output_dir: str, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Also write the quantizer, with the record of its training. A frozen encoder keeps its own record."""
        super().save_modules(output_dir, state_dict)
        weights = part_of(state_dict, "objective.quantizer.")
        folder = write_quantizer(output_dir, with_weights(self.quantizer, weights))
        if not self.args.frozen:
            return
        self.record().save(folder)
        if self.earlier_record is None:
            Path(output_dir, RECORD_FILE).unlink()
        else:
            self.earlier_record.save(output_dir)


def require_published(encoder: PreTrainedModel, pooling: str | None, max_length: int | None) -> None:
    """Check that an encoder embeds as the model in its folder does, from which its embeddings are computed."""
    source = source_of(encoder)
    name, stored = source.name, load_config(source.name, **source.options)
    mine, published = (Granularity(*resolve_size(one)) for one in (encoder.config, stored))
    if mine != published:
        raise ValueError(
            f"The frozen encoder has the size {mine}, but {name} was saved with {published}: save the model at this "
            "size first, and load it from there."
        )
    if (settings := EmbeddingSettings.of_source(source)) is None:
        return
    for option, value, differs in (
        ("pooling", settings.pooling, settings.pooling != pooling),
        ("max_length", settings.max_length, (max_length or 0) > (settings.max_length or np.inf)),
    ):
        if differs:
            raise ValueError(f"{name} was published with {option}={value!r}, which a frozen encoder keeps.")


def sample_of(teacher: TeacherEmbeddings) -> torch.Tensor:
    """At most 20,000 embeddings of a teacher's cache, evenly spaced, `(embeddings, width)` in float32."""
    step = max(1, -(-len(teacher) // CALIBRATION_TEXTS))
    return torch.from_numpy(teacher.vectors[::step].astype(np.float32))
