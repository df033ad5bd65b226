"""Device code only: no torch here. One file for each kernel, one folder for each language."""
