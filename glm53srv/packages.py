"""Which packages are installed, asked without importing them."""

from __future__ import annotations

from importlib import metadata


def package_version(package: str) -> str | None:
    """Give the version that the package's metadata names, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
