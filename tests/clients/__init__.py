"""Clients that other people wrote, against the real HTTP server over a scripted engine."""
