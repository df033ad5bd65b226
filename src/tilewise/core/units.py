"""Units of the exponent.

Kernels work in base 2, because ``exp2`` is what the hardware has: scores are multiplied by LOG2E
before the exponential. Everything a user sees is in natural units: ``lse`` is
``log(sum_j exp(s_j))``. A name that ends in ``_log2`` holds base-2 units.
"""

from __future__ import annotations

import math

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
