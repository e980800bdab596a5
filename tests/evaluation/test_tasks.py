"""Tasks by name."""

from __future__ import annotations

from m3bert.evaluation import GROUPS, TASKS, find_tasks


def test_groups_name_tasks():
    assert all(find_tasks([group]) for group in GROUPS)
    assert [task.name for task in find_tasks(["stsb", "sts", "xnli-de"])][-1] == "xnli-de"
    assert len({task.name for task in find_tasks(GROUPS)}) == len(find_tasks(GROUPS)) > len(TASKS)
    assert [task.name for task in find_tasks(["builtin"])] == ["stdlib"]
