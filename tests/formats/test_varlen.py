"""Packed sequences: boundaries read and checked, padding removed and put back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.errors import InvalidInputError
from tilewise.formats.varlen import SequenceRows, pad, sequences, unpad

lengths = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=6)


def cu(numbers):
    return torch.tensor([0, *numbers]).cumsum(0).to(torch.int32)


@given(lengths, st.integers(0, 3))
def test_sequences_are_the_rows_between_boundaries(pairs, slack):
    q, k = cu([a for a, _ in pairs]), cu([b for _, b in pairs])
    found = sequences(
        q, k, total_q=int(q[-1]) + slack, total_k=int(k[-1]) + slack, max_seqlen_q=6, max_seqlen_k=9
    )
    assert [s.index for s in found] == list(range(len(pairs)))
    assert [(s.q_stop - s.q_start, s.k_stop - s.k_start) for s in found] == pairs
    starts = [(s.q_start, s.k_start) for s in found]
    assert starts == list(zip(q[:-1].tolist(), k[:-1].tolist(), strict=True))


def test_seqused_takes_the_first_rows():
    q = k = cu([3, 2])
    found = sequences(
        q, k, total_q=5, total_k=5, max_seqlen_q=3, max_seqlen_k=3,
        seqused_q=torch.tensor([1, 2]), seqused_k=torch.tensor([3, 0]),
    )  # fmt: skip
    assert found == [SequenceRows(0, 0, 1, 0, 3), SequenceRows(1, 3, 5, 3, 3)]


BAD = {
    "first": ({"cu_seqlens_q": torch.tensor([1, 3, 5])}, "cu_seqlens_q: got 1"),
    "decreasing": ({"cu_seqlens_k": torch.tensor([0, 3, 2])}, "cu_seqlens_k: got 3 then 2"),
    "past": ({"cu_seqlens_q": torch.tensor([0, 3, 6])}, "cu_seqlens_q: got 6"),
    "longest_q": ({"max_seqlen_q": 2}, "max_seqlen_q: got 2"),
    "longest_k": ({"max_seqlen_k": 1}, "max_seqlen_k: got 1"),
    "used": ({"seqused_q": torch.tensor([4, 0])}, "seqused_q: got 4 at sequence 0"),
    "negative": ({"seqused_k": torch.tensor([0, -1])}, "seqused_k: got -1 at sequence 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_cannot_be_right_are_named(name):
    good = {
        "cu_seqlens_q": torch.tensor([0, 3, 5]), "cu_seqlens_k": torch.tensor([0, 3, 5]),
        "total_q": 5, "total_k": 5, "max_seqlen_q": 3, "max_seqlen_k": 3,
    }  # fmt: skip
    assert len(sequences(**good)) == 2
    changes, message = BAD[name]
    with pytest.raises(InvalidInputError, match=message):
        sequences(**good | changes)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_unpad_then_pad_is_the_masked_batch(rows):
    mask = torch.tensor(rows)
    x = torch.arange(mask.numel() * 2, dtype=torch.float32).reshape(*mask.shape, 2) + 1
    packed, indices, boundaries, longest = unpad(x, mask)
    assert boundaries.dtype == torch.int32
    assert boundaries.diff().tolist() == mask.sum(-1).tolist() and boundaries[0] == 0
    assert longest == int(mask.sum(-1).max())
    assert torch.equal(packed, x[mask])
    assert torch.equal(pad(packed, indices, *mask.shape), x * mask[..., None])
    assert torch.equal(unpad(x, mask.long())[0], packed)


def test_padding_is_differentiable():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])

    def there_and_back(x):
        packed, indices, *_ = unpad(x, mask)
        return pad(packed * 2, indices, 2, 3)

    assert torch.autograd.gradcheck(there_and_back, x)


def test_an_empty_batch():
    packed, indices, boundaries, longest = unpad(torch.zeros(0, 3, 2), torch.zeros(0, 3))
    assert packed.shape == (0, 2) and boundaries.tolist() == [0] and longest == 0
    assert pad(packed, indices, 0, 3).shape == (0, 3, 2)
