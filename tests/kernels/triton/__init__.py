"""A file for each file of ``kernels/triton``, run by Triton's interpreter on a CPU."""
