"""Programs that stay, and counters by which those of a launch share out its tiles.

A launch finds its counter at 0 and leaves it at 0, so that one serves all launches of a stream,
which come one after another. Those of two streams may run at once and have one each. What a CUDA
graph captured may run on any stream, and beside itself: each of its launches has its own.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import torch
from torch import Tensor

_counters: dict[tuple[int, int], Tensor] = {}


def counter_of(device: torch.device) -> Tensor:
    """The counter of a launch on the device's current stream: (1,) int32, 0."""
    index = device.index
    if index is None:  # emulated
        return _zero(device)
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return counter_of(device)
    if torch._C._cuda_isCurrentStreamCapturing():
        return _zero(device)
    stream = torch._C._cuda_getCurrentRawStream(index)
    found = _counters.get((index, stream))
    return _new(device, stream) if found is None else found


def _new(device: torch.device, stream: int) -> Tensor:
    """A counter that stays, made by a thread of its own: this one may for now have its memory from
    the pool of a CUDA graph that is about to be captured, where nothing may stay."""
    current = torch.cuda.current_stream(device)

    def make() -> None:
        with torch.cuda.stream(current):
            _counters[device.index, stream] = _zero(device)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return _counters[device.index, stream]


def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def programs(num_tiles: int, device: torch.device) -> int:
    """One for each multiprocessor, and no more than tiles."""
    return min(num_tiles, _multiprocessors(device.index))


@lru_cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
