"""Benchmarks: each file is a command."""
