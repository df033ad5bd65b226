"""Peak memory of attention.

On a GPU torch's allocator counts it. On a CPU it is the resident bytes of a fresh process, in bytes
that were touched.

On Linux the kernel keeps the largest resident size of a process (VmHWM) and lets it be set back to
the present one (5 written to clear_refs). It counts whole pages at the moment before any is given
back, so nothing between two samples is missed. Two things would blur it and are dealt with in the
fresh process: code and threads that the first call loads, by a small warm-up call of the same kind,
and freed blocks that malloc keeps, by a fixed MALLOC_MMAP_THRESHOLD_: every tensor has its own
mapping.

Elsewhere ``ru_maxrss`` is read before and after; it cannot be set back, so a peak below an earlier
one reads as less. ``method()`` says which of the two this machine has.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from . import fresh
from .providers import PROVIDERS, Shape, forward_backward, make_inputs

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUP = Path("/sys/fs/cgroup")

VM_HWM = "VmHWM"
RU_MAXRSS = "ru_maxrss"
ALLOCATOR = "max_memory_allocated"
_WARM_UP_LENGTH = 256


class MeasurementError(RuntimeError):
    """The fresh process did not come back with a number."""


def method() -> str:
    """How peaks are read here: "VmHWM", exact, or "ru_maxrss", a lower bound."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return RU_MAXRSS
    return VM_HWM


def _kib(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise MeasurementError(f"{_STATUS} has no {field}")


def _max_rss() -> int:
    import resource

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def resident_peak(function: Callable[[], object]) -> int:
    """Bytes by which this process's resident memory rose above its start while ``function`` ran."""
    gc.collect()
    if method() == VM_HWM:  # asking has set the mark back
        before = _kib(VM_HWM)
        function()
        return (_kib(VM_HWM) - before) * 1024
    start = _max_rss()
    function()
    return _max_rss() - start


def device_peak(function: Callable[[], object]) -> int:
    """Bytes by which what torch holds on the current GPU rose above its start in ``function``."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_extra(provider: str, shape: Shape, backward: bool = True) -> int:
    """Peak extra bytes of one call in a fresh process, beyond its inputs and dout.

    Args:
        provider: a name in ``providers.PROVIDERS``.
        shape: sizes of the call.
        backward: forward and backward, or the forward alone without autograd.

    Returns:
        Bytes, the outputs and gradients included.

    Raises:
        MeasurementError: the process failed or was killed; the message has its last words.
    """
    task = {"provider": provider, "backward": backward, "threads": torch.get_num_threads()}
    done = subprocess.run(
        fresh.command("tilewise.bench.memory_child", [json.dumps(task | asdict(shape))]),
        env=fresh.environment(MALLOC_MMAP_THRESHOLD_="65536"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        killed = "; killed, most likely for memory" if done.returncode == -9 else ""
        raise MeasurementError(
            f"measuring {provider} at {shape} ended with {done.returncode}{killed}\n"
            + done.stderr[-2000:]
        )
    return int(json.loads(done.stdout)["peak"])


def measure_here(provider: str, shape: Shape, backward: bool) -> int:
    """``peak_extra`` in this process, which must be fresh for the number to be exact."""
    rival = PROVIDERS[provider]

    def call(sizes: Shape) -> Callable[[], object]:
        q, k, v, dout = (rival.layout(x) for x in make_inputs(sizes))
        attend = rival.bind(sizes)
        if backward:
            return lambda: forward_backward(attend, (q, k, v), dout)

        def forward() -> object:
            with torch.no_grad():
                return attend(q, k, v)

        return forward

    warm = {**asdict(shape), "seqlen": min(shape.seqlen, _WARM_UP_LENGTH)}
    call(Shape(**warm))()
    return resident_peak(call(shape))


def available() -> int | None:
    """Bytes that a new allocation may take on this machine, or None where it is not known."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    else:
        try:
            import psutil
        except ImportError:
            return None
        limits.append(int(psutil.virtual_memory().available))
    cap, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if cap.exists() and used.exists() and cap.read_text().strip() != "max":
        limits.append(max(0, int(cap.read_text()) - int(used.read_text())))
    return min(limits) if limits else None
