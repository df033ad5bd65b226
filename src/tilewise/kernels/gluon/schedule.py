"""The tiles of a program that stays: its producer chooses them and tells its consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def step_tile(tile, counter, num_tiles):
    """The tile after ``tile``: the next that no program has taken; without a counter, of a fixed
    share."""
    if counter is not None:
        count = gl.atomic_add(counter, 1, sem="relaxed")
        if count == num_tiles - 1:  # each program asks once in vain: this is the last of all
            gl.store(counter, 0)  # for the next launch
        return count + gl.num_programs(0)
    else:
        return tile + gl.num_programs(0)


@gluon.jit
def announce(tile, place, full, empty, turn):
    """Tells the consumers which tile is their number ``turn``."""
    mbarrier.wait(empty, turn & 1 ^ 1)
    place.store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(full, count=1)


@gluon.jit
def told(place, full, empty, turn):
    """What ``announce`` said."""
    mbarrier.wait(full, turn & 1)
    tile = gl.max(place.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(empty, count=1)
    return tile
