"""Measuring: providers, time, memory, result files, plots, and the GPT of the demo.

Knows nothing of correctness: who measures decides first whether the results may be believed.
"""

from . import memory, providers, results, timing

__all__ = ["memory", "providers", "results", "timing"]
