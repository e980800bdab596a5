"""The trainer of all objectives: a `transformers.Trainer` whose model is a backbone with an objective."""

from __future__ import annotations

import copy
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, EvalPrediction

from modeling_m3bert.modeling_elastic import Elasticity, resolve_size

from .arguments import NestedTrainingArguments
from .checkpoints import check_training_state, load_weights, part_of
from .dataset_checks import require_columns, require_one_batch
from .durable import replacing_files, writing
from .granularity import Grid
from .model import NestedModel
from .objective import Objective, Term, TermMeter
from .optimization import OWN_GROUP, reshape_loaded_state, set_apart, warm_up_apart
from .parallel.fsdp import check_checkpoint, check_fsdp, precision_policy
from .parallel.ranks import equal_on_all_ranks, rank, wait_for_all_ranks, world_size
from .projection import Projection
from .states import check_pooling, unwrap_encoder
from .streams.loader import Layout, StreamLoader
from .streams.stream import Stream, streamed
from .throughput import ThroughputMeter


logger = logging.getLogger(__name__)


OBJECTIVE_FILE = "objective.safetensors"
TRAINING_ARGS_FILE = "training_args.json"


class NestedTrainer(Trainer):
    """
    Trains a backbone with an [`Objective`]. Differences from [`~transformers.Trainer`]:

    - The model is wrapped together with its objective ([`NestedModel`]).
    - Each term of the loss is logged and evaluated in addition to the loss, and the speed on request.
    - A loss that is not finite stops the run before the update.
    - A checkpoint has the backbone in the format of `from_pretrained`, and the objective's own parameters in a
      separate file, which [`~NestedTrainer.save_model`] does not write.
    - Only the state of the optimizer and of the generators is pickled, which is needed to resume. It is read with
      `weights_only`: a file that holds anything but tensors and numbers is refused.
    - A stream is shuffled, each rank trains on rows of its own, and a resumed run continues with the next row
      ([`Stream`]).

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The backbone. [`~NestedTrainer.train`] writes the
            trained grid into its config.
        objective ([`Objective`]): The objective to minimise.
        args ([`NestedTrainingArguments`]): Training arguments.
        data_collator (`Callable`): Makes the inputs of [`NestedModel`] from rows of a dataset.
        train_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or [`Stream`], *optional*): Training data.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): Evaluation data.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*): Tokenizer, saved with the model.
        callbacks (`list[TrainerCallback]`, *optional*): Additional callbacks.
        optimizers (`tuple`, *optional*): Optimizer and scheduler that replace the default ones.
        columns (`tuple[str, ...]`, *optional*): Columns that the collator reads; every dataset must have them.
        mini_batch_size (`int`, *optional*): See [`NestedModel`].
        projection ([`Projection`], *optional*): See [`NestedModel`]. Saved with the backbone, as a module of
            sentence-transformers.
        evaluator (`Any`, *optional*): What [`~NestedTrainer.quality`] runs at each evaluation, beside or in place of
            `eval_dataset`.
        compute_metrics (`Callable`, *optional*): As in [`~transformers.Trainer`], for a masked-LM head. Other trainers
            have no logits: pass `evaluator`.
        preprocess_logits_for_metrics (`Callable`, *optional*): As in [`~transformers.Trainer`].

    Raises:
        ValueError: if `compute_metrics` is passed to a trainer without logits; if a dataset is empty or lacks a
            column; if the pooling is not that of the model's exits; if the training set is smaller than one batch and
            smaller batches are dropped; if the grid is outside the model, or lacks the full size that the objective
            needs; if the objective reads more than the projection has.
    """

    # Columns that the collator reads if a dataset has them.
    _optional_columns: tuple[str, ...] = ()
    gives_logits: ClassVar[bool] = False

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
        evaluator: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ):
        if compute_metrics is not None and not self.gives_logits:
            raise ValueError("compute_metrics needs logits, which this trainer does not have: pass evaluator=.")
        config = unwrap_encoder(model).config
        if projection is not None:
            projection.validate(objective, config)
        objective.validate(config)
        if objective.pooling is not None:
            check_pooling(objective.pooling, config)
        train_dataset = streamed(train_dataset)
        eval_sets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        for dataset in (train_dataset, *eval_sets):
            if dataset is not None:
                require_columns(dataset, columns)
        require_one_batch(train_dataset, args)
        if projection is None and objective.layers:
            declare_grid(copy.deepcopy(config), objective.grid)  # raise a ValueError before training, not after it
        if objective.layers:  # without layers, the encoder is not trained
            drop_stale_exits(unwrap_encoder(model), objective.grid)
        self.columns = columns
        self.train_terms, self.eval_terms = TermMeter(), TermMeter()
        self._throughput: ThroughputMeter | None = None
        self._finite: dict[Term | None, torch.Tensor] = {}
        self._is_checkpoint = False
        self._stream_loader: StreamLoader | None = None
        super().__init__(
            model=NestedModel(model, objective, mini_batch_size, projection),
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset="evaluator" if eval_dataset is None and evaluator is not None else eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.eval_dataset, self.evaluator = eval_dataset, evaluator
        if self.is_fsdp_enabled and evaluator is not None:
            raise ValueError(
                "An evaluator needs the whole model on one process, which fsdp divides: evaluate it later."
            )
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            check_fsdp(args, plugin, mini_batch_size)
            plugin.mixed_precision_policy = precision_policy(self.accelerator.mixed_precision)

    @property
    def nested(self) -> NestedModel:
        """Backbone and objective, without the wrappers of distributed training and compilation."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def backbone(self) -> Any:
        """The trained model, without its objective."""
        return self.nested.backbone

    @property
    def projection(self) -> Projection | None:
        """The projection that is trained with the model, if there is one."""
        return self.nested.projection

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.declare_grid()
        self._throughput = ThroughputMeter.of(self.nested, self.args)
        return super().train(*args, **kwargs)

    def declare_grid(self) -> None:
        """Write the trained grid into the backbone's config. Does nothing for a model with a projection, whose grid
        has dims of the projection, not of the encoder's states, and for an encoder that is not trained."""
        if self.projection is None and self.nested.objective.layers:
            declare_grid(unwrap_encoder(self.backbone).config, self.nested.objective.grid)

    def get_train_dataloader(self) -> Any:
        if not isinstance(self.train_dataset, Stream):
            return super().get_train_dataloader()
        if not equal_on_all_ranks(self.train_dataset.identity):
            raise ValueError("The ranks read different data: pass the same files, in the same order, to each process.")
        args = self.args
        args.ignore_data_skip = True  # the loader continues from its own position
        layout = Layout(
            batch_size=self._train_batch_size,
            buffer_size=args.shuffle_buffer_size,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            rank=rank(),
            ranks=world_size(),
            workers=max(1, args.dataloader_num_workers),
        )
        return StreamLoader(
            self.train_dataset,
            self._get_collator_with_removed_columns(self.data_collator, description="Training"),
            layout,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
        )

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._stream_loader = train_dataloader if isinstance(train_dataloader, StreamLoader) else None
        if self._stream_loader is not None and resume_from_checkpoint is not None:
            self._stream_loader.load(resume_from_checkpoint)
        return prepared

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with writing(output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with writing(output_dir):
            super()._save_rng_state(output_dir)
            if self._stream_loader is not None:
                self._stream_loader.save(output_dir)
        wait_for_all_ranks()  # before the first one says that the checkpoint is complete

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        # Weight decay would pull a learned temperature towards 1, which does not regularise it, and shrink the rows of
        # a static table whose tokens are rare.
        kept = {
            name
            for name, parameter in model.named_parameters()
            if parameter.numel() == 1 or name.endswith("elastic.table.weight")
        }
        return [name for name in super().get_decay_parameter_names(model) if name not in kept]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if fresh:
            optimizer.register_load_state_dict_post_hook(reshape_loaded_state)
        if fresh and self.args.has_projector_schedule:
            nested = self.nested
            own = [*nested.objective.parameters(), *(nested.projection or nn.Module()).parameters()]
            lr = self.args.projector_learning_rate
            set_apart(optimizer, own, lr if lr is not None else self.args.learning_rate, **{OWN_GROUP: True})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        fresh = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if fresh and self.args.projector_warmup_steps is not None:
            warmup_steps = self.args.projector_warmup_steps_of(num_training_steps)
            warm_up_apart(scheduler, self.args, warmup_steps, num_training_steps)
        return scheduler

    def _set_signature_columns_if_needed(self) -> None:
        # The sampler that groups texts by length reads a column, too.
        self._signature_columns = [*self.columns, *self._optional_columns, self.args.length_column_name]

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        # Under FSDP, accelerate casts the parameters, but does not turn autocast on.
        if self.is_fsdp_enabled:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(cache_enabled)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        if model.training:
            for part in self.nested.objective.modules():
                if isinstance(part, Objective):
                    part.constrain()
            if self._throughput is not None:
                self._throughput.add(inputs)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        terms = {term: value.detach().float() for term, value in outputs["terms"].items()}
        if model.training:
            self._watch(loss, terms)
        if not model.training:
            self.eval_terms.add(terms)
        elif num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            # Each value is a share of one mean over the whole step: sum over its batches and over devices.
            self.train_terms.add(terms, scale=world_size(), step=self.state.global_step)
        else:
            self.train_terms.add(
                terms, scale=1 / self.current_gradient_accumulation_steps, step=self.state.global_step
            )
        return (loss, outputs) if return_outputs else loss

    def _watch(self, loss: torch.Tensor, terms: Mapping[Term, torch.Tensor]) -> None:
        """Raise a ValueError before an update with a loss that is not finite. Synchronises with the device once per
        update, not once per accumulated batch."""
        for term, value in [*terms.items(), (None, loss.detach())]:
            is_finite = torch.isfinite(value)
            self._finite[term] = self._finite[term] & is_finite if term in self._finite else is_finite
        if not self.accelerator.sync_gradients:
            return
        finite, self._finite = self._finite, {}
        if not torch.stack(list(finite.values())).all():
            broken = [str(term) for term, was_finite in finite.items() if term is not None and not was_finite]
            raise ValueError(
                f"The loss is not finite at step {self.state.global_step + 1} (terms: {', '.join(broken) or 'loss'}). "
                f"Training stops before the update; checkpoints in {self.args.output_dir} are not changed."
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **self.train_terms.pop(self.accelerator)}
            if self._throughput is not None:
                logs |= self._throughput.pop()
        if self._stream_loader is not None:  # the length of a stream, and so the share of an epoch, is not known
            self.state.epoch = float(self._stream_loader.epoch)
        super().log(logs, start_time)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        if eval_dataset is None and self.eval_dataset is None and self.evaluator is not None:
            # No loss is evaluated. The loader draws a seed, which must not come from the generator of the training.
            return DataLoader([], generator=torch.Generator())  # type: ignore[arg-type]
        return super().get_eval_dataloader(eval_dataset)

    def quality(self) -> dict[str, float]:
        """Hook that runs the evaluator: name -> value, the same on all processes."""
        return {}

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
            if prediction_loss_only or not self.gives_logits:
                return loss.detach(), None, None
            return loss.detach(), self.logits(inputs), inputs["labels"]

    def logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Hook for trainers that give logits: those of the full size for `compute_metrics`."""
        raise NotImplementedError

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        self.eval_terms = TermMeter()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        means = self.eval_terms.pop(self.accelerator)
        broken = [name for name, value in means.items() if not math.isfinite(value)]
        if broken:
            raise ValueError(f"The evaluation loss is not finite (terms: {', '.join(broken)}).")
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in means.items()})
        names = [f"eval_{name}" for name in self.eval_dataset] if isinstance(self.eval_dataset, dict) else []
        if self.evaluator is not None and metric_key_prefix not in names[1:]:  # once, not for each data set
            prefix, start = "eval" if metric_key_prefix in names else metric_key_prefix, time.perf_counter()
            found = {**self.quality(), "evaluator_runtime": time.perf_counter() - start}
            output.metrics.update({f"{prefix}_{name}": value for name, value in found.items()})
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._is_checkpoint = _internal_call
        if _internal_call and output_dir is not None and Path(output_dir).name.startswith(PREFIX_CHECKPOINT_DIR):
            # A checkpoint with this file is complete. One of an earlier run in its place is not any more.
            if self.args.should_save:
                Path(output_dir, TRAINER_STATE_NAME).unlink(missing_ok=True)
            wait_for_all_ranks()
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        # FSDP gathers the weights on the first process only: on others, the state dict is empty.
        if not self.args.should_save or state_dict == {}:
            return
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        self.declare_grid()
        if state_dict is None:
            state_dict = self.nested.state_dict()
        # Half the precision of a static table is enough to publish it, but not to resume its training.
        whole = isinstance(self.backbone, PreTrainedModel)
        exact = self._is_checkpoint and whole and bool(Elasticity.of(self.backbone.config).table)
        with replacing_files(Path(output_dir), last="config.json" if whole else "adapter_config.json") as draft:
            self.backbone.save_pretrained(
                draft, state_dict=part_of(state_dict, "backbone."), **({"exact": True} if exact else {})
            )
            self.save_modules(str(draft), state_dict)
            auxiliary = part_of(state_dict, "objective.")
            if self._is_checkpoint and auxiliary:
                save_file({name: tensor.contiguous() for name, tensor in auxiliary.items()}, draft / OBJECTIVE_FILE)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(draft)
            (draft / TRAINING_ARGS_FILE).write_text(self.args.to_json_string(), encoding="utf-8")

    def save_modules(self, output_dir: str, state_dict: Mapping[str, torch.Tensor]) -> None:
        """
        Hook that writes further files next to the backbone: the training record and the modules of
        sentence-transformers, in trainers that publish models. Writes nothing here.

        Args:
            output_dir (`str`): Folder of the checkpoint.
            state_dict (`Mapping[str, torch.Tensor]`): Whole weights of [`NestedModel`].
        """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        check_checkpoint(resume_from_checkpoint, self.is_fsdp_enabled)
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        check_training_state(resume_from_checkpoint)
        backbone = self.backbone
        if isinstance(backbone, PreTrainedModel):
            load_weights(backbone, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, backbone)
        self.load_modules(resume_from_checkpoint)

    def load_modules(self, folder: str) -> None:
        """Load what a checkpoint has beside the backbone: the parameters of the objective."""
        objective = self.nested.objective
        if wanted := objective.state_dict():
            file = os.path.join(folder, OBJECTIVE_FILE)
            if not os.path.isfile(file):
                raise ValueError(
                    f"{folder} has no parameters of {type(objective).__name__}: it lacks {OBJECTIVE_FILE} with "
                    f"{', '.join(wanted)}."
                )
            try:
                objective.load_state_dict(load_file(file))
            except (SafetensorError, RuntimeError) as error:
                raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}.") from error

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(self.state.best_model_checkpoint)


def declare_grid(config: Any, grid: Grid) -> None:
    """
    Write the trained grid into a model's config, under the names that m3BERT and serving engines read.

    Raises:
        ValueError: if the config's default granularity is not in the grid.
    """
    config.matryoshka_layers, config.matryoshka_dims = grid.layers, grid.dims
    resolve_size(config)
    if config.model_type != "m3bert":  # which derives these two
        config.is_matryoshka, config.matryoshka_dimensions = True, grid.dims


def drop_stale_exits(encoder: PreTrainedModel, grid: Grid) -> None:
    """Remove exits and paths of depths outside the grid: training moves the states that they were fitted to."""
    spec = Elasticity.of(encoder.config)
    stale = sorted({*spec.exits, *filter(spec.is_path, spec.depths)} - {*grid.layers})
    if stale:
        logger.warning(
            f"The exits of depths {', '.join(map(str, stale))} are dropped: the grid {grid} does not train them. "
            "To fit them again after training, use `m3bert fit`."
        )
        encoder.drop_depths(stale)
