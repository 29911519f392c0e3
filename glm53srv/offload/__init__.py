"""Offload policy: which experts live in VRAM, who computes a miss, how a prefill is staged. Pure values, no
torch.
"""
