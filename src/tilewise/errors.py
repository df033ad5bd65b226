"""The errors that tilewise raises on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class TilewiseError(Exception):
    """Base of every error that tilewise raises on purpose."""


class InvalidInputError(TilewiseError, ValueError):
    """An argument cannot be right.

    The message names the argument, what was given and what is allowed. It is raised before
    anything is written.
    """

    def __init__(self, argument: str, given: object, allowed: str) -> None:
        self.argument = argument
        self.given = given
        self.allowed = allowed
        super().__init__(f"{argument}: got {given}; {allowed}")

    def __reduce__(self) -> tuple[type[InvalidInputError], tuple[str, object, str]]:
        return type(self), (self.argument, self.given, self.allowed)


class UnsupportedError(TilewiseError, NotImplementedError):
    """No backend, or not the one that was named, can take this call.

    ``reasons`` maps each backend that was considered to its reasons against the call.
    """

    def __init__(self, what: str, reasons: Mapping[str, Sequence[str]]) -> None:
        self.what = what
        self.reasons = {name: tuple(against) for name, against in reasons.items()}
        lines = [f"  {name}: {'; '.join(against)}" for name, against in self.reasons.items()]
        super().__init__("\n".join([what, *lines]))

    def __reduce__(self) -> tuple[type[UnsupportedError], tuple[str, dict[str, tuple[str, ...]]]]:
        return type(self), (self.what, self.reasons)
