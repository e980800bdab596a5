"""accelerate shards models on accelerators only. When this module is imported, it shards those of CPU processes, too:
tests then run the code that GPUs run."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from trainers.core import arguments


started = AcceleratorState.__init__


def start(state: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    started(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        state.fsdp_plugin = fsdp_plugin
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


AcceleratorState.__init__ = start
arguments.require_accelerator = lambda args: None
