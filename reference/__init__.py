"""Slow float64 oracles, imported by tests only, and the reference panels."""
