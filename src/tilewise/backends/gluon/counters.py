"""Counters by which the programs of a launch share out its tiles.

A launch finds its counter at 0 and leaves it at 0, so that one serves all launches of a stream,
which come one after another. Those of two streams may run at once and have one each. What a CUDA
graph captured may run on any stream, and beside itself: each of its launches has its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

_counters: dict[tuple[int, int], Tensor] = {}


def counter_of(device: torch.device) -> Tensor:
    """The counter of a launch on the device's current stream: (1,) int32, 0."""
    if device.type != "cuda":  # emulated
        return torch.zeros(1, dtype=torch.int32, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    found = _counters.get((device.index, stream))
    if found is None:
        found = torch.zeros(1, dtype=torch.int32, device=device)
        found = _counters.setdefault((device.index, stream), found)
    return found
