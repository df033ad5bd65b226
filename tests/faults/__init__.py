"""Faults that users of public attention libraries reported, each with the right value written in.

A test's name or docstring carries the fault's number and where it was reported. Right values are
numbers, exact zeros and infinities, or the formulas of ``tools.by_hand``, never the package's own
results.
"""
