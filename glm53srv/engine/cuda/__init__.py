"""The engine for an NVIDIA GPU: exllamav3's modules and kernels, our loop, our home for the experts.

Nothing outside this package imports exllamav3, and nothing here patches its modules: a Model instance gets
our tensor source, and its sparse layers our class, before it loads.
"""
