"""The trainer of all objectives: a `transformers.Trainer` whose model is a backbone with an objective."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import recursively_apply
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer import FSDP_MODEL_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from ...data.dataset_checks import require_known_metric, require_one_batch
from ...data.samplers import evaluation_batches
from ...data.streams import Epochs
from ...encode.projection import Projection
from ...encode.ranks import RankRows, wait_for_all_ranks, world_size
from ...encode.states import is_flash, unwrap_encoder
from ...modeling.configuration_elastic import Elasticity
from ...utils.durable import replacing_files, writing
from .arguments import NestedTrainingArguments
from .backbone import ONE_MODEL
from .checkpoints import load_weights, part_of, reading_tensors
from .grid import check_objective, declare_grid, drop_stale_exits
from .model import NestedModel, columns_of
from .objective import Objective, Term, TermLog
from .optimizer import set_learning_rate


logger = logging.getLogger(__name__)


OBJECTIVE_FILE = "objective.safetensors"
TRAINING_ARGS_FILE = "training_args.json"
NO_ROWS = Dataset.from_dict({})  # to evaluate on, with an evaluator alone: the library asks for a data set


class NestedTrainer(Trainer):
    """
    Trains a backbone with an [`Objective`]. Differences from [`~transformers.Trainer`]:

    - The model is wrapped together with its objective ([`NestedModel`]).
    - Each term of the loss is logged and evaluated in addition to the loss. As `metric_for_best_model`, the lowest is
      the best.
    - An evaluation reads each row once, in batches of nearly equal size. It reads a stream into memory.
    - A loss that is not finite stops the run before the update.
    - A checkpoint has the backbone in the format of `from_pretrained`, and the objective's own parameters in a
      separate file, which [`~NestedTrainer.save_model`] does not write.
    - Only the optimizer's state and the random state are pickled, which are needed to resume. It is read with
      `weights_only`: a file that holds anything but tensors and numbers is refused.
    - A stream is shuffled anew in each epoch, and each rank trains on different rows ([`Epochs`]).

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The backbone. [`~NestedTrainer.train`] writes the
            trained grid into its config.
        objective ([`Objective`]): The objective to minimise.
        args ([`NestedTrainingArguments`]): Training arguments.
        data_collator (`Callable`): Makes the inputs of [`NestedModel`] from rows of a dataset.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*): Training data.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): Evaluation data.
        columns (`tuple[str, ...]`, *optional*): Columns that the collator reads.
        optional_columns (`tuple[str, ...]`, *optional*): Columns that it reads if a dataset has them.
        mini_batch_size (`int`, *optional*): See [`NestedModel`].
        projection ([`Projection`], *optional*): See [`NestedModel`]. Saved with the backbone, as a module of
            sentence-transformers.
        evaluator (`Any`, *optional*): What [`~NestedTrainer.quality`] runs at each evaluation, beside or in place of
            `eval_dataset`.
        kwargs: Further arguments of [`~transformers.Trainer`]: `processing_class`, `callbacks`, `optimizers`, ...
            `compute_metrics` is for a masked-LM head; other trainers have no logits and take an `evaluator`.

    Raises:
        ValueError: if `compute_metrics` is passed without logits; if the model's exits have another pooling; if the
            training set is smaller than one batch and such batches are dropped; if none of several evaluation sets
            gives the metric of the best model; if the grid is outside the model or the projection, or lacks the full
            size; if flash attention would compute in float32; for `fsdp` with `mini_batch_size` or an evaluator.
    """

    gives_logits: ClassVar[bool] = False

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        objective: Objective,
        args: NestedTrainingArguments,
        data_collator: Callable[[list[Any]], Mapping[str, Any]],
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        columns: tuple[str, ...] = (),
        optional_columns: tuple[str, ...] = (),
        mini_batch_size: int | None = None,
        projection: Projection | None = None,
        evaluator: Any = None,
        **kwargs: Any,
    ):
        if kwargs.get("compute_metrics") is not None and not self.gives_logits:
            raise ValueError("compute_metrics needs logits, which this trainer does not have: pass evaluator=.")
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError("compute_loss_func would replace the objective: pass objective=.")
        encoder = unwrap_encoder(model)
        check_objective(objective, encoder.config, projection)
        attention = encoder.config._attn_implementation
        if is_flash(attention) and encoder.dtype == torch.float32 and not (args.bf16 or args.fp16):
            raise ValueError(f"attn_implementation={attention!r} needs half precision: pass bf16=True or fp16=True.")
        require_one_batch(train_dataset, args)
        require_known_metric(args, eval_dataset, evaluator is not None)
        if objective.layers:  # without layers, the encoder is not trained
            drop_stale_exits(encoder, objective.grid)
        self.columns, self.optional_columns = columns, optional_columns
        self._encoder = model
        self.evaluator = evaluator
        self.train_terms, self.eval_terms = TermLog(), TermLog()
        self._is_checkpoint = False
        super().__init__(
            model=NestedModel(model, objective, mini_batch_size, projection),
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=NO_ROWS if eval_dataset is None and evaluator is not None else eval_dataset,
            **kwargs,
        )
        if self.is_fsdp_enabled:
            self._configure_fsdp(mini_batch_size)

    def _configure_fsdp(self, mini_batch_size: int | None) -> None:
        """Set the precision of accelerate's FSDP: parameters are gathered in 16 bits, gradients reduced in float32."""
        plugin = self.accelerator.state.fsdp_plugin
        if mini_batch_size is not None or self.evaluator is not None:
            raise ValueError("fsdp divides the parameters: it excludes mini_batch_size and an evaluator.")
        if plugin.state_dict_type.name != "FULL_STATE_DICT":
            raise ValueError(f"fsdp_config: state_dict_type {plugin.state_dict_type.name} would not save the model.")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        if dtype is not None:
            plugin.mixed_precision_policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)

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

    @property
    def callback_handler(self) -> CallbackHandler:
        """The callbacks, which get the model that they can save, count or encode with, without its objective."""
        self._callback_handler.model = self._encoder
        return self._callback_handler

    @callback_handler.setter
    def callback_handler(self, handler: CallbackHandler) -> None:
        self._callback_handler = handler

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.configure_encoder()
        self.train_terms = TermLog()
        return super().train(*args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the objective and the texts belong to the model and the arguments of one trainer."""
        raise ValueError(ONE_MODEL)

    def configure_encoder(self) -> None:
        """Write the trained grid into the backbone's config. Does nothing for a model with a projection, whose grid
        has dims of the projection, not of the encoder's hidden states, and for an encoder that is not trained."""
        if self.projection is None and self.nested.objective.layers:
            declare_grid(unwrap_encoder(self.backbone).config, self.nested.objective.grid)

    def get_train_dataloader(self) -> DataLoader:
        if not isinstance(self.train_dataset, IterableDataset):
            return super().get_train_dataloader()
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        rows = Epochs(self.train_dataset, self.args.shuffle_buffer_size, seed)
        return self.loader(rows, "Training", batch_size=self._train_batch_size)

    def loader(self, rows: Any, description: str, kind: type[DataLoader] = DataLoader, **batches: Any) -> DataLoader:
        """A loader that accelerate does not prepare, which divides the rows of each rank again, or repeats some."""
        return kind(
            rows,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description=description),
            # The seed of the workers is drawn from here, so that resuming leaves the global generator unchanged.
            generator=torch.Generator(),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            **batches,
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with writing(output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with writing(output_dir):
            super()._save_rng_state(output_dir)
        wait_for_all_ranks()  # before rank 0 writes the marker of a complete checkpoint

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading_tensors(f"The optimizer's state in {checkpoint}"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading_tensors(f"The random state in {checkpoint}"):
            super()._load_rng_state(checkpoint)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        # Weight decay would pull a learned temperature towards 1, which does not regularise it, and shrink the rows of
        # a static table whose tokens are rare.
        undecayed = {
            name
            for name, parameter in model.named_parameters()
            if parameter.numel() == 1 or name.endswith("elastic.table.weight")
        }
        return [name for name in super().get_decay_parameter_names(model) if name not in undecayed]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if fresh and self.args.projector_learning_rate is not None:
            nested = self.nested
            fresh_parameters = [*nested.objective.parameters(), *(nested.projection or nn.Module()).parameters()]
            set_learning_rate(optimizer, fresh_parameters, self.args.projector_learning_rate)
        return optimizer

    def _set_signature_columns_if_needed(self) -> None:
        # The sampler that groups texts by length reads a column, too.
        self._signature_columns = [*self.columns, *self.optional_columns, self.args.length_column_name]

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
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        terms = {term: value.detach().float() for term, value in {**outputs["terms"], Term("loss"): loss}.items()}
        if model.training:
            # With a number of items, each value is a share of one mean over the whole step: sum over batches, devices.
            shares = num_items_in_batch is not None and self.model_accepts_loss_kwargs
            devices = world_size() if self.args.average_tokens_across_devices else 1
            weight = devices if shares else 1 / self.current_gradient_accumulation_steps
            is_update = self.accelerator.sync_gradients  # the last of its accumulated batches
            self.train_terms.add(terms, weight=weight, count=float(is_update))
            if is_update and (broken := self.train_terms.broken()):
                names = ", ".join(name for name in broken if name != "loss") or "loss"
                raise ValueError(
                    f"The loss is not finite at step {self.state.global_step + 1} (terms: {names}). Training stops "
                    f"before the update; checkpoints in {self.args.output_dir} are not changed."
                )
        else:
            rows: float = find_batch_size(inputs) or 1
            if not self.model_accepts_loss_kwargs:
                rows = sum(RankRows.of(int(rows), loss.device).counts) / world_size()
            self.eval_terms.add(terms, weight=rows, count=rows)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **self.train_terms.pop(self.accelerator), "loss": logs["loss"]}
        super().log(logs, start_time)

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        for column in columns_of(inputs).values():
            super()._track_num_input_tokens(column)

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            return super().get_eval_dataloader()  # which refuses
        return self.even_loader(self.eval_dataset[dataset] if isinstance(dataset, str) else dataset, "Evaluation")

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        return self.even_loader(test_dataset, "Test")

    def even_loader(self, dataset: Dataset, description: str) -> DataLoader:
        """Every row once, in batches that differ by at most one row."""
        rows = list(dataset) if isinstance(dataset, IterableDataset) else dataset
        batches = [] if dataset is NO_ROWS else evaluation_batches(len(rows), self.args.eval_batch_size)
        return self.loader(rows, description, batch_sampler=batches)

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
        """Hook for trainers that give logits: at the full size, for `compute_metrics`."""
        raise NotImplementedError

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        self.eval_terms = TermLog()
        self.gather_function = partial(
            recursively_apply, lambda part: RankRows.of(len(part), part.device).gather(part)
        )
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        means = self.eval_terms.pop(self.accelerator)
        if broken := [name for name, mean in means.items() if not math.isfinite(mean)]:
            raise ValueError(f"The evaluation loss is not finite (terms: {', '.join(broken)}).")
        losses = {f"{metric_key_prefix}_{name}": mean for name, mean in means.items()}
        output.metrics.update({**losses, **self._metrics_of_evaluator(metric_key_prefix)})
        best = f"eval_{(self.args.metric_for_best_model or '').removeprefix('eval_')}"
        if self.args.greater_is_better is None and best in output.metrics:
            self.args.greater_is_better = best not in losses and not best.endswith("loss")
        return output

    def _metrics_of_evaluator(self, metric_key_prefix: str) -> dict[str, float]:
        """Run the evaluator, beside the first of several evaluation sets only."""
        sets = [f"eval_{name}" for name in self.eval_dataset] if isinstance(self.eval_dataset, dict) else []
        if self.evaluator is None or metric_key_prefix in sets[1:]:
            return {}
        prefix, start = "eval" if metric_key_prefix in sets else metric_key_prefix, time.perf_counter()
        metrics = {**self.quality(), "evaluator_runtime": time.perf_counter() - start}
        return {f"{prefix}_{name}": value for name, value in metrics.items()}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._is_checkpoint = _internal_call
        if _internal_call and output_dir is not None and Path(output_dir).name.startswith(PREFIX_CHECKPOINT_DIR):
            # This file marks a complete checkpoint: delete an earlier run's.
            if self.args.should_save:
                Path(output_dir, TRAINER_STATE_NAME).unlink(missing_ok=True)
            wait_for_all_ranks()
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        # FSDP gathers the weights on the first process only: on others, the state dict is empty.
        if not self.args.should_save or state_dict == {}:
            return
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        self.configure_encoder()
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
        """Hook that writes further files next to the backbone, from the whole weights of [`NestedModel`]: the training
        record and the modules of sentence-transformers, in trainers that publish models. Writes nothing here."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        if Path(resume_from_checkpoint, f"{FSDP_MODEL_NAME}.bin").is_file():  # its optimizer would not be read
            raise ValueError(f"{resume_from_checkpoint} was written with fsdp: resume it with fsdp.")
        if isinstance(self.backbone, PreTrainedModel):
            load_weights(self.backbone, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, self.backbone)
        self.load_modules(resume_from_checkpoint)

    def load_modules(self, folder: str) -> None:
        """Load what a checkpoint has beside the backbone: the parameters of the objective."""
        objective = self.nested.objective
        if objective.state_dict():
            file = Path(folder, OBJECTIVE_FILE)
            with reading_tensors(f"The parameters of {type(objective).__name__} in {file}"):
                objective.load_state_dict(load_file(file))

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(self.state.best_model_checkpoint)
