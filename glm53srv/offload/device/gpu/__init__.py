"""Triton kernels that obey the offload's rules on a GPU. The only files that import triton and torch."""
