"""The Gluon backend's calls, on CPU tensors, through ``emulator``."""

import pytest

from tilewise import testing
from tilewise.arguments import Options, Packing, dense_call, packed_call
from tilewise.backends.gluon import fwd
from tilewise.backends.triton import launch
from tilewise.ops.schema import describe

from . import emulator


def _launch(self, tensors):
    """In place of ``Launch.__call__``."""
    values = self._values.copy()
    for place, name in self._tensors:
        values[place] = tensors[name]
    for place, name, template in self._descriptors:
        values[place] = launch.compat.descriptor_of(template, tensors[name])
    arguments = dict(zip(self._kernel.arg_names, values, strict=True))
    emulator.run(self._kernel, self._grid, arguments)


@pytest.fixture
def forward(monkeypatch):
    """out and lse of a call as a user writes it, by the emulated kernel."""
    monkeypatch.setattr(launch.Launch, "__call__", _launch)
    monkeypatch.setattr(fwd, "_multiprocessors", lambda index: 3)

    def call(q, k, v, **arguments):
        packing = {n: arguments.pop(n) for n in Packing._fields if n in arguments}
        options = Options(**arguments)
        if packing:
            tensors, scalars = packed_call(q, k, v, Packing(**packing), options)
        else:
            tensors, scalars = dense_call(q, k, v, options)
        with testing.poisoned_memory():
            out, lse = fwd.fwd(describe(tensors, scalars, needs_grad=False), tensors)
        return testing.Results(out, lse)

    return call


@pytest.fixture
def assert_forward_agrees(forward):
    """Holds out and lse against the oracle and plain torch."""

    def check(inputs):
        got = forward(**inputs)
        testing.assert_within(
            got, testing.oracle(**inputs), testing.plain(**inputs), inputs["q"].dtype
        )
        return got

    return check
