"""Opens exllamav3 with its numerics pinned. The only place that imports it."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from glm53srv.errors import MachineError
from glm53srv.offload.cost import Mode

logger = logging.getLogger(__name__)

EXLLAMAV3_VERSION = "1.5.1"

PINNED: dict[Mode, dict[str, str]] = {
    "exact": {
        # Experts with many rows in a chunk: the tier that reads the load-time address instead of the pointer
        # tables would read the home copy of an expert that lies staged in VRAM.
        "EXL3_MOE_RECON_TILES": "0",
        # fp16 accumulators where a timing probe likes them: another card, or another day, other logits.
        "EXL3_HGEMM_F16ACC": "0",
        # int8 activations in the decode products of the non-expert matrices, 0.9 % rms per product.
        "EXL3_INT8_GEMV": "0",
    },
    "fast": {
        "EXL3_MOE_RECON_TILES": "0",
        "EXL3_HGEMM_F16ACC": "1",
        "EXL3_INT8_GEMV": "1",  # with the residual pass
    },
}
"""What the package reads when it is imported, by mode: every value decides numerics."""

SEAMS = {
    "exllamav3.modules.block_sparse_mlp.BlockSparseMLP": ("forward", "load_local", "cpu_split_combine"),
    "exllamav3.modules.transformer.TransformerBlock": ("forward", "prepare_for_device"),
    "exllamav3.cache.cache.Cache": ("get_new_state", "release_state"),
}
"""Attributes that this engine overrides or calls, beyond the documented interface; checked at start."""

EXTENSION_SEAMS = (
    "cuda_host_register",
    "cuda_host_unregister",
    "pinned_cuda_view",
    "exl3_moe_flag_wait",
    "exl3_moe_flag_write",
)


@dataclass(frozen=True, slots=True)
class Package:
    """The opened package. root: exllamav3; extension: its compiled part; torch: the module it runs on."""

    root: ModuleType
    extension: Any
    torch: Any


def open_package(mode: Mode) -> Package:
    """Import exllamav3 for a mode. Raises MachineError, one line, when it cannot be used here.

    Imported before by this process with other numerics it is refused: what the package read then stays.
    """
    pins = PINNED[mode]
    wrong = {name: os.environ.get(name) for name in pins if os.environ.get(name) != pins[name]}
    if wrong and "exllamav3" in sys.modules:
        raise MachineError(f"exllamav3 was imported with other numerics ({wrong}); start a new process")
    os.environ.update(pins)  # for the package; this program reads none of them
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    torch = _import("torch")
    if not torch.cuda.is_available():
        raise MachineError(
            "torch finds no CUDA device; check the driver with nvidia-smi, or use --engine cpu"
        )
    root = _import("exllamav3")
    version = _import("exllamav3.version").__version__
    if version != EXLLAMAV3_VERSION:
        raise MachineError(
            f"exllamav3 {version} is installed, this engine needs {EXLLAMAV3_VERSION}: it uses the "
            f"package's kernels and tables; pip install exllamav3=={EXLLAMAV3_VERSION}"
        )
    extension = _import("exllamav3.ext").exllamav3_ext
    _check_seams(extension)
    pin_autotuners(root)
    return Package(root, extension, torch)


def pin_autotuners(root: ModuleType) -> int:
    """Leave every Triton autotuner of the linear attention its first configuration; gives how many there are.

    They choose by timing, at the first prefill, so two starts could differ in their sums: a measured pair of
    choices had top-1 agreement 0.989 (0xSero/glm53-flash-offload). The first is
    slower by little and always the same.
    """
    count = 0
    for tuner in _autotuners(root):
        tuner.configs = tuner.configs[:1]
        count += 1
    logger.info("exllamav3 autotuners=%d pinned=first", count)
    return count


def _autotuners(root: ModuleType) -> Iterator[Any]:
    """Find the autotuners, also under decorators; the vendored package is loaded module by module."""
    tuner_type = _import("triton.runtime.autotuner").Autotuner
    vendor = _import(f"{root.__name__}.vendor.fla")
    prefix = f"{vendor.__name__}."
    modules = [vendor, *(module for name, module in _loaded_modules() if name.startswith(prefix))]
    seen: set[int] = set()
    for module in modules:
        for found in list(vars(module).values()):
            kernel = found
            while kernel is not None and not isinstance(kernel, tuner_type):
                kernel = getattr(kernel, "fn", None) if hasattr(kernel, "run") else None
            if kernel is not None and id(kernel) not in seen:
                seen.add(id(kernel))
                yield kernel


def _loaded_modules() -> list[tuple[str, ModuleType]]:
    return list(sys.modules.items())


def _check_seams(extension: Any) -> None:
    for path, names in SEAMS.items():
        module, _, name = path.rpartition(".")
        owner = getattr(_import(module), name)
        missing = [each for each in names if not hasattr(owner, each)]
        if missing:
            raise MachineError(f"exllamav3's {name} lacks {', '.join(missing)}: the package was changed")
    missing = [name for name in EXTENSION_SEAMS if not hasattr(extension, name)]
    if missing:
        raise MachineError(
            f"exllamav3's compiled extension lacks {', '.join(missing)}: it was built from another version"
        )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MachineError(
            f"cannot import {name} ({error}); install the GPU's packages with pip install 'glm53srv[cuda]', "
            "or use --engine cpu"
        ) from error
    except OSError as error:  # exllamav3 without its extension and without a toolkit to build it
        raise MachineError(f"cannot load {name}: {error}; build exllamav3's extension first") from error
