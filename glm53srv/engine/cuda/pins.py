"""Which configuration each Triton kernel of the linear attention runs: from a file, never by timing.

    pins/sm90-triton3.6.json     {"about": "...", "kernels": {NAME: {"kwargs": {"BK": 64}, "num_warps": 4,
                                                                    "num_stages": 2}}}

exllamav3's vendored flash-linear-attention lists 5 to 36 configurations per kernel, and its autotuners choose
by timing at the first prefill. Other choices give other sums: a measured pair of them had top-1 agreement
0.989 (0xSero/glm53-flash-offload). So each autotuner is left one configuration: the file's, made by
`glm53srv pin-triton` on a card of the same architecture, else the first of its list, which is always the
same and perhaps slower.

A file serves one architecture and one Triton: what fits into shared memory and what is fast depend on both.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "pins"
"""Files that come with the package."""


class PinError(ValueError):
    """A pin file is not what it should be; the text is one line that names the place."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A kernel's configuration. kwargs: tile sizes and switches, (parameter, value) in order of parameters.

    What else a triton.Config may hold (blocks of a cluster, a limit of registers) no vendored kernel sets.
    """

    kwargs: tuple[tuple[str, int | str], ...]
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, config: Any) -> Pin:
        """Read a triton.Config."""
        return cls(tuple(sorted(config.kwargs.items())), config.num_warps, config.num_stages)


@dataclass(frozen=True, slots=True)
class PinReport:
    """What pinning did, in names of kernels. first: those of no pin. built: pins that no list had."""

    pinned: tuple[str, ...]
    built: tuple[str, ...]
    first: tuple[str, ...]


def pin_file_name(capability: tuple[int, int], triton_version: str) -> str:
    """Name the file for a compute capability and a Triton; its patch level does not count."""
    major_minor = ".".join(triton_version.split("+")[0].split(".")[:2])
    return f"sm{capability[0]}{capability[1]}-triton{major_minor}.json"


def find_pins(name: str, folders: Iterable[Path]) -> dict[str, Pin]:
    """Read the first file of that name; none there or a broken one is a line in the log, and no pins."""
    tried = list(folders)
    for folder in tried:
        path = folder / name
        if not path.is_file():
            continue
        try:
            pins = read_pins(path)
        except (OSError, PinError) as error:
            logger.warning("%s: %s; each Triton kernel takes its first configuration", path, error)
            return {}
        logger.info("triton pins=%d file=%s", len(pins), path)
        return pins
    logger.info(
        "triton pins=none: %s is not in %s; each kernel takes its first configuration, which may be slower "
        "(`glm53srv pin-triton` makes the file)",
        name,
        " or ".join(str(folder) for folder in tried),
    )
    return {}


def read_pins(path: Path) -> dict[str, Pin]:
    """Read a file. Raises PinError, OSError."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise PinError(f"is not JSON ({error})") from error
    kernels = content.get("kernels") if isinstance(content, dict) else None
    if not isinstance(kernels, dict):
        raise PinError('has no object "kernels"')
    return {name: _read_pin(name, entry) for name, entry in kernels.items()}


def write_pins(path: Path, pins: Mapping[str, Pin], about: str) -> None:
    """Write a file, with a line about where it was made. Raises OSError."""
    kernels = {name: asdict(pin) | {"kwargs": dict(pin.kwargs)} for name, pin in sorted(pins.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "kernels": kernels}, indent=1) + "\n", encoding="utf-8")


def pin_autotuners(
    tuners: Mapping[str, Any], pins: Mapping[str, Pin], make_config: Callable[..., Any]
) -> PinReport:
    """Leave each autotuner one configuration.

    make_config: triton.Config, for a pin that is not in the kernel's list; the list depends on the GPU.
    """
    pinned, built, first = [], [], []
    for name, tuner in tuners.items():
        pin = pins.get(name)
        if pin is None:
            first.append(name)
            tuner.configs = tuner.configs[:1]
            continue
        pinned.append(name)
        known = next((config for config in tuner.configs if Pin.of(config) == pin), None)
        if known is None:
            built.append(name)
            known = make_config(dict(pin.kwargs), num_warps=pin.num_warps, num_stages=pin.num_stages)
        tuner.configs = [known]
    report = PinReport(tuple(pinned), tuple(built), tuple(first))
    logger.info("triton autotuners=%d pinned=%d first=%d", len(tuners), len(pinned), len(first))
    if pins and first:
        logger.info("triton kernels without a pin: %s", ", ".join(first))
    if stray := pins.keys() - tuners.keys():
        logger.warning("the pin file names kernels that are not there: %s", ", ".join(sorted(stray)))
    return report


def forget_choices(tuners: Mapping[str, Any]) -> None:
    """Let each autotuner time anew, without what this or an earlier process found."""
    for tuner in tuners.values():
        tuner.cache.clear()
        tuner.cache_results = False


def read_choices(tuners: Mapping[str, Any]) -> dict[str, Pin]:
    """Give what the autotuners chose, those that chose: by name, of several choices the most frequent one.

    Of choices as frequent as each other the first one made.
    """
    counts = {
        name: Counter(Pin.of(config) for config in tuner.cache.values()) for name, tuner in tuners.items()
    }
    return {name: found.most_common(1)[0][0] for name, found in counts.items() if found}


def find_autotuners(package: ModuleType, tuner_type: type[Any]) -> dict[str, Any]:
    """Find the autotuners of a package's loaded modules by the name of their kernel, also under decorators.

    Two kernels of one name are told apart by their modules.
    """
    found: dict[str, Any] = {}
    for tuner in _walk(package, tuner_type):
        name = _kernel_name(tuner)
        if name in found:
            name = f"{tuner.base_fn.__module__.rpartition('.')[2]}.{name}"
        found[name] = tuner
    return found


def _walk(package: ModuleType, tuner_type: type[Any]) -> Iterator[Any]:
    prefix = f"{package.__name__}."
    modules = [package, *(module for name, module in sorted(sys.modules.items()) if name.startswith(prefix))]
    seen: set[int] = set()
    for module in modules:
        for value in list(vars(module).values()):
            # triton.heuristics, autotune and jit each keep what they decorate in `fn`, and have `run`.
            while value is not None and not isinstance(value, tuner_type):
                value = getattr(value, "fn", None) if hasattr(value, "run") else None
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                yield value


def _kernel_name(tuner: Any) -> str:
    name: str = tuner.base_fn.__name__
    return name


def _read_pin(name: str, entry: object) -> Pin:
    if not isinstance(entry, dict) or entry.keys() != {"kwargs", "num_warps", "num_stages"}:
        raise PinError(f"{name}: wants exactly kwargs, num_warps and num_stages")
    kwargs, warps, stages = entry["kwargs"], entry["num_warps"], entry["num_stages"]
    if not isinstance(kwargs, dict) or not all(isinstance(value, int | str) for value in kwargs.values()):
        raise PinError(f"{name}: kwargs must be whole numbers, booleans or words by parameter")
    if not _is_count(warps) or warps & (warps - 1) or not _is_count(stages):
        raise PinError(f"{name}: num_warps must be a power of two and num_stages a whole number from 1")
    return Pin(tuple(sorted(kwargs.items())), warps, stages)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
