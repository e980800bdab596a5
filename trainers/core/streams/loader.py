"""The batches of a stream: which rank and worker gets which rows, and where each of them stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .stream import Position, Reading, Row, Stream


Collator = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class ReaderState:
    """
    Where a worker stands.

    Args:
        batches (`int`, *optional*, defaults to 0): Batches read so far, including other workers'.
        position ([`Position`], *optional*): The position after them.
    """

    batches: int = 0
    position: Position = Position()


@dataclass(frozen=True)
class Batch:
    """
    A batch, or why there is none.

    Args:
        inputs (`Any`): What the collator made of the rows.
        worker (`int`): Number of the worker that made it.
        state ([`ReaderState`]): Where that worker stands after the batch.
        problem (`str`, *optional*): What is wrong with the data.
    """

    inputs: Any
    worker: int
    state: ReaderState
    problem: str | None = None

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; torch calls this."""
        pinned = torch.utils.data._utils.pin_memory.pin_memory(self.inputs)
        return Batch(pinned, self.worker, self.state, self.problem)


@dataclass(frozen=True)
class Layout:
    """
    How the rows of a stream are distributed over the workers of all ranks.

    If the stream is shuffled and its number of shards is a multiple of the number of workers, each worker reads shards
    of its own. Otherwise every worker reads all rows, and tokenises only those of its own batches: batch `i` belongs
    to rank `i % ranks`. The ranks then train on the same rows as one process with a batch as large as all of theirs.

    Args:
        batch_size (`int`): Rows per batch of a rank.
        buffer_size (`int`): See [`Reading`].
        seed (`int`): See [`Reading`].
        rank (`int`, *optional*, defaults to 0): Rank of this process.
        ranks (`int`, *optional*, defaults to 1): Number of ranks.
        workers (`int`, *optional*, defaults to 1): Number of workers of a rank.
    """

    batch_size: int
    buffer_size: int
    seed: int
    rank: int = 0
    ranks: int = 1
    workers: int = 1

    def has_own_shards(self, stream: Stream) -> bool:
        """Whether each worker reads shards of its own."""
        readers = self.ranks * self.workers
        return self.buffer_size > 0 and readers > 1 and len(stream.shards) % readers == 0

    def reading(self, stream: Stream, worker: int) -> Reading:
        """What a worker of this rank reads."""
        if not self.has_own_shards(stream):
            return Reading(stream, self.buffer_size, self.seed)
        return Reading(
            stream, self.buffer_size, self.seed, self.rank * self.workers + worker, self.ranks * self.workers
        )

    def owns(self, stream: Stream, worker: int, batch: int) -> bool:
        """Whether a batch that a worker of this rank has read is its own."""
        own = batch % self.ranks == self.rank and batch // self.ranks % self.workers == worker
        return own or self.has_own_shards(stream)


class StreamReader(IterableDataset):
    """The batches of one rank, without end. In a worker process: those of the worker."""

    def __init__(self, stream: Stream, collator: Collator, layout: Layout, states: Sequence[ReaderState], first: int):
        self.stream, self.collator, self.layout = stream, collator, layout
        self.states, self.first = states, first

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        # The data loader asks its worker 0 first, and a resumed run may have stopped before another one's turn.
        worker = (self.first + (info.id if info is not None else 0)) % self.layout.workers
        state = self.states[worker]
        rows = self.layout.reading(self.stream, worker).rows(state.position)
        try:
            for batch in count(state.batches):
                taken = list(islice(rows, self.layout.batch_size))
                state = ReaderState(batch + 1, taken[-1][1])
                if self.layout.owns(self.stream, worker, batch):
                    key = (self.layout.seed, self.layout.rank, worker, batch)
                    yield Batch(self.collate([row for row, _ in taken], key), worker, state)
        except ValueError as error:  # the traceback of another process would hide the message
            yield Batch(None, worker, state, str(error))

    def collate(self, rows: Sequence[Row], key: tuple[int, ...]) -> Any:
        """
        The collator's batch of some rows. Its draws from torch's generator depend only on `key`.

        Raises:
            ValueError: if the collator cannot read a row. The message says where the row stands.
        """
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(blake2b(repr(key).encode(), digest_size=7).digest(), "big"))
                return self.collator(self.stream.transformed([row.values for row in rows]))
        except (ValueError, TypeError, KeyError) as error:
            if len(rows) == 1:
                raise ValueError(f"{rows[0].place}: {error}") from error
            for row in rows:
                self.collate([row], key)
            raise ValueError(f"{rows[0].place} to {rows[-1].place}: {error}") from error


class StreamLoader:
    """
    The batches of a rank, without end, and the position after the last batch that was taken. Batches that workers
    prepare in advance do not count.

    Args:
        stream ([`Stream`]): The data, the same on each rank.
        collator (`Callable`): Makes a batch of rows. Its draws from torch's generator are seeded for each batch.
        layout ([`Layout`]): Which rows this rank gets.
        options: Further arguments of [`~torch.utils.data.DataLoader`].
    """

    def __init__(self, stream: Stream, collator: Collator, layout: Layout, **options: Any):
        self.stream, self.collator, self.layout, self.options = stream, collator, layout, options
        self.states = [ReaderState()] * layout.workers
        self.next_worker = 0

    def __iter__(self) -> Iterator[Any]:
        reader = StreamReader(self.stream, self.collator, self.layout, tuple(self.states), self.next_worker)
        # The data loader draws its seed from here, so that resuming leaves the global generator unchanged.
        loader = DataLoader(reader, batch_size=None, generator=torch.Generator(), **self.options)
        for batch in loader:
            if batch.problem is not None:
                raise ValueError(batch.problem)
            self.states[batch.worker] = batch.state
            self.next_worker = (batch.worker + 1) % self.layout.workers
            yield batch.inputs

    @property
    def epoch(self) -> int:
        """Complete passes over the data of this rank."""
        return min(state.position.epoch for state in self.states)

    def settings(self) -> dict[str, Any]:
        """What must be equal for a position to mean the same rows."""
        return {"data": self.stream.identity, "shards": len(self.stream.shards), **asdict(self.layout)}

    def save(self, folder: str | Path) -> None:
        """Write the position of this rank into the folder of a checkpoint."""
        state = {
            "settings": self.settings(),
            "next_worker": self.next_worker,
            "workers": list(map(asdict, self.states)),
        }
        self._file(folder).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    def load(self, folder: str | Path) -> None:
        """
        Continue after the last batch before a checkpoint.

        Raises:
            ValueError: if the checkpoint has no position for this rank, or was written with other data or settings.
        """
        file = self._file(folder)
        if not file.is_file():
            raise ValueError(f"{folder} has no position in the stream: it lacks {file.name}. Its run read no stream.")
        saved = json.loads(file.read_text(encoding="utf-8"))
        ours, theirs = self.settings(), saved["settings"]
        changed = [f"{name} {theirs.get(name)} (now {ours[name]})" for name in ours if ours[name] != theirs.get(name)]
        if changed:
            raise ValueError(f"{folder} was written with other settings of the stream: {', '.join(changed)}.")
        self.states = [ReaderState(worker["batches"], Position(**worker["position"])) for worker in saved["workers"]]
        self.next_worker = saved["next_worker"]

    def _file(self, folder: str | Path) -> Path:
        return Path(folder) / f"stream-{self.layout.rank}.json"
