"""Decides which tokens a step computes. Pure but for loop.py, which alone knows asyncio."""
