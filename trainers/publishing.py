"""What all trainers do about the Hub: remember the run, write the card, publish."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import Trainer
from transformers.trainer_utils import HubStrategy, has_length
from transformers.utils import PushInProgress

from .papers import Paper
from .record import TrainingRecord, changed_settings, hub_datasets


logger = logging.getLogger(__name__)


class PublishingTrainer(Trainer):
    """
    A [`~transformers.Trainer`] that publishes what a user of the model needs, and nothing else: no state of the
    optimizer, no pickled arguments. A new repository is private unless `hub_private_repo=False` says otherwise.
    """

    # What a model card says of a trainer: its objective, and which equation of which paper that is.
    _name: str = "an objective of its own"
    _tag_names: tuple[str, ...] = ()
    _paper: Paper | None = None
    _equation: str = ""

    # Of the backbone, before this run.
    base_model: str | None = None
    earlier_objectives: list[str]
    columns: tuple[str, ...]
    nested: Any
    push_in_progress: Any = None

    def record(self) -> TrainingRecord:
        """What a model card says of this run, so far."""
        args, data = self.args, self.train_dataset
        paper = self._paper
        best = self.state.best_global_step if args.load_best_model_at_end else None
        return TrainingRecord(
            trainer=type(self).__name__,
            name=self._name,
            equation=self._equation,
            paper={"title": paper.title, "id": paper.id, "citation": paper.citation} if paper else {},
            tags=list(self._tag_names),
            grid=str(self.nested.objective.grid),
            base_model=self.base_model,
            earlier=self.earlier_objectives,
            settings=changed_settings(args),
            columns=list(self.columns),
            rows=0 if data is None else len(data) if has_length(data) else None,
            datasets=hub_datasets([data]),
            # Once the best model is loaded, the steps after it are not in the weights.
            steps=self.state.global_step if self.is_in_train or best is None else best,
            batch_size=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            seed=args.seed,
        )

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As [`~transformers.Trainer.init_hf_repo`]; a new repository is private unless `hub_private_repo=False`."""
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            raise ValueError(
                f"hub_strategy={self.args.hub_strategy.value!r} would push the optimizer's state, which is not "
                "published; legal values: end, every_save."
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
        Save the model and publish it, as `scripts.push_to_hub` does: weights, remote code, tokenizer, modules of
        sentence-transformers, and a card that is made of this trainer and of an evaluation. Of what else is in
        `output_dir` nothing travels.

        Args:
            commit_message (`str`, *optional*): Of the commit.
            blocking (`bool`, *optional*, defaults to `True`): Return when it is done, or a `Future` at once.
            token (`str`, *optional*): Default: `args.hub_token`, then that of the environment.
            revision (`str`, *optional*): Branch. Default: `args.hub_revision`, then `main`.
            private (`bool`, *optional*): Of a new repository. Default: `args.hub_private_repo`, then `True`.
            kwargs: `results` ([`~trainers.evaluation.GridResults`], by default those in `output_dir/results.json`, if
                there are any), and of [`~transformers.Trainer.create_model_card`] `language`, `license`, `tags`,
                `finetuned_from` and `dataset`.

        Returns:
            [`~huggingface_hub.CommitInfo`], or a `Future` of it; `None` on all processes but the first.
        """
        from hub_cards.publication import publish  # it reads trainers, too

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
        """As the library's, without the optimizer's state and without pickled arguments, in which a token would be."""
        from hub_cards.publication import publish

        running = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if running and not self.args.hub_always_push:
            return
        self._finish_current_push()  # a commit at a time
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
        """As the library's, which does not say what went wrong in the background."""
        super()._finish_current_push()
        for job in self.push_in_progress.jobs if self.push_in_progress is not None else ():
            if error := job.exception():
                logger.error(f"A push while training failed: {error}")

    def create_model_card(self, model_name: str | None = None, **kwargs: Any) -> None:
        """
        Write `README.md` into `output_dir`, where the model was saved, as [`~NestedTrainer.push_to_hub`] makes it.

        Args:
            model_name (`str`, *optional*): Default: `hub_model_id`, then the name of `output_dir`.
            kwargs: As for [`~NestedTrainer.push_to_hub`]; there are results where they are given.
        """
        from hub_cards.publication import write_card

        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        name = model_name or self.hub_model_id or self.args.hub_model_id or folder.absolute().name
        write_card(folder, name, *self._card_options(**kwargs))

    def _card_options(
        self,
        results: Any = None,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        finetuned_from: str | None = None,
        dataset: str | list[str] | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        model_name: str | None = None,
        dataset_args: Any = None,
        **unknown: Any,
    ) -> tuple[Any, Any]:
        """What the library's arguments of a card mean for ours: names of data sets are their ids on the Hub, tasks are
        tags; how a model is called and how its data was loaded is known otherwise."""
        from hub_cards.metadata import Statements
        from hub_cards.publication import Options

        if unknown:
            raise TypeError(f"A card takes no {', '.join(unknown)}.")
        languages, more_tags, task_tags, datasets = (
            (value,) if isinstance(value, str) else tuple(value or ())
            for value in (language, tags, tasks, dataset_tags or dataset)
        )
        statements = Statements(license, languages, datasets, finetuned_from, (*more_tags, *task_tags))
        return Options(statements=statements), results
