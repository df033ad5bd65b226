import mmap

import pytest
import torch

from tilewise.bench import memory
from tilewise.bench.providers import PROVIDERS, Shape

MIB = 2**20


def test_a_known_allocation_that_is_given_back_is_seen():
    peak = memory.resident_peak(lambda: _hold(64))
    assert 63 * MIB < peak < 68 * MIB


def _hold(mib):
    with mmap.mmap(-1, mib * MIB) as pages:  # malloc might hand out what is resident already
        for page in range(0, mib * MIB, mmap.PAGESIZE):
            pages[page] = 1


@pytest.mark.skipif(memory.method() != memory.VM_HWM, reason="the mark cannot be set back")
def test_an_earlier_and_larger_peak_does_not_hide_a_later_one():
    _hold(256)
    peak = memory.resident_peak(lambda: _hold(64))
    assert 63 * MIB < peak < 68 * MIB


def test_memory_that_is_not_touched_does_not_count():
    assert memory.resident_peak(lambda: torch.empty(256 * MIB // 4)) < 4 * MIB


def test_where_the_mark_cannot_be_set_back_growth_of_the_largest_size_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
    assert memory.method() == memory.RU_MAXRSS
    sizes = iter([100 * MIB, 164 * MIB])
    monkeypatch.setattr(memory, "_max_rss", lambda: next(sizes))
    assert memory.resident_peak(lambda: None) == 64 * MIB


def test_standard_attention_holds_its_matrices_and_tilewise_does_not():
    shape = Shape(seqlen=1024, nheads=4, head_dim=32)
    eager, ours = (memory.peak_extra(name, shape) for name in ("eager", "tilewise"))
    assert 3 * shape.matrix_bytes < eager < PROVIDERS["eager"].bytes_needed(shape, backward=True)
    assert ours < 1.5 * shape.matrix_bytes


def test_a_process_that_fails_tells_why():
    with pytest.raises(memory.MeasurementError, match="KeyError: 'nobody'"):
        memory.peak_extra("nobody", Shape(seqlen=16))


def test_available_memory_is_plausible():
    free = memory.available()
    assert free is None or 2**24 < free < 2**50


@pytest.mark.slow
@pytest.mark.skipif(memory.method() != memory.VM_HWM, reason="needs the exact measurement")
def test_workspace_of_a_long_sequence_is_bounded():
    seqlen, tensor = 16384, 16384 * 8 * 64 * 4  # one score matrix would be 8 GiB
    peak = memory.peak_extra("tilewise", Shape(seqlen=seqlen))
    results = 4 * tensor  # out, dq, dk, dv
    statistics = 6 * seqlen * 8 * 8  # lse and what the backward derives from it, float64 at most
    assert peak < results + statistics + 64 * MIB
