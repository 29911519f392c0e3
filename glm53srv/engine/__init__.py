"""Executes one step."""
