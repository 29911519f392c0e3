"""Builds glm53srv._kernels from native/; see build_kernels.py."""
