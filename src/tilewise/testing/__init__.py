"""How correctness is decided: inputs, the oracle, the one tolerance rule, poisoned memory.

Used by ``tilewise check``, by this project's tests and, if they like, by users' own.
"""

from .cases import CASES, Case, feature_arguments, make_inputs
from .oracle import Results, oracle, plain, run
from .poison import poisoned_memory
from .tolerance import assert_within, band, excess

__all__ = [
    "CASES",
    "Case",
    "Results",
    "assert_within",
    "band",
    "excess",
    "feature_arguments",
    "make_inputs",
    "oracle",
    "plain",
    "poisoned_memory",
    "run",
]
