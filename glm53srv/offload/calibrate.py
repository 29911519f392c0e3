"""Costs measured at start: a few jobs of different sizes on every lane, timed while nothing else runs.

A device says how its lanes are timed (CostProbes); when, how often and what follows from it is decided here,
the same for a simulated device and a real one. Rounds of all lanes and sizes follow each other until the time
is up, so that a machine that slows down meanwhile slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from glm53srv.offload.cost import COST_NAMES, CostModel, CostOverrides, fit_lane_cost

Timer = Callable[[int], float]
"""Runs a job over so many distinct experts, cold ones where it can, and gives its milliseconds."""

Source = Literal["measured", "set", "assumed"]

SIZES = (1, 2, 4, 8)
MAX_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class CostProbes:
    """How a device times its lanes; None for one that it does not have or cannot time.

    cpu: a job for the CPU workers, from its posting to its answer. link: experts that the GPU computes from
    the home copy. vram: experts that it computes from slots. copy: experts copied into slots by the copy
    engine, nothing computed.
    """

    cpu: Timer
    link: Timer | None = None
    vram: Timer | None = None
    copy: Timer | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found. costs: in force at start. copy_ms: one expert by the copy engine, None if unknown.

    sources: where each cost comes from, by its name. samples: timed jobs. elapsed_s: what it took. notes: one
    line for each lane that could not be fitted, and why.
    """

    costs: CostModel
    copy_ms: float | None = None
    sources: dict[str, Source] = field(default_factory=dict)
    num_samples: int = 0
    elapsed_s: float = 0.0
    notes: tuple[str, ...] = ()


def assume(guess: CostModel, overrides: CostOverrides) -> Calibration:
    """Give the costs without measuring."""
    sources: dict[str, Source] = dict.fromkeys(COST_NAMES, "assumed")
    return Calibration(overrides.apply(guess), sources=sources | overrides.sources())


def calibrate(
    probes: CostProbes,
    clock: Callable[[], float],
    *,
    guess: CostModel,
    overrides: CostOverrides,
    budget_s: float = 1.0,
    max_experts: int = SIZES[-1],
) -> Calibration:
    """Time every lane within budget_s by clock (seconds) behind a first job, and fit the cost model to it.

    guess: costs of lanes that cannot be timed or fitted. overrides: costs that the user set; they win, and
    the lane that they describe is not timed. max_experts: largest job. Each lane runs one expert that does
    not count, nor does its time, which may be a compiler's; after that a job begins only if the last one of
    its lane says that it fits into what is left.
    """
    start_s = clock()
    timers = {"cpu": probes.cpu, "link": probes.link, "vram": probes.vram, "copy": probes.copy}
    if overrides.cpu_fixed_ms is not None and overrides.cpu_expert_ms is not None:
        timers["cpu"] = None
    if overrides.zero_copy_ms is not None:
        timers["link"] = None
    lanes = [_Lane(name, timer) for name, timer in timers.items() if timer is not None]
    sizes = [size for size in SIZES if size <= max_experts]
    for lane in lanes:
        lane.warm_up()
    begin_s = clock()
    for size in (size for _ in range(MAX_ROUNDS) for size in sizes):
        for lane in lanes:
            left_ms = (begin_s + budget_s - clock()) * 1e3
            if lane.expected_ms(size) <= left_ms:
                lane.run(size)
    found = _Fit(guess)
    for lane in lanes:
        found.take(lane)
    sources: dict[str, Source] = dict.fromkeys(COST_NAMES, "assumed")
    sources |= dict.fromkeys(found.measured, "measured")
    return Calibration(
        costs=overrides.apply(found.costs),
        copy_ms=found.copy_ms,
        sources=sources | overrides.sources(),
        num_samples=sum(len(lane.samples) for lane in lanes),
        elapsed_s=clock() - start_s,
        notes=tuple(found.notes),
    )


class _Lane:
    """One lane's jobs so far."""

    def __init__(self, name: str, timer: Timer) -> None:
        self.name = name
        self.samples: list[tuple[int, float]] = []
        self._timer = timer
        self._expert_ms = 0.0  # the slowest of the last jobs, per expert

    def warm_up(self) -> None:
        """Run one job that does not count: first touch of memory, parked threads, a kernel's compilation."""
        self._timer(1)

    def expected_ms(self, size: int) -> float:
        """Estimate a job, rather too long; 0 before the first."""
        return self._expert_ms * size

    def run(self, size: int) -> None:
        """Time a job."""
        elapsed_ms = self._timer(size)
        self.samples.append((size, elapsed_ms))
        self._expert_ms = elapsed_ms / size


class _Fit:
    """The cost model as the lanes' jobs say it is."""

    def __init__(self, guess: CostModel) -> None:
        self.costs = guess
        self.copy_ms: float | None = None
        self.measured: list[str] = []
        self.notes: list[str] = []

    def take(self, lane: _Lane) -> None:
        """Fit one lane. The GPU's fixed part is the link's: launches, and what follows the way."""
        try:
            fixed_ms, expert_ms = fit_lane_cost(lane.samples)
        except ValueError as error:
            self.notes.append(f"the {lane.name} lane was not measured: {error}")
            return
        match lane.name:
            case "cpu":
                self.costs = replace(self.costs, cpu_fixed_ms=fixed_ms, cpu_expert_ms=expert_ms)
                self.measured += ["cpu_fixed_ms", "cpu_expert_ms"]
            case "link":
                self.costs = replace(self.costs, zero_copy_ms=expert_ms, gpu_fixed_ms=fixed_ms)
                self.measured += ["zero_copy_ms", "gpu_fixed_ms"]
            case "vram":
                self.costs = replace(self.costs, vram_expert_ms=expert_ms)
                self.measured.append("vram_expert_ms")
            case "copy":
                self.copy_ms = expert_ms


def gb_per_s(num_bytes: int, elapsed_ms: float | None) -> float | None:
    """Give a rate in 10^9 bytes per second, None for an unknown time."""
    return None if not elapsed_ms else num_bytes / elapsed_ms / 1e6


def describe(calibration: Calibration, expert_bytes: int) -> Sequence[str]:
    """Give the start-up summary, lines of key=value."""
    costs, sources = calibration.costs, calibration.sources
    pairs = [f"{name}={getattr(costs, name):.4g}({sources[name]})" for name in COST_NAMES]
    rates = {
        "link": gb_per_s(expert_bytes, costs.zero_copy_ms),
        "cpu": gb_per_s(expert_bytes, costs.cpu_expert_ms),
        "copy": gb_per_s(expert_bytes, calibration.copy_ms),
    }
    known = [f"{name}_gb_s={rate:.3g}" for name, rate in rates.items() if rate is not None]
    took = f"samples={calibration.num_samples} took_s={calibration.elapsed_s:.2f}"
    return [" ".join(["costs", *pairs]), " ".join(["rates", *known, took]), *calibration.notes]
