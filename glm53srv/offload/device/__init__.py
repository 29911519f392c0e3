"""The mechanism of the offload: memory, workers and kernels that obey the decisions made in the package
above.
"""
