"""The Gluon backend's calls, on CPU tensors, through ``emulator``."""

import pytest
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from tilewise import testing
from tilewise.arguments import Options, Packing, dense_call, packed_call
from tilewise.backends import reference
from tilewise.backends.base import Wanted
from tilewise.backends.gluon import bwd, bwd_two_pass, counters, fwd
from tilewise.backends.triton import launch
from tilewise.ops.schema import describe
from tilewise.testing.oracle import cotangents

from . import emulator

_interpreted = launch.Launch.__call__


def _launch(self, tensors):
    """In place of ``Launch.__call__``: Triton's kernels are interpreted."""
    if not isinstance(self._kernel, GluonJITFunction):
        _interpreted(self, tensors)
        return
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
    monkeypatch.setattr(counters, "_multiprocessors", lambda index: 3)

    def call(q, k, v, **arguments):
        tensors, scalars = _operands(q, k, v, arguments)
        with testing.poisoned_memory():
            out, lse = fwd.forward(describe(tensors, scalars, needs_grad=False), tensors)(tensors)
        return testing.Results(out, lse)

    return call


def _operands(q, k, v, arguments):
    arguments = dict(arguments)
    packing = {n: arguments.pop(n) for n in Packing._fields if n in arguments}
    if packing:
        return packed_call(q, k, v, Packing(**packing), Options(**arguments))
    return dense_call(q, k, v, Options(**arguments))


@pytest.fixture
def assert_gradients_agree(monkeypatch):
    """Holds the emulated backward, after the reference's forward, against the oracle."""
    monkeypatch.setattr(launch.Launch, "__call__", _launch)
    monkeypatch.setattr(counters, "_multiprocessors", lambda index: 3)

    def check(inputs, against=None, spoil=None, **wanted):
        q = inputs["q"]
        arguments = {n: x for n, x in inputs.items() if n not in "qkv"}
        tensors, scalars = _operands(q, inputs["k"], inputs["v"], arguments)
        problem = describe(tensors, scalars, needs_grad=True)
        way = bwd if bwd.takes(problem) else bwd_two_pass
        assert way.takes(problem)
        out, lse, _ = reference.attention(problem, tensors, torch.float64)
        out, lse = out.to(q.dtype), lse.float()
        dout, dlse = cotangents(out, lse)
        dout = dout if spoil is None else spoil(dout)
        wanted = Wanted(dsink=tensors.sink is not None, **wanted)
        with testing.poisoned_memory():
            g = way.backward(problem, tensors, dout, wanted)(tensors, out, lse, dout, dlse)
        got = testing.Results(out, lse, g.dq, g.dk, g.dv, None, g.dsink)
        if against is not None:
            return got
        testing.assert_within(got, testing.oracle(**inputs), testing.plain(**inputs), q.dtype)
        return got

    return check


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
