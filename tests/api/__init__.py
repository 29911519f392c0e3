"""Tests of the HTTP shell and the text pipeline."""
