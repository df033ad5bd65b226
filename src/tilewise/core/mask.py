"""Causal and sliding-window masks as two optional bounds, and the block ranges that follow.

Query row ``i`` stands on the diagonal key ``d = i + seqlen_k - seqlen_q``: the diagonal ends in the
bottom right corner. Row ``i`` sees key ``j`` when ``d - window_left <= j <= d + window_right``.
Causal is ``window_right = 0``.

All ranges below are half open.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """How far a row sees to either side of its diagonal key; ``None`` is without limit."""

    window_left: int | None = None
    window_right: int | None = None

    @classmethod
    def from_window(cls, left: int, right: int) -> MaskSpec:
        """Reads flash-attn's form, in which -1 is without limit."""
        return cls(None if left < 0 else left, None if right < 0 else right)

    def keys_of(self, m_start: int, m_stop: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """The smallest range of keys outside which rows [m_start, m_stop) see nothing."""
        shift = seqlen_k - seqlen_q
        start = 0 if self.window_left is None else m_start + shift - self.window_left
        stop = seqlen_k if self.window_right is None else m_stop + shift + self.window_right
        start = min(max(start, 0), seqlen_k)
        return start, max(min(stop, seqlen_k), start)

    def rows_of(self, n_start: int, n_stop: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """The smallest range of rows outside which no row sees a key of [n_start, n_stop)."""
        shift = seqlen_k - seqlen_q
        start = 0 if self.window_right is None else n_start - shift - self.window_right
        stop = seqlen_q if self.window_left is None else n_stop - shift + self.window_left
        start = min(max(start, 0), seqlen_q)
        return start, max(min(stop, seqlen_q), start)

    def covers(
        self, m_start: int, m_stop: int, n_start: int, n_stop: int, seqlen_q: int, seqlen_k: int
    ) -> bool:
        """Whether every row of [m_start, m_stop) sees every key of [n_start, n_stop)."""
        shift = seqlen_k - seqlen_q
        left_ok = self.window_left is None or n_start >= m_stop - 1 + shift - self.window_left
        right_ok = self.window_right is None or n_stop - 1 <= m_start + shift + self.window_right
        return left_ok and right_ok
