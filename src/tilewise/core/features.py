"""What each backend can do, in one place.

``supports()`` of every backend, the feature table of the documentation and the case table of the
tests are all read from here.
"""

from __future__ import annotations

from dataclasses import dataclass

FORWARD = "fwd"
BACKWARD = "bwd"

# Backends in order of preference. A new backend is named here, in FEATURES and in DTYPES.
BACKEND_NAMES = ("cpu", "gluon", "triton", "reference")

DTYPES: dict[str, tuple[str, ...]] = {
    "cpu": ("float16", "bfloat16", "float32", "float64"),
    "gluon": ("float16", "bfloat16"),
    "triton": ("float16", "bfloat16", "float32"),
    "reference": ("float16", "bfloat16", "float32", "float64"),
}

_ALL = frozenset(BACKEND_NAMES)
_BUT_GLUON = _ALL - {"gluon"}


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature of a call, and the backends that have it in each direction."""

    name: str
    argument: str
    meaning: str
    fwd: frozenset[str] = _ALL
    bwd: frozenset[str] = _ALL

    def backends(self, direction: str) -> frozenset[str]:
        """The backends that have this feature in ``direction`` ("fwd" or "bwd")."""
        return self.fwd if direction == FORWARD else self.bwd


FEATURES: tuple[Feature, ...] = (
    Feature("causal", "causal=True", "a row sees keys up to the bottom right diagonal"),
    Feature("window", "window_size=(l, r)", "a row sees l keys before and r after its diagonal"),
    Feature("softcap", "softcap=c", "scores become c * tanh(score / c)"),
    Feature("alibi", "alibi_slopes=", "scores fall with distance from the diagonal"),
    Feature(
        "attn_bias",
        "attn_bias= (float)",
        "added to the scores; has a gradient",
        _BUT_GLUON,
        _BUT_GLUON,
    ),
    Feature(
        "bool_mask", "attn_bias= (bool)", "True where a row may see a key", _BUT_GLUON, _BUT_GLUON
    ),
    Feature("sink", "sink=", "one more logit per head, without a value; has a gradient"),
    Feature(
        "dropout",
        "dropout_p=",
        "counter-based Philox; equal bits on every backend",
    ),
    Feature("gqa", "nheads_kv < nheads", "grouped and multi-query heads, never expanded"),
    Feature("head_dim_v", "v.shape[-1] != q.shape[-1]", "values of another width"),
    Feature("varlen", "flash_attn_varlen_func", "packed sequences by cumulative lengths"),
    Feature("seqused", "seqused_q=, seqused_k=", "only the first rows of each sequence are used"),
    Feature("deterministic", "deterministic=True", "equal bits run to run"),
    Feature(
        "attn_probs",
        "return_attn_probs=True",
        "the dropped-out probabilities, O(N^2), for testing",
        bwd=frozenset(),
    ),
)

BY_NAME: dict[str, Feature] = {feature.name: feature for feature in FEATURES}


def reasons_against(
    backend: str, dtype: str, features: frozenset[str], needs_grad: bool
) -> tuple[str, ...]:
    """What the tables say against ``backend`` for a call of these facts; empty when nothing."""
    reasons = []
    if dtype not in DTYPES[backend]:
        reasons.append(f"no {dtype}: it computes {', '.join(DTYPES[backend])}")
    for feature in FEATURES:
        if feature.name not in features:
            continue
        if backend not in feature.fwd:
            reasons.append(f"no {feature.name}")
        elif needs_grad and feature.bwd and backend not in feature.bwd:
            reasons.append(f"no backward of {feature.name}")
    return tuple(reasons)


def markdown_table() -> str:
    """The feature table of the README: a row for each feature, a column for each backend."""

    def cell(feature: Feature, backend: str) -> str:
        directions = [d for d in (FORWARD, BACKWARD) if backend in feature.backends(d)]
        return " + ".join(directions) or "no"

    lines = [
        "| feature | argument | meaning | " + " | ".join(f"`{b}`" for b in BACKEND_NAMES) + " |",
        "| --- | --- | --- | " + " | ".join("---" for _ in BACKEND_NAMES) + " |",
    ]
    for f in FEATURES:
        cells = " | ".join(cell(f, b) for b in BACKEND_NAMES)
        lines.append(f"| {f.name} | `{f.argument}` | {f.meaning} | {cells} |")
    dtypes = " | ".join(", ".join(DTYPES[b]) for b in BACKEND_NAMES)
    lines.append(f"| dtypes | | | {dtypes} |")
    return "\n".join(lines)
