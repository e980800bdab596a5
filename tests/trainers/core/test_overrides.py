"""The trainers override few private methods of the library's, whose signatures may change in any release."""

from __future__ import annotations

import inspect

import pytest
from transformers import Trainer

from m3bert import trainers
from m3bert.trainers import NestedTrainer


# Private method -> its parameters in transformers 5.23.
OVERRIDDEN = {
    "_finish_current_push": "(self)",
    "_load_best_model": "(self)",
    "_load_from_checkpoint": "(self, resume_from_checkpoint, model)",
    "_load_optimizer_and_scheduler": "(self, checkpoint)",
    "_load_rng_state": "(self, checkpoint)",
    "_push_from_checkpoint": "(self, checkpoint_folder)",
    "_save": "(self, output_dir, state_dict)",
    "_save_optimizer_and_scheduler": "(self, output_dir)",
    "_save_rng_state": "(self, output_dir)",
    "_set_signature_columns_if_needed": "(self)",
    "_track_num_input_tokens": "(self, inputs)",
}
# Private methods that are called.
CALLED = {"_get_collator_with_removed_columns": "(self, data_collator, description)"}


def parameters(owner: type, name: str) -> str:
    return f"({', '.join(inspect.signature(getattr(owner, name)).parameters)})"


def private(owner: type) -> set[str]:
    return {name for name in vars(owner) if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("name", sorted(OVERRIDDEN | CALLED))
def test_a_private_method_of_the_library_is_as_it_was(name):
    assert parameters(Trainer, name) == (OVERRIDDEN | CALLED)[name]


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_an_override_takes_what_the_library_passes(name):
    ours = trainers.ContrastiveTrainer.__mro__
    owner = next(owner for owner in ours if name in vars(owner))
    assert issubclass(owner, NestedTrainer)
    assert parameters(owner, name) == OVERRIDDEN[name]


def test_no_other_private_method_is_overridden():
    exported = [getattr(trainers, name) for name in trainers.__all__]
    classes = {owner for each in exported if inspect.isclass(each) for owner in each.__mro__}
    ours = {owner for owner in classes if issubclass(owner, NestedTrainer)}
    assert len(ours) > 10
    assert {name for owner in ours for name in private(owner)} & private(Trainer) == set(OVERRIDDEN)
    assert len(OVERRIDDEN) <= 11
