"""Device code, piece by piece."""
