"""The end of mbarriers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.constexpr_function
def _length(shape):
    return shape[0] if len(shape) == 2 else 0


@gluon.jit
def _retire(barrier):
    LENGTH: gl.constexpr = _length(barrier.shape)
    if LENGTH == 0:
        mbarrier.invalidate(barrier)
    for st in gl.static_range(LENGTH):
        mbarrier.invalidate(barrier.index(st))


@gluon.jit
def retire(BARRIERS):
    """Invalidates a kernel's mbarriers, arrays of them or single ones, as its last act.

    PTX demands it before their memory serves anything else. Without it Triton gives away the memory
    of one that a kernel makes and never uses, and the hardware writes the barrier's state over what
    is there whenever it suspends the kernel for another process's.
    """
    for n in gl.static_range(len(BARRIERS)):
        _retire(BARRIERS[n])
