"""What only a GPU shows. ``tools/gpu_tests.py`` runs these in parallel processes."""
