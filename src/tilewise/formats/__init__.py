"""Data layouts, in torch: packed sequences and the layout of dropout's random numbers."""
