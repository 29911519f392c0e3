"""The model: configuration, checkpoint, layers in numpy over the native kernels."""
