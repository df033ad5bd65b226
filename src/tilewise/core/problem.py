"""The facts of one attention call: what dispatch, tuning and launchers decide by."""

from __future__ import annotations

from dataclasses import dataclass, field

from .features import BY_NAME
from .mask import MaskSpec

DENSE = "dense"
VARLEN = "varlen"


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One call without its data. Frozen and hashable, so that a decision can be cached by it.

    Attributes:
        device: torch's device type, such as "cpu" or "cuda".
        dtype: name of the dtype of q, k and v, such as "bfloat16".
        layout: "dense", (batch, seqlen, nheads, head_dim), or "varlen", (total, nheads, head_dim).
        batch: batch size, or the number of packed sequences.
        seqlen_q: number of queries; the largest of a sequence in varlen.
        seqlen_k: number of keys; the largest of a sequence in varlen.
        nheads: query heads, a multiple of ``nheads_kv``.
        nheads_kv: key and value heads.
        head_dim: width of q and k.
        head_dim_v: width of v and out.
        mask: causal and window bounds.
        softmax_scale: factor of q k^T.
        softcap: 0 is off.
        dropout_p: probability of dropping; 0 is off.
        features: names of ``core.features`` that this call uses.
        needs_grad: whether a backward may follow.
        deterministic: equal bits run to run.
        arch: the GPU's, such as "sm_90" or "gfx942"; "" elsewhere.
    """

    device: str
    dtype: str
    layout: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_kv: int
    head_dim: int
    head_dim_v: int
    mask: MaskSpec = field(default_factory=MaskSpec)
    softmax_scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    features: frozenset[str] = field(default_factory=frozenset)
    needs_grad: bool = False
    deterministic: bool = False
    arch: str = ""

    def __post_init__(self) -> None:
        unknown = self.features - BY_NAME.keys()
        if unknown:
            raise KeyError(f"not in core.features: {sorted(unknown)}")

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.nheads // self.nheads_kv
