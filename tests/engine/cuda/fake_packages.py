"""Packages of the GPU as small files in a folder: what opening exllamav3 looks at, without a GPU or torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

TORCH = """
class cuda:
    @staticmethod
    def is_available(): return True
    @staticmethod
    def get_device_name(): return "NVIDIA GeForce RTX 3090"
    @staticmethod
    def get_device_capability(): return (8, 6)
"""
AUTOTUNER = """
class Autotuner:
    def __init__(self, fn, sizes):
        from triton import Config
        self.fn = self.base_fn = fn
        self.configs = [Config({"BK": size}, num_warps=4, num_stages=2) for size in sizes]
        self.cache = {}
    def run(self): pass
"""
TRITON = """
__version__ = "3.6.0"
class Config:
    def __init__(self, kwargs, num_warps, num_stages):
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
"""
KERNELS = """
from triton.runtime.autotuner import Autotuner
def one_kernel(): pass
def two_kernel(): pass
one = Autotuner(one_kernel, (16, 32, 64))
two = Autotuner(two_kernel, (128, 256))
"""
EXTENSION = """
class exllamav3_ext:
    cuda_host_register = cuda_host_unregister = pinned_cuda_view = exl3_moe_coop = 1
"""
FILES: Mapping[str, str] = {
    "torch/__init__.py": TORCH,
    "triton/__init__.py": TRITON,
    "triton/runtime/__init__.py": "",
    "triton/runtime/autotuner.py": AUTOTUNER,
    "exllamav3/__init__.py": "",
    "exllamav3/version.py": "__version__ = '1.5.1'\n",
    "exllamav3/ext.py": EXTENSION,
    "exllamav3/modules/__init__.py": "",
    "exllamav3/modules/block_sparse_mlp.py": "class BlockSparseMLP:\n"
    "    forward = load_local = cpu_split_combine = 1\n",
    "exllamav3/modules/transformer.py": "class TransformerBlock:\n    forward = prepare_for_device = 1\n",
    "exllamav3/cache/__init__.py": "",
    "exllamav3/cache/cache.py": "class Cache:\n    get_new_state = release_state = 1\n",
    "exllamav3/cache/mla.py": "class CacheLayer_MLA_fp16:\n    get_tensors = 1\n",
    "exllamav3/vendor/__init__.py": "",
    "exllamav3/vendor/fla/__init__.py": "from . import kernels\n",
    "exllamav3/vendor/fla/kernels.py": KERNELS,
}

SCRIPT = """
import json, logging, os, sys
from pathlib import Path
from glm53srv.errors import MachineError
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
mode, folder, pins, before = json.loads(sys.argv[1])
if before:
    import exllamav3
from glm53srv.engine.cuda.package import open_package
try:
    package = open_package(mode, folder and Path(folder), pins_kernels=pins)
except MachineError as error:
    print(json.dumps({"error": str(error)}))
    raise SystemExit
print(json.dumps({
    "kernels": {name: [c.kwargs["BK"] for c in t.configs] for name, t in package.autotuners.items()},
    "pin_file": package.pin_file,
    "environ": {name: os.environ[name] for name in os.environ if name.startswith(("EXL", "CUDA_MODULE"))},
}))
"""


def open_in_process(
    folder: Path,
    mode: str = "exact",
    *,
    changes: Mapping[str, str | None] | None = None,
    tuning_dir: Path | None = None,
    pins_kernels: bool = True,
    imports_before: bool = False,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write the packages to a folder, open exllamav3 in a new process, and give what came of it.

    changes: other contents of files, None for one that is not there. imports_before: exllamav3 is imported
    first by somebody else. The answer's "log" holds the log's lines.
    """
    for name, text in {**FILES, **(changes or {})}.items():
        path = folder / name
        if text is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("EXL", "CUDA_"))}
    argument = json.dumps([mode, str(tuning_dir) if tuning_dir else None, pins_kernels, imports_before])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, argument],
        env={**inherited, **(environ or {}), "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer | {"log": done.stderr.splitlines()}
