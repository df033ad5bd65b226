"""FlashAttention and FlashAttention-2 in Triton.

``fwd.py``, ``bwd_preprocess.py``, ``bwd_dkdv.py``, ``bwd_dq.py`` and ``bwd_dbias.py`` are
FlashAttention-2, ``fa1_fwd.py`` and ``fa1_bwd.py`` the first paper's schedule. They share
``tiles.py`` (where a tile lies, loading), ``score.py`` (the score pipeline), ``softmax.py`` (online
softmax), ``gradient.py`` (P and dS, recomputed), ``dropout.py`` and, in FlashAttention 1,
``scratch.py`` (running results in device memory).

Groups of values that every kernel hands on are tuples: ``SCORE`` (``score.py``), ``MASK`` and
``SOURCE`` (``tiles.py``), ``DROPOUT`` (``dropout.py``). An operand that is absent is None, and the
code that would use it is not compiled.
"""
