"""glm53srv: an OpenAI-compatible server for GLM-5.3-Flash in the EXL3 format."""

__version__ = "0.1.0"
