"""Tasks by name."""

from __future__ import annotations

import pytest

from trainers.evaluation import GROUPS, TASKS, find_task, find_tasks


def test_groups_name_tasks():
    assert all(find_tasks([group]) for group in GROUPS)
    assert [task.name for task in find_tasks(["stsb", "sts", "xnli-de"])][-1] == "xnli-de"
    assert len({task.name for task in find_tasks(GROUPS)}) == len(find_tasks(GROUPS)) > len(TASKS)
    assert [task.name for task in find_tasks(["builtin"])] == ["stdlib"]


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match="There is no task 'bleu'. Tasks: stsb, .* groups: paper, "):
        find_tasks(["bleu"])
    with pytest.raises(ValueError, match="There is no task 'tatoeba-'"):
        find_task("tatoeba-")


def test_every_task_says_what_it_is():
    named = [*TASKS.values(), find_task("tatoeba-deu"), find_task("xnli-de")]
    assert [task.name for task in named if not task.about] == []
    assert "m3bert example_data" in find_task("stdlib").about
