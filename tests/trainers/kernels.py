"""What a GPU would be asked to do, counted on a CPU: kernels, and waits for a value on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


# Operations that make room, a view or a number on the host.
ROOM = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")
NO_KERNEL = (*ROOM, "_unsafe_view", "_reshape_alias", "scalar_tensor", "promote_types", "lift_fresh")
# Functions of a tensor that bring values to the host, and operations that do so inside.
TO_HOST = ("tolist", "numpy", "cpu")
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "repeat_interleave")


class Counts(TorchDispatchMode):
    """
    Counts the operations of a block, also those of its backward pass. An operation counts as one kernel, though a few
    start more.

    Attributes:
        kernels (`Counter`): Operation -> number of calls, without views.
        waits (`Counter`): Operation or function -> number of times that the host needs its result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._functions = _ToHost(self.waits)

    def __enter__(self) -> Counts:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if not func.is_view and name not in NO_KERNEL:
            self.kernels[name] += 1
        # The places of a mask that is used as an index are looked up on the host.
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        if masked or name in WAITING:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


class _ToHost(TorchFunctionMode):
    """Counts functions whose copies to the host are none on a CPU."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in TO_HOST:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))
