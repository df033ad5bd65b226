"""Facts of attention in plain Python: neither torch nor triton is imported here."""
