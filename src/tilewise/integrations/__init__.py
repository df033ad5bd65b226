"""Where people already are: transformers, SDPA, flash-attn's name, DTensor.

Each module is imported by those who use it, and changes nothing until it is told to.
"""
