"""The trainer that all objectives share: a `transformers.Trainer` whose model holds backbone and objective
together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from .arguments import NestedTrainingArguments
from .data import require_columns, require_one_batch
from .distributed import world_size
from .embedding_modules import PROJECTION_FOLDER
from .granularity import Grid
from .nested import unwrap_encoder
from .nested_model import NestedModel
from .objective import Objective
from .optimization import set_apart, warm_up_apart
from .projection import Projection
from .publishing import PublishingTrainer
from .record import origin_of


OBJECTIVE_FILE = "objective.safetensors"
TRAINING_ARGS_FILE = "training_args.json"


class NestedTrainer(PublishingTrainer):
    """
    Trains a backbone with an [`Objective`]. What differs from [`~transformers.Trainer`]: the model is wrapped with its
    objective ([`NestedModel`]); each named term is logged and evaluated beside the loss; a loss that is not finite
    stops the run; a checkpoint holds the backbone as `from_pretrained` reads it, and the objective's own parameters
    in a file beside it, which [`~NestedTrainer.save_model`] leaves out; nothing is pickled beside what the optimizer
    needs to resume.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The backbone. Its config is told the trained grid.
        objective ([`Objective`]): What to minimise.
        args ([`NestedTrainingArguments`]): How to train.
        data_collator (`Callable`): Makes batches that [`NestedModel`] takes.
        train_dataset ([`~datasets.Dataset`], *optional*): Training data.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): Evaluation data.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*): Saved with the model.
        callbacks (`list[TrainerCallback]`, *optional*): More callbacks.
        optimizers (`tuple`, *optional*): Optimizer and scheduler to use in place of the default ones.
        columns (`tuple[str, ...]`, *optional*): Columns that the collator reads; all must be there.
        mini_batch_size (`int`, *optional*): See [`NestedModel`].
        projection ([`Projection`], *optional*): See [`NestedModel`]. Saved beside the backbone, as a module of
            sentence-transformers.

    Raises:
        ValueError: if a dataset is empty, lacks a column, or is smaller than a batch that must be full; if the grid is
            outside the model, or lacks the full size where the objective needs it; with a projection, if the objective
            reads more than its dims; if an adapter alone is to be pushed.
    """

    # Columns that the collator also reads where they are.
    _optional_columns: tuple[str, ...] = ()

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        objective: Objective,
        args: NestedTrainingArguments,
        data_collator: Callable[[list[Any]], Mapping[str, Any]],
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        columns: tuple[str, ...] = (),
        mini_batch_size: int | None = None,
        projection: Projection | None = None,
    ):
        config = unwrap_encoder(model).config
        if args.push_to_hub and not isinstance(model, PreTrainedModel):
            raise ValueError("An adapter alone is not published: merge it (--merge_adapter), then push the model.")
        self.base_model, self.earlier_objectives = origin_of(config)
        objective.validate(config)
        if projection is not None:
            projection.validate(objective, config)
        eval_sets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        for dataset in (train_dataset, *eval_sets):
            if dataset is not None:
                require_columns(dataset, columns)
        require_one_batch(train_dataset, args)
        if projection is None:  # with one, the grid is of its dims, not of the encoder's states
            declare_grid(config, objective.grid)
        self.columns = columns
        self.train_terms, self.eval_terms = TermMeter(), TermMeter()
        self._is_checkpoint = False
        super().__init__(
            model=NestedModel(model, objective, mini_batch_size, projection),
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    @property
    def nested(self) -> NestedModel:
        """Backbone and objective, without what training wraps around them."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def backbone(self) -> nn.Module:
        """The model that is being trained, without its objective."""
        return self.nested.backbone

    @property
    def projection(self) -> Projection | None:
        """The projection that is being trained with the model, if there is one."""
        return self.nested.projection

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        # A learned temperature is one number: decay would pull it towards 1, not regularise it.
        scalars = {name for name, parameter in model.named_parameters() if parameter.ndim == 0}
        return [name for name in super().get_decay_parameter_names(model) if name not in scalars]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if fresh and self.args.has_projector_schedule:
            nested = self.nested
            own = [*nested.objective.parameters(), *(nested.projection or nn.Module()).parameters()]
            lr = self.args.projector_learning_rate
            set_apart(optimizer, own, lr if lr is not None else self.args.learning_rate)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        fresh = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if fresh and self.args.projector_warmup_steps is not None:
            warmup_steps = self.args.projector_warmup_steps_of(num_training_steps)
            warm_up_apart(scheduler, self.args, warmup_steps, num_training_steps)
        return scheduler

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = [*self.columns, *self._optional_columns]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        terms = {name: term.detach().float() for name, term in outputs["terms"].items()}
        if not torch.isfinite(loss):
            broken = [name for name, term in terms.items() if not torch.isfinite(term)] or ["loss"]
            raise ValueError(
                f"The loss is not finite at step {self.state.global_step + 1} (terms: {', '.join(broken)}). "
                f"Training stops before the update; checkpoints in {self.args.output_dir} are untouched."
            )
        if not model.training:
            self.eval_terms.add(terms)
        elif num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            # Shares of one mean over the whole step: they add up over its batches and over devices.
            self.train_terms.add(terms, scale=world_size(), step=self.state.global_step)
        else:
            self.train_terms.add(
                terms, scale=1 / self.current_gradient_accumulation_steps, step=self.state.global_step
            )
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **self.train_terms.pop(self.accelerator)}
        super().log(logs, start_time)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        self.eval_terms = TermMeter()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        means = self.eval_terms.pop(self.accelerator)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in means.items()})
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._is_checkpoint = _internal_call
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if not self.args.should_save:
            return
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        os.makedirs(output_dir, exist_ok=True)
        if state_dict is None:
            state_dict = self.nested.state_dict()
        self.backbone.save_pretrained(output_dir, state_dict=part_of(state_dict, "backbone."))
        self.save_modules(output_dir)
        auxiliary = part_of(state_dict, "objective.")
        if self._is_checkpoint and auxiliary:
            save_file(
                {name: tensor.contiguous() for name, tensor in auxiliary.items()},
                os.path.join(output_dir, OBJECTIVE_FILE),
            )
        if self.processing_class is not None:
            self.processing_class.save_pretrained(output_dir)
        with open(os.path.join(output_dir, TRAINING_ARGS_FILE), "w", encoding="utf-8") as file:
            file.write(self.args.to_json_string())
        self.record().save(output_dir)

    def save_modules(self, output_dir: str) -> None:
        """Write how sentence-transformers is to read the backbone: nothing here, an [`EmbeddingTrainer`] knows it."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        backbone = self.backbone
        if isinstance(backbone, PreTrainedModel):
            load_weights(backbone, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, backbone)
        if self.projection is not None:
            saved = Projection.find(resume_from_checkpoint)
            if saved is None:
                raise ValueError(f"{resume_from_checkpoint} has no projection ({PROJECTION_FOLDER}).")
            self.projection.load_state_dict(saved.state_dict())
        if objective_state := self.model.objective.state_dict():
            file = os.path.join(resume_from_checkpoint, OBJECTIVE_FILE)
            if not os.path.isfile(file):
                raise ValueError(
                    f"{resume_from_checkpoint} has no parameters of {type(self.model.objective).__name__} "
                    f"({OBJECTIVE_FILE}: {', '.join(objective_state)})."
                )
            self.model.objective.load_state_dict(load_file(file))

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(self.state.best_model_checkpoint)


class TermMeter:
    """Means of named terms since they were last read; the sums stay on the device until then."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.count = 0
        self.last_step: int | None = None

    def add(self, terms: Mapping[str, torch.Tensor], scale: float = 1.0, step: int | None = None) -> None:
        """Add terms; calls of one `step` (its accumulated batches) count once."""
        for name, term in terms.items():
            self.sums[name] = self.sums.get(name, 0.0) + term * scale
        if step is None or step != self.last_step:
            self.count += 1
        self.last_step = step

    def pop(self, accelerator: Any) -> dict[str, float]:
        """The means, averaged over processes; and start again."""
        reduced = accelerator.reduce(self.sums, reduction="mean") if self.sums else {}
        means = {name: (value / self.count).item() for name, value in reduced.items()}
        self.sums, self.count, self.last_step = {}, 0, None
        return means


