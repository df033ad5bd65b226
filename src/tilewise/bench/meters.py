"""Measuring one cell: every provider in turn, and a reason in place of a number where one fails."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, cast

import torch

from . import memory, timing
from .cells import Cell
from .providers import FORWARD, FORWARD_BACKWARD, Provider, forward_backward, make_inputs
from .results import Row, row
from .timing import BURST, PROTOCOL, Call

_LONGEST_REASON = 400
_REPEATED: set[str] = set()  # warnings of calls that went well are passed on once
T = TypeVar("T")


class DeviceLostError(RuntimeError):
    """The GPU answers nothing any more, so nothing after this can be measured."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no number."""

    reason: str


def attempt(function: Callable[[], T], device: str) -> T | Failure:
    """What ``function`` returns, or the exception that it raised and the warnings that led to it.

    Raises:
        DeviceLostError: after the exception the GPU does not even synchronise.
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            result: T | None = function()
            said = []
        except Exception as error:
            result = None
            said = [f"{type(error).__name__}: {error}", *(str(w.message) for w in heard)]
    if not said:
        for w in heard:
            if (text := str(w.message)) not in _REPEATED:
                _REPEATED.add(text)
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        return cast(T, result)
    reason = " | ".join(" ".join(text.split()) for text in dict.fromkeys(said))
    if device == "cuda":
        _recover(reason)
    return Failure(reason[:_LONGEST_REASON])


def _recover(reason: str) -> None:
    """Gives back what a failed call held."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLostError(f"the GPU is lost: {error} (after {reason})") from error
    release("cuda")


def release(device: str) -> None:
    """Gives back what nothing refers to any more, and a GPU's memory that torch kept of it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Meter(Protocol):
    """How a device is measured."""

    @property
    def protocols(self) -> tuple[str, ...]:
        """The protocols of its rows."""
        ...

    def measure(self, cell: Cell, providers: Sequence[Provider]) -> list[Row]:
        """A row for each protocol and provider, with numbers or with an error."""
        ...


def failed(cell: Cell, provider: Provider, protocols: Sequence[str], reason: str) -> list[Row]:
    """The rows of a provider that gave no number in the cell."""
    return [
        row(cell.suite, provider, cell.shape, p, direction=cell.direction, error=reason)
        for p in protocols
    ]


@dataclass(frozen=True, slots=True)
class CpuMeter:
    """Protocol "interleaved"; the peak of forward and backward in a fresh process.

    Attributes:
        seconds: about how long to time a call.
    """

    seconds: float = 0.5

    @property
    def protocols(self) -> tuple[str, ...]:
        """The one of a CPU."""
        return (PROTOCOL,)

    def measure(self, cell: Cell, providers: Sequence[Provider]) -> list[Row]:
        """As ``Meter.measure``."""
        rows: list[Row] = []
        calls: dict[str, Call] = {}
        by_name = {p.name: p for p in providers}
        for provider in providers:
            call = attempt(partial(self._call, cell, provider), "cpu")
            if isinstance(call, Failure):
                rows += failed(cell, provider, self.protocols, call.reason)
            else:
                calls[provider.name] = call
        for name, seconds in timing.interleaved(calls, self.seconds).items():
            rows.append(self._row(cell, by_name[name], seconds))
        return rows

    def _call(self, cell: Cell, provider: Provider) -> Call:
        need = provider.bytes_needed(cell.shape, cell.direction != FORWARD)
        free = memory.available()
        if free is not None and need > free:
            raise MemoryError(f"would need {need / 2**30:.1f} GiB")
        call = timing.prepare(provider, cell.shape, cell.direction)
        call()
        return call

    def _row(self, cell: Cell, provider: Provider, seconds: float) -> Row:
        peak: int | None = None
        error = None
        if cell.direction == FORWARD_BACKWARD:
            found = attempt(lambda: memory.peak_extra(provider.name, cell.shape), "cpu")
            if isinstance(found, Failure):
                error = f"peak memory: {found.reason}"
            else:
                peak = found
        return row(
            cell.suite,
            provider,
            cell.shape,
            PROTOCOL,
            direction=cell.direction,
            seconds=seconds,
            peak=peak,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class _Ready:
    """A provider that is compiled and warm, and the peak of one call in bytes."""

    call: Call
    peak: int


@dataclass(frozen=True, slots=True)
class GpuMeter:
    """Protocols "burst" and "sustained"; the peak is torch's allocator's.

    The peak of a backward is that of its forward and itself, from the inputs and dout on.

    Attributes:
        protocols: those to run.
        seconds: of sustained load by each provider.
    """

    protocols: tuple[str, ...] = timing.GPU_PROTOCOLS
    seconds: float = 0.3

    def measure(self, cell: Cell, providers: Sequence[Provider]) -> list[Row]:
        """As ``Meter.measure``."""
        rows: list[Row] = []
        ready: dict[str, _Ready] = {}
        by_name = {p.name: p for p in providers}
        for provider in providers:
            found = attempt(partial(self._prepare, cell, provider), "cuda")
            if isinstance(found, Failure):
                rows += failed(cell, provider, self.protocols, found.reason)
            else:
                ready[provider.name] = found
        for protocol in self.protocols:
            for name, seconds in self._time(protocol, ready).items():
                if isinstance(seconds, Failure):
                    rows += failed(cell, by_name[name], (protocol,), seconds.reason)
                    continue
                rows.append(
                    row(
                        cell.suite,
                        by_name[name],
                        cell.shape,
                        protocol,
                        direction=cell.direction,
                        seconds=seconds,
                        peak=ready[name].peak,
                    )
                )
        return rows

    def _prepare(self, cell: Cell, provider: Provider) -> _Ready:
        q, k, v, dout = (provider.layout(x) for x in make_inputs(cell.shape))
        attend = provider.bind(cell.shape)

        def once() -> object:
            if cell.direction != FORWARD:
                return forward_backward(attend, (q, k, v), dout)
            with torch.no_grad():
                return attend(q, k, v)

        once()  # compiles, and takes the workspaces that stay
        peak = memory.device_peak(once)
        call = timing.prepare(provider, cell.shape, cell.direction, attend)
        call()
        torch.cuda.synchronize()
        return _Ready(call, peak)

    def _time(self, protocol: str, ready: Mapping[str, _Ready]) -> dict[str, float | Failure]:
        calls = {name: found.call for name, found in ready.items()}
        if protocol == BURST:
            return {
                name: attempt(partial(timing.burst, call), "cuda") for name, call in calls.items()
            }
        found = attempt(lambda: timing.sustained(calls, self.seconds), "cuda")
        # they run in turn: when one raises, none of them has its time
        return {name: found if isinstance(found, Failure) else found[name] for name in calls}
