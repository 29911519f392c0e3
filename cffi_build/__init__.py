"""Builds the native kernels into glm53srv/, in cffi API mode or, without Python.h, as a plain library."""