def declare_grid(config: Any, grid: Grid) -> None:
    """
    Write the trained grid into a model's config, in the words that m3BERT and serving engines read.

    Raises:
        ValueError: if the config reads a granularity by default that the grid does not have.
    """
    config.matryoshka_layers, config.matryoshka_dims = grid.layers, grid.dims
    if config.model_type == "m3bert":
        config.resolve_granularity()
    else:  # m3BERT derives these two
        config.is_matryoshka, config.matryoshka_dimensions = True, grid.dims


def part_of(state_dict: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries below `prefix`, named from there."""
    return {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}


def load_weights(model: PreTrainedModel, folder: str) -> None:
    """
    Read the weights in `folder` into `model`, through the library's own loader.

    Raises:
        ValueError: if a tensor is missing, or has another shape (the checkpoint is cut short, or of another model).
    """
    loaded, info = type(model).from_pretrained(
        folder, config=model.config, dtype=model.dtype, use_safetensors=True, output_loading_info=True
    )
    wrong = sorted({*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])})
    if wrong:
        raise ValueError(
            f"The checkpoint {folder} lacks {len(wrong)} tensors of the model, or holds them in another shape: "
            f"{', '.join(wrong[:3])}, ..."
        )
    model.load_state_dict(loaded.state_dict())
