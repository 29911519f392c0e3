"""The same as `glm53srv bench-model`, from a checkout: the CUDA engine at full size on random weights.

python -m bench.cuda.full_size --mode exact --vram 24 --out result.json
python -m bench.cuda.full_size --mode fast --layers 15 --soak 60
"""

from __future__ import annotations

import sys

from glm53srv.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["bench-model", *sys.argv[1:]]))
