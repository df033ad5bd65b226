"""Gluon kernels: Hopper's warp-specialised pipelines, one file for each kernel."""
