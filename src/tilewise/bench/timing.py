"""Time of rivals, measured in turn within one run, so that a busy machine is busy for all.

On a CPU, protocol "interleaved": after one warm call each, rounds in which every rival runs once,
in an order that rotates; each one's time is the median over the rounds.

On a GPU two protocols, both by CUDA events around launches that follow each other without a wait,
so that the host's share shows only where it is longer than the kernels:

- "burst": the device idles for 0.25 s, one warm launch, ten timed; the mean of a launch.
- "sustained": more than a second of continuous load in which the rivals run in turn, in chunks of
  ten launches (fewer where a launch is long); the median chunk, without the first third of each
  turn. A chip that is limited by power settles there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .providers import BACKWARD, FORWARD, FORWARD_BACKWARD, Attend, Provider, Shape, make_inputs

PROTOCOL = "interleaved"
MIN_ROUNDS, MAX_ROUNDS = 3, 50
BURST, SUSTAINED = "burst", "sustained"
GPU_PROTOCOLS = (BURST, SUSTAINED)
IDLE_SECONDS = 0.25
LAUNCHES = 10
SUSTAINED_SECONDS = 1.2  # of all rivals together, at least
SUSTAINED_ROUNDS = 3
CHUNK_SECONDS = 0.1  # a chunk of slow launches has fewer of them

Call = Callable[[], object]


def interleaved(
    calls: Mapping[str, Call],
    seconds: float,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Median seconds of each call.

    Args:
        calls: what to time, by name.
        seconds: about how long to measure each; at least three rounds are run.
        tick: called after each round.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    names, rounds, spent = list(calls), 0, 0.0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and spent < seconds * len(names)):
        turn = rounds % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            calls[name]()
            samples[name].append(time.perf_counter() - start)
            spent += samples[name][-1]
        rounds += 1
        tick()
    return {name: statistics.median(found) for name, found in samples.items()}


def event_seconds(call: Call, launches: int) -> float:
    """Mean seconds of a launch among ``launches`` back to back, by CUDA events; waits for them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / launches


def burst(call: Call) -> float:
    """Seconds of a launch on a rested GPU; the call has been compiled and warmed before."""
    torch.cuda.synchronize()
    time.sleep(IDLE_SECONDS)
    call()
    return event_seconds(call, LAUNCHES)


def sustained(
    calls: Mapping[str, Call],
    seconds: float,
    measure: Callable[[Call, int], float] = event_seconds,
) -> dict[str, float]:
    """Seconds of a launch of each call under continuous load, the calls in turn.

    Args:
        calls: what to time, by name; compiled and warmed before.
        seconds: how long to load the GPU with each; more where the sum would be too short.
        measure: mean seconds of a launch of a call, given how many launches.
    """
    names = list(calls)
    turn_seconds = max(seconds, SUSTAINED_SECONDS / max(1, len(names))) / SUSTAINED_ROUNDS
    launches = {}
    for name, call in calls.items():
        estimate = measure(call, 1)
        launches[name] = max(1, min(LAUNCHES, int(CHUNK_SECONDS / max(estimate, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(SUSTAINED_ROUNDS):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            chunks: list[float] = []
            start = time.perf_counter()
            while not chunks or time.perf_counter() - start < turn_seconds:
                chunks.append(measure(calls[name], launches[name]))
            samples[name] += chunks[len(chunks) // 3 :]
    return {name: statistics.median(found) for name, found in samples.items()}


def prepare(provider: Provider, shape: Shape, direction: str, attend: Attend | None = None) -> Call:
    """The call to time.

    A forward without autograd, the backward of a forward that is done once here, or both.
    ``attend`` is what the provider has bound to the shape already.
    """
    q, k, v, dout = (provider.layout(x) for x in make_inputs(shape))
    attend = attend or provider.bind(shape)
    if direction == FORWARD:

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(q, k, v)

        return forward
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if direction == FORWARD_BACKWARD:
        return lambda: torch.autograd.grad(attend(q, k, v), leaves, dout)
    assert direction == BACKWARD
    out = attend(q, k, v)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
