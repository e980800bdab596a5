"""The trainer that publishes: a record of the run, the model card, and the Hub."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import HubStrategy, has_length
from transformers.utils import PushInProgress

from ...data.formats import file_name
from ...data.training_sets import NamedDatasets
from ...encode.encoder import GridEncoder
from ...encode.states import unwrap_encoder
from ...evaluation.results import GridResults
from ...evaluation.while_training import GridEvaluator, as_sentence_transformer
from ...hub_cards.metadata import Statements
from ...hub_cards.publication import Options, publish, write_card
from ...hub_cards.training_record import TrainingRecord, changed_settings, hub_datasets, origin_of, parts_of
from ...models.settings import EmbeddingSettings
from .arguments import NestedTrainingArguments
from .objective import Objective
from .trainer import NestedTrainer


logger = logging.getLogger(__name__)


class PublishingTrainer(NestedTrainer):
    """
    A [`NestedTrainer`] that keeps a record of the run in each checkpoint, and writes its model card from it. It
    publishes only what a user of the model needs: no optimizer state, no pickled arguments. A new repository is
    private unless `hub_private_repo=False`.

    Args:
        evaluator (`Callable` or `list[Callable]`, *optional*): Runs at each evaluation, after the loss of
            `eval_dataset` or in its place: a [`GridEvaluator`], an evaluator of sentence-transformers, or what takes a
            [`~sentence_transformers.SentenceTransformer`] of the full size and returns metrics. `eval_NAME` is logged,
            and may be `metric_for_best_model`.
        others: Positional arguments of [`NestedTrainer`].
        kwargs: Further arguments of [`NestedTrainer`].
    """

    push_in_progress: Any = None
    # Hub ids and files of the training data, for the record: the data itself does not always tell where it is from.
    dataset_ids: tuple[str, ...] = ()
    data_files: tuple[str, ...] = ()

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        objective: Objective,
        args: NestedTrainingArguments,
        *others: Any,
        evaluator: Any = None,
        **kwargs: Any,
    ):
        # Read before this run writes anything: it may save into the folder of the model it starts from.
        self.base_model, self.earlier_objectives = origin_of(unwrap_encoder(model).config)
        several = isinstance(evaluator, list | tuple)
        self.evaluators: list[Any] = [*evaluator] if several else [] if evaluator is None else [evaluator]
        kwargs["evaluator"] = evaluator
        first = next(iter(self.evaluators), None)
        no_loss = args.metric_for_best_model == "loss" and kwargs.get("eval_dataset") is None
        if isinstance(first, GridEvaluator) and no_loss:
            args.metric_for_best_model, args.greater_is_better = first.primary_metric(objective.grid), True
        super().__init__(model, objective, args, *others, **kwargs)

    def settings(self, state_dict: Mapping[str, torch.Tensor]) -> EmbeddingSettings:
        """The settings by which the trained model embeds a text. `state_dict` has the whole weights of
        [`NestedModel`]."""
        return EmbeddingSettings()

    def grid_encoder(self) -> GridEncoder:
        """The model as it is now, at the trained granularities, with the settings that it is saved with."""
        config, state_dict = unwrap_encoder(self.backbone).config, self.nested.state_dict()
        arguments = GridEncoder.arguments_of(self.settings(state_dict), config, self.processing_class)
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        grid = self.nested.objective.grid
        return GridEncoder(self.backbone, self.processing_class, grid, compute_dtype=dtype, **arguments)

    def quality(self) -> dict[str, float]:
        """Run the evaluators on rank 0, and return their metrics on all ranks."""
        metrics: dict[str, float] = {}
        if self.is_world_process_zero():
            encoder, state = self.grid_encoder(), self.state
            for evaluator in self.evaluators:
                if isinstance(evaluator, GridEvaluator):
                    result: Any = evaluator(encoder)
                else:
                    result = evaluator(as_sentence_transformer(encoder), None, state.epoch or 0, state.global_step)
                metrics |= result if isinstance(result, dict) else {"evaluator": result}
        return broadcast_object_list([metrics])[0]

    def record(self) -> TrainingRecord:
        """The record of this run up to now."""
        args, data = self.args, self.train_dataset
        datasets = data.datasets if isinstance(data, NamedDatasets) else [data]
        several = len(datasets) > 1
        identity = self.nested.objective.identity
        best = self.state.best_global_step if args.load_best_model_at_end else None
        return TrainingRecord(
            trainer=type(self).__name__,
            objective=identity.name,
            parts=parts_of(identity),
            tags=list(identity.tags),
            grid=str(self.nested.objective.grid),
            base_model=self.base_model,
            earlier=self.earlier_objectives,
            settings=changed_settings(args),
            columns=list(self.optional_columns if several else self.columns),
            sets={name: len(each) for name, each in data.named.items()} if several else {},
            rows=0 if data is None else len(data) if has_length(data) else None,
            datasets=list(dict.fromkeys([*hub_datasets(datasets), *self.dataset_ids])),
            # With the best model loaded at the end, later steps are not in the weights.
            steps=self.state.global_step if self.is_in_train or best is None else best,
            batch_size=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            seed=args.seed,
            files=list(dict.fromkeys(map(file_name, self.data_files))),
        )

    def save_modules(self, output_dir: str, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Also write the training record into the folder of the checkpoint."""
        super().save_modules(output_dir, state_dict)
        self.record().save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Also refuse to resume on other data: the batches to skip would not be those that were trained on."""
        before = TrainingRecord.find(checkpoint) if checkpoint and not self.args.ignore_data_skip else None
        for name in ("rows", "columns", "sets") if before is not None else ():
            if (old := getattr(before, name)) != (new := getattr(self.record(), name)):
                raise ValueError(
                    f"{checkpoint} was trained on other data: {name} {old}, now {new}. Resume on the same, or pass it "
                    "as the model of a new run."
                )
        super()._load_optimizer_and_scheduler(checkpoint)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As [`~transformers.Trainer.init_hf_repo`]; a new repository is private unless `hub_private_repo=False`."""
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            raise ValueError(
                f"hub_strategy={self.args.hub_strategy.value!r} would publish the optimizer's state; legal values: "
                "end, every_save."
            )
        super().init_hf_repo(token, self._private(private))

    def _private(self, private: bool | None) -> bool:
        return next((said for said in (private, self.args.hub_private_repo) if said is not None), True)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Save the model and publish it, as the command `push` does: weights, remote code, tokenizer, modules of
        sentence-transformers, and a card generated from this trainer and an evaluation. Nothing else in `output_dir`
        is uploaded.

        Args:
            commit_message (`str`, *optional*): Commit message.
            blocking (`bool`, *optional*, defaults to `True`): Wait for the upload. `False` returns a `Future` at once.
            token (`str`, *optional*): Token for the Hub. Default: `args.hub_token`, then the environment's.
            revision (`str`, *optional*): Branch. Default: `args.hub_revision`, then `main`.
            private (`bool`, *optional*): Make a new repository private. Default: `args.hub_private_repo`, then `True`.
            kwargs: `results` ([`~m3bert.evaluation.GridResults`]; default: `output_dir/results.json`, if of these
                weights), and arguments of [`~transformers.Trainer.create_model_card`].

        Returns:
            [`~huggingface_hub.CommitInfo`], or a `Future` of it; `None` on all processes but the first.

        Raises:
            ValueError: as [`~m3bert.hub_cards.layout.prepare`].
            OSError: if the Hub refuses the upload or cannot be reached.
        """
        options, results = self._card_options(**kwargs)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token if token is not None else self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self._is_checkpoint = False
        super().save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        push = partial(
            publish,
            Path(self.args.output_dir),
            self.hub_model_id,
            options,
            results,
            private=self._private(private),
            revision=revision if revision is not None else self.args.hub_revision,
            token=token,
            message=commit_message or "End of training",
        )
        return push() if blocking else HfApi(token=token).run_as_future(push)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """As in transformers, but without optimizer state and pickled arguments, which hold the token."""
        running = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if running and not self.args.hub_always_push:
            return
        self._finish_current_push()  # one commit at a time
        job = HfApi(token=self.args.hub_token).run_as_future(
            publish,
            Path(checkpoint_folder),
            self.hub_model_id,
            private=self._private(None),
            revision=self.args.hub_revision,
            token=self.args.hub_token,
            message=f"Training in progress, step {self.state.global_step}",
        )
        self.push_in_progress = PushInProgress([job])

    def _finish_current_push(self) -> None:
        """As in transformers, and log what went wrong in the background."""
        super()._finish_current_push()
        for job in self.push_in_progress.jobs if self.push_in_progress is not None else ():
            if error := job.exception():
                logger.error(f"A push while training failed: {error}")

    def create_model_card(self, model_name: str | None = None, **kwargs: Any) -> None:
        """Write the card that [`~PublishingTrainer.push_to_hub`] publishes to `README.md` in `output_dir`, where the
        model was saved, with its arguments; without `results`, the card shows none. Default name: `hub_model_id`, then
        the name of `output_dir`."""
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        name = model_name or self.hub_model_id or self.args.hub_model_id or folder.absolute().name
        write_card(folder, name, *self._card_options(**kwargs))

    def _card_options(
        self,
        results: GridResults | None = None,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        finetuned_from: str | None = None,
        dataset: str | list[str] | None = None,
    ) -> tuple[Options, GridResults | None]:
        """Turn the arguments of transformers for a card into ours. Names of data sets are Hub ids."""
        languages, more_tags, datasets = (
            (value,) if isinstance(value, str) else tuple(value or ()) for value in (language, tags, dataset)
        )
        return Options(statements=Statements(license, languages, datasets, finetuned_from, more_tags)), results
