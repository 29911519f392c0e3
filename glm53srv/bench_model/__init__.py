"""`glm53srv bench-model`: the CUDA engine at the published model's dimensions on random weights, measured.

options.py runs anywhere; the rest needs torch and is imported by the command alone.
"""
