"""The errors that tilewise raises on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class TilewiseError(Exception):
    """Base of every error that tilewise raises on purpose."""


class InvalidInputError(TilewiseError, ValueError):
    """An argument cannot be right: ``InvalidInputError(argument, given, allowed)``.

    The message names the argument, what was given and what is allowed. It is raised before
    anything is written.
    """

    @property
    def argument(self) -> str:
        """Name of the argument."""
        return str(self.args[0])

    def __str__(self) -> str:
        argument, given, allowed = self.args
        return f"{argument}: got {given}; {allowed}"


class UnsupportedError(TilewiseError, NotImplementedError):
    """No backend can take this call, or not the named one: ``UnsupportedError(what, reasons)``."""

    @property
    def reasons(self) -> Mapping[str, Sequence[str]]:
        """Each backend that was considered, with its reasons against the call."""
        reasons: Mapping[str, Sequence[str]] = self.args[1]
        return reasons

    def __str__(self) -> str:
        what, reasons = self.args
        return "\n".join([what, *(f"  {name}: {'; '.join(r)}" for name, r in reasons.items())])
