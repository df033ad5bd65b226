"""Which backend takes a call, and why the others do not.

``backend="auto"`` takes the first backend, in order of preference, that has no reason against the
call and may be taken automatically. A backend that is named is taken or refused; it never falls
back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .backends.base import Backend
from .backends.cpu import CpuBackend
from .backends.gluon import GluonBackend
from .backends.reference import ReferenceBackend
from .backends.triton import TritonBackend
from .core.features import BACKEND_NAMES
from .core.problem import AttentionProblem
from .errors import UnsupportedError

AUTO = "auto"
ALGORITHMS = ("fa1", "fa2", "fa3", "standard")

BACKENDS: dict[str, Backend] = {
    "cpu": CpuBackend(),
    "gluon": GluonBackend(),
    "triton": TritonBackend(),
    "reference": ReferenceBackend(),
}
assert tuple(BACKENDS) == BACKEND_NAMES


@dataclass(frozen=True, slots=True)
class Choice:
    """What a call takes, with each other backend's reasons against it.

    Attributes:
        backend: name of the backend.
        algorithm: name of its algorithm.
        reasons: (backend, reasons) of every backend that was not taken.
    """

    backend: str
    algorithm: str
    reasons: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.backend} ({self.algorithm})"]
        lines += [f"  not {name}: {'; '.join(against)}" for name, against in self.reasons]
        return "\n".join(lines)


def _reasons(
    backend: Backend, problem: AttentionProblem, named: bool, algorithm: str
) -> tuple[str, ...]:
    reasons = list(backend.supports(problem))
    if algorithm != AUTO and algorithm not in backend.algorithms:
        reasons.append(f"no algorithm {algorithm!r}: it has {', '.join(backend.algorithms)}")
    if not backend.automatic and not named:
        reasons.append('never taken by backend="auto": O(N^2) memory; name it to use it')
    return tuple(reasons)


@lru_cache(maxsize=4096)
def choose(problem: AttentionProblem, backend: str = AUTO, algorithm: str = AUTO) -> Choice:
    """Decides a call.

    Args:
        problem: facts of the call.
        backend: "auto" or a name in BACKENDS.
        algorithm: "auto" or a name in ALGORITHMS.

    Raises:
        UnsupportedError: the named backend, or every backend, has a reason against the call.
    """
    against = {
        name: _reasons(b, problem, name == backend, algorithm) for name, b in BACKENDS.items()
    }
    if backend != AUTO:
        if against[backend]:
            raise UnsupportedError(
                f"backend {backend!r} cannot take this call", {backend: against[backend]}
            )
        taken = backend
    else:
        able = [name for name, reasons in against.items() if not reasons]
        if not able:
            raise UnsupportedError("no backend can take this call", against)
        taken = able[0]
    others = tuple(
        (name, reasons or (f"{taken} was {'named' if backend != AUTO else 'preferred'}",))
        for name, reasons in against.items()
        if name != taken
    )
    chosen = BACKENDS[taken].algorithms[0] if algorithm == AUTO else algorithm
    return Choice(taken, chosen, others)
