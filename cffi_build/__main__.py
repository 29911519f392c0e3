"""`python -m cffi_build`: build the native kernels in place unless they are up to date. Prints one line."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from cffi_build.build import BuildError, build

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cffi_build", description=__doc__)
    parser.add_argument("--force", action="store_true", help="build even if nothing changed")
    parser.add_argument("--mode", choices=("auto", "api", "abi"), default="auto", help="default: auto")
    parser.add_argument("--out", type=Path, default=ROOT / "glm53srv", help="package directory to build into")
    arguments = parser.parse_args(argv)
    compiler = os.environ.get("CC") or "cc"
    try:
        print(build(ROOT, arguments.out, compiler=compiler, mode=arguments.mode, force=arguments.force))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
