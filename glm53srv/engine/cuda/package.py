"""Opens exllamav3 with its numerics pinned. The only place that imports it."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from glm53srv.engine.cuda.pins import (
    SHIPPED,
    find_autotuners,
    find_pins,
    pin_autotuners,
    pin_file_name,
)
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
        # Sums of the decode kernel for experts in one piece.
        "EXL3_MOE_COOP_KSPLIT": "0",
    },
    "fast": {
        "EXL3_MOE_RECON_TILES": "0",
        "EXL3_HGEMM_F16ACC": "0",  # 1 on the cards of HALF_RATE
        "EXL3_INT8_GEMV": "1",  # with the residual pass
        # In four, where there is scratch for it: what came over the link is one or two experts at a time, and
        # a layer of them took 37 us and not 72 (one row, H200, 2026-11-30; six experts 97 and 100).
        "EXL3_MOE_COOP_KSPLIT": "4",
    },
}
"""What the package reads when it is imported, by mode: every value decides numerics."""

HALF_RATE = ((8, 6), (8, 9), (12, 0))
"""Compute capabilities whose tensor cores add up fp16 products in fp32 at half the rate: GeForce and its
workstation kin. There `fast` lets prefill products be summed in fp16. On others the kernels for that only
cost: on an H200 `fast` with them prefilled 3,060 tok/s, `exact` without them 3,740."""

TUNE_CACHE = "EXLLAMAV3_TUNE_CACHE"

SEAMS = {
    "exllamav3.modules.block_sparse_mlp.BlockSparseMLP": ("forward", "load_local", "cpu_split_combine"),
    "exllamav3.modules.transformer.TransformerBlock": ("forward", "prepare_for_device"),
    "exllamav3.cache.cache.Cache": ("get_new_state", "release_state"),
    "exllamav3.cache.mla.CacheLayer_MLA_fp16": ("get_tensors",),
}
"""Attributes that this engine overrides or calls, beyond the documented interface; checked at start."""

EXTENSION_SEAMS = (
    "cuda_host_register",
    "cuda_host_unregister",
    "pinned_cuda_view",
    "exl3_moe_coop",
)


@dataclass(frozen=True, slots=True)
class Package:
    """The opened package. root: exllamav3; extension: its compiled part; torch: the module it runs on.

    autotuners: of its Triton kernels by name. pin_file: the name of their pin file on this machine.
    """

    root: ModuleType
    extension: Any
    torch: Any
    autotuners: Mapping[str, Any] = field(default_factory=dict)
    pin_file: str = ""


def open_package(mode: Mode, tuning_dir: Path | None = None, *, pins_kernels: bool = True) -> Package:
    """Import exllamav3 for a mode. Raises MachineError, one line, when it cannot be used here.

    Imported before by this process with other numerics it is refused: what the package read then stays.
    tuning_dir: where this machine's timed choices are kept, None for the package's own places. pins_kernels:
    False leaves Triton's autotuners to time, for the command that makes a pin file.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # read with the first call of the driver
    torch = _import("torch")
    if not torch.cuda.is_available():
        raise MachineError(
            "torch finds no CUDA device; check the driver with nvidia-smi, or use --engine cpu"
        )
    pins = numerics_of(mode, torch.cuda.get_device_capability())
    wrong = {name: os.environ.get(name) for name in pins if os.environ.get(name) != pins[name]}
    if wrong and "exllamav3" in sys.modules:
        raise MachineError(f"exllamav3 was imported with other numerics ({wrong}); start a new process")
    os.environ.update(pins)  # for the package; read above only to tell an import under other numerics
    root = _import("exllamav3")
    version = _import("exllamav3.version").__version__
    if version != EXLLAMAV3_VERSION:
        raise MachineError(
            f"exllamav3 {version} is installed, this engine needs {EXLLAMAV3_VERSION}: it uses the "
            f"package's kernels and tables; pip install exllamav3=={EXLLAMAV3_VERSION}"
        )
    extension = _import("exllamav3.ext").exllamav3_ext
    _check_seams(extension)
    if tuning_dir is not None:
        _keep_gemm_choices(tuning_dir, torch.cuda.get_device_name())
    triton = _import("triton")
    vendor = _import("exllamav3.vendor.fla")
    tuners = find_autotuners(vendor, _import("triton.runtime.autotuner").Autotuner)
    pin_file = pin_file_name(torch.cuda.get_device_capability(), triton.__version__)
    if pins_kernels:
        folders = [SHIPPED] if tuning_dir is None else [tuning_dir, SHIPPED]
        pin_autotuners(tuners, find_pins(pin_file, folders), triton.Config)
    return Package(root, extension, torch, tuners, pin_file)


def numerics_of(mode: Mode, capability: tuple[int, int]) -> dict[str, str]:
    """Give what the package is told on a card of this compute capability."""
    is_half = mode == "fast" and tuple(capability) in HALF_RATE
    return PINNED[mode] | ({"EXL3_HGEMM_F16ACC": "1"} if is_half else {})


def _keep_gemm_choices(tuning_dir: Path, gpu: str) -> None:
    """Name the file in which the package keeps what its tuner of cooperative GEMMs finds by timing.

    Other choices split sums in other places, so logits repeat from run to run only while the file is kept.
    The package writes it as shapes come up, and is silent where it cannot.
    """
    if TUNE_CACHE in os.environ:
        return  # the user knows the package's own variable
    path = tuning_dir / gemm_file_name(gpu)
    try:
        tuning_dir.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s): GEMMs are timed anew at each start, whose logits may then differ in "
            "rounding; name another folder with --tuning-dir",
            path,
            error.strerror,
        )
        return
    os.environ[TUNE_CACHE] = str(path)


def gemm_file_name(gpu: str) -> str:
    """Name the file of the GEMM tuner's choices for a GPU model, by the driver's name of it."""
    return f"gemm-{re.sub(r'[^0-9A-Za-z]+', '-', gpu).strip('-')}-exllamav3-{EXLLAMAV3_VERSION}.bin"


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
