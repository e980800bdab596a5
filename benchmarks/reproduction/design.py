"""What a study is: its methods and their stages, its claims, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.reproduction.study import Run
from m3bert.trainers import Grid


@dataclass(frozen=True)
class Stage(Run):
    """
    A later stage of training, with settings of its own.

    Args:
        training_data (`str`, *optional*, defaults to `"pairs"`): Name of its training data.
    """

    training_data: str = "pairs"


@dataclass(frozen=True)
class Method(Run):
    """
    One column of a study's tables: a [`Run`], and what comes before it.

    Args:
        exits (`bool`, *optional*, defaults to `False`): Fit exits with a static table to the training texts first.
        paths (`dict[int, list[int]]`, *optional*): Depth -> its layers, of depths that the fit makes paths.
        taught_by_real (`bool`, *optional*, defaults to `False`): The real encoder is the teacher, also of the exits.
            Without, a method with a teacher learns from its own backbone.
        untouched (`bool`, *optional*, defaults to `False`): Score the backbone without training, or with `then` only.
        then (`Stage`, *optional*): A second stage of training.
        grid (`str`, *optional*): Granularities to score, where they are not those of the study.
    """

    exits: bool = False
    paths: Mapping[int, list[int]] = field(default_factory=dict)
    taught_by_real: bool = False
    untouched: bool = False
    then: Stage | None = None
    grid: str | None = None

    @property
    def seedless(self) -> bool:
        """Whether the result is the same for every seed."""
        return self.untouched and self.then is None


@dataclass(frozen=True)
class Claim:
    """
    A claimed difference between two methods: `better` is above `worse`.

    Args:
        better (`str`): A method.
        worse (`str`): A method.
        sizes (`str`): Granularities to average over, as a [`Grid`].
        source (`str`): The paper that claims it, or "ours".
        family (`str`, *optional*): Family of tasks. Default: the mean of all families.
        margin (`float`, *optional*, defaults to 0.0): The difference must be above this number of points.
        speed (`bool`, *optional*, defaults to `False`): The claim is about training steps per second, not quality.
        reported (`float`, *optional*): The difference in the paper, with its model and data.
        worse_sizes (`str`, *optional*): Granularities of `worse`. Default: `sizes`.
    """

    better: str
    worse: str
    sizes: str
    source: str
    family: str | None = None
    margin: float = 0.0
    speed: bool = False
    reported: float | None = None
    worse_sizes: str | None = None


@dataclass(frozen=True)
class Study:
    """
    A study: every method, on every backbone, with every seed.

    Args:
        name (`str`): Its name, and that of its folder of results.
        title (`str`): One sentence for the pages.
        source (`str`): The papers and their tables.
        methods (`dict[str, Method]`): Name -> method.
        backbones (`tuple[str, ...]`): Names of backbones.
        grid (`str`): Granularities to score.
        steps (`int`): Training steps.
        settings (`dict`): Settings that all methods share. Tests have their pooling, and by default their
            `max_length`.
        learning_rates (`tuple[float, ...]`): Learning rates, of which the best for each method and backbone on the
            development tasks is taken. A single one is not searched.
        development (`tuple[str, ...]`): Development tasks; `NAME-dev` is the development set of a task.
        families (`dict[str, tuple[str, ...]]`, *optional*): Family -> its test tasks. Without, the study scores
            development tasks only.
        replacements (`dict[tuple[str, str], Method]`, *optional*): (method, backbone) -> what the method is there.
        seeds (`tuple[int, ...]`, *optional*): Seeds of the test runs. Development runs have the first one.
        claims (`tuple[Claim, ...]`, *optional*): Claimed differences.
        frozen (`dict[str, str]`, *optional*): Backbone -> commit at which its settings were frozen, with the
            development results that the learning rates are chosen by. Without, no test is scored.
        training_data (`str`, *optional*, defaults to `"pairs"`): Name of the training data, a key of `TRAINING_DATA`.
        test_length (`int`, *optional*): Maximum length of a text of the tests, in tokens.
        losses (`tuple[str, ...]`, *optional*): What is measured before `then`, in nats, where lower is better:
            `"masked tokens"` of held-out text.
    """

    name: str
    title: str
    source: str
    methods: Mapping[str, Method]
    backbones: tuple[str, ...]
    grid: str
    steps: int
    settings: Mapping[str, Any]
    learning_rates: tuple[float, ...]
    development: tuple[str, ...]
    families: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    replacements: Mapping[tuple[str, str], Method] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    claims: tuple[Claim, ...] = ()
    frozen: Mapping[str, str] = field(default_factory=dict)
    training_data: str = "pairs"
    test_length: int | None = None
    losses: tuple[str, ...] = ()

    @property
    def tests(self) -> list[str]:
        """The test tasks of all families."""
        return [task for tasks in self.families.values() for task in tasks]

    def method(self, name: str, backbone: str) -> Method:
        """What a method is on a backbone."""
        return self.replacements.get((name, backbone), self.methods[name])

    def sizes(self, name: str, backbone: str) -> Grid:
        """The granularities at which a method is scored on a backbone."""
        return Grid.parse(self.method(name, backbone).grid or self.grid)

    def rates(self, name: str, backbone: str) -> tuple[float, ...]:
        """The learning rates to search for a method on a backbone."""
        method = self.method(name, backbone)
        return () if method.untouched else self.learning_rates
