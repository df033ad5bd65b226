"""Dropout's random numbers: counter-based, so that any tile of the mask can be drawn on its own.

Philox4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011),
seven rounds being the fewest that pass TestU01's BigCrush, and FlashAttention's number too, with

    key     = (seed low, seed high)
    counter = (8 * (row // 16) + row % 8, 4 * (col // 16) + col % 8 // 2, head, batch)

Its four 32-bit words are eight 16-bit lanes, low half first. Element (row, col) is kept when lane
``4 * (row % 16 // 8) + 2 * (col % 16 // 8) + col % 2`` is at least ``round(dropout_p * 65536)``.
One call so serves the eight elements that one thread holds of a 16 x 16 block of a Hopper WGMMA
accumulator.

Row and column count within the sequence, batch is the sequence's number and head the query head.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 7


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Seven rounds of Philox on 32-bit words held in int64 tensors that broadcast.

    Products of two words wrap modulo 2^64, which leaves their 64 bits as they should be.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0 = ((right >> 32) & _WORD) ^ x1 ^ k0
        x2 = ((left >> 32) & _WORD) ^ x3 ^ k1
        x1, x3 = right & _WORD, left & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return x0, x1, x2, x3


def threshold(dropout_p: float) -> int:
    """A 16-bit lane below this number drops its element."""
    return round(dropout_p * 65536)


def keep_mask(
    seed: int,
    dropout_p: float,
    *,
    batches: range,
    heads: range,
    rows: range,
    cols: range,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The tile of the dropout mask at the given batches, heads, rows and columns.

    Args:
        seed: 64 bits, of which the low half is the first word of the key.
        dropout_p: probability of dropping, in [0, 1).
        batches, heads, rows, cols: ranges of step 1.
        device: where to draw.

    Returns:
        (len(batches), len(heads), len(rows), len(cols)) bool, True where kept.
    """
    row_blocks = range(rows.start // 16, -(-rows.stop // 16))
    col_blocks = range(cols.start // 16, -(-cols.stop // 16))

    def words(numbers: range, dim: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = len(numbers)
        return torch.arange(numbers.start, numbers.stop, dtype=torch.int64, device=device).reshape(
            shape
        )

    counter = (
        words(range(8 * row_blocks.start, 8 * row_blocks.stop), 2),
        words(range(4 * col_blocks.start, 4 * col_blocks.stop), 3),
        words(heads, 1),
        words(batches, 0),
    )
    drawn = philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    limit = threshold(dropout_p)
    # words (row half, column half) -> lanes (column parity), low half first
    lanes = torch.stack(
        [half >= limit for word in drawn for half in (word & 0xFFFF, word >> 16)], dim=-1
    )
    b, h, r, c = len(batches), len(heads), len(row_blocks), len(col_blocks)
    kept = (
        lanes.view(b, h, r, 8, c, 4, 2, 2, 2)
        .permute(0, 1, 2, 6, 3, 4, 7, 5, 8)  # b h r rowhalf row8 c colhalf col4 parity
        .reshape(b, h, 16 * r, 16 * c)
    )
    top, left = rows.start - 16 * row_blocks.start, cols.start - 16 * col_blocks.start
    return kept[:, :, top : top + len(rows), left : left + len(cols)]
