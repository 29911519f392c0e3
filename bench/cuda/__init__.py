"""What is run on a GPU: checks and measurements of the CUDA engine."""
