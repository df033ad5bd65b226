"""Backends: each says what it cannot do, and launches what it can."""
