"""How a CPU call is cut: every head of every batch entry once, within the tile budget."""

import pytest
import torch

from tilewise.arguments import Options, Packing, dense_call, packed_call
from tilewise.backends.cpu.tiles import TILE_ELEMENTS, Scratch, block_sizes, make_chunk, slots
from tilewise.ops.schema import describe


def cut(batch, h, hk, per_head):
    q, kv = torch.empty(batch, 3, h, 2), torch.empty(batch, 3, hk, 2)
    tensors, scalars = dense_call(q, kv, kv, Options())
    problem = describe(tensors, scalars, needs_grad=False)
    return problem, tensors, list(slots(problem, tensors, per_head))


@pytest.mark.parametrize(
    ("batch", "h", "hk"), [(0, 4, 2), (1, 1, 1), (3, 6, 6), (5, 12, 4), (2, 64, 64), (7, 10, 5)]
)
@pytest.mark.parametrize("fit", [1, 2, 3, 8, 1000])
def test_slots_cover_every_head_once_within_the_budget(batch, h, hk, fit):
    per_head = TILE_ELEMENTS // fit
    problem, tensors, found = cut(batch, h, hk, per_head)
    visits = torch.zeros(batch, hk, dtype=torch.int64)
    for slot in found:
        visits[slot.batch, slot.kv_heads] += 1
        chunk = make_chunk(problem, tensors, slot, Scratch(torch.float32))
        assert chunk.nmat * per_head <= TILE_ELEMENTS
        assert chunk.nmat == chunk.k.shape[0] * chunk.k.shape[2]
        assert len(chunk.batches) == chunk.q.shape[0]
        assert len(chunk.heads) == chunk.q.shape[2] * chunk.q.shape[3]
    assert (visits == 1).all()


def test_sixty_four_heads_need_several_chunks():
    _, _, found = cut(1, 64, 64, 512 * 256)
    assert len(found) == 8


def test_packed_slots_visit_every_sequence():
    x = torch.empty(9, 4, 2)
    cu = torch.tensor([0, 4, 4, 9])
    tensors, scalars = packed_call(x, x, x, Packing(cu, cu, 5, 5), Options())
    problem = describe(tensors, scalars, needs_grad=False)
    found = list(slots(problem, tensors, TILE_ELEMENTS // 2))
    assert [(s.batch.start, s.kv_heads.start) for s in found] == [
        (b, head) for b in range(3) for head in (0, 2)
    ]


@pytest.mark.parametrize("lengths", [(0, 0), (1, 1), (16, 17), (513, 100), (10**6, 10**6)], ids=str)
@pytest.mark.parametrize("group", [1, 3, 600])
def test_tiles_are_multiples_of_16_and_shrink_to_the_call(lengths, group):
    size = block_sizes(512, 256, group, *lengths)
    for block, length in ((size.BLOCK_M, lengths[0]), (size.BLOCK_N, lengths[1])):
        assert block % 16 == 0 and 16 <= block < max(length, 1) + 16
    assert max(16, -(-512 // group // 16) * 16) >= size.BLOCK_M and size.BLOCK_N <= 256


def test_scratch_reuses_its_memory_by_name_and_dtype():
    scratch = Scratch(torch.float32)
    a = scratch.take("a", 4, 5)
    assert a.shape == (4, 5) and a.dtype == torch.float32
    assert scratch.take("a", 10).data_ptr() == a.data_ptr()
    assert scratch.take("b", 10).data_ptr() != a.data_ptr()
    assert scratch.take("a", 10, dtype=torch.bfloat16).data_ptr() != a.data_ptr()
    assert scratch.take("a", 50).shape == (50,)
