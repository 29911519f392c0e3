"""`python -m bench.kernels`: time the gated expert of GLM-5.3-Flash (4096 x 2048 x 3, mul1; K = 3 unless
--bits says otherwise), check its error.

Weights come from DRAM: the picks walk through enough distinct experts (over 300 MB) that no cache holds them.
One call computes one row with 8 picks, as one decode step of one stream does; the time is that of the call
divided by 8.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from glm53srv.kernels import Codebook, Exl3Matrix, ExpertTable, Isa, KernelPool, Precision
from reference import exl3

HIDDEN, INTERMEDIATE, LIMIT = 4096, 2048, 10.0
NUM_EXPERTS, NUM_PICKS = 40, 8
NUM_WEIGHTS = 3 * HIDDEN * INTERMEDIATE


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of the table. gb_per_s counts packed weights only, of all threads together.

    cpu_ms_per_expert: processor time of all threads, which other work on a shared machine disturbs less than
    the wall clock. The kernels' waiting between phases counts as well.
    """

    isa: str
    precision: str
    bits: int
    threads: int
    rows: int
    ms_per_expert: float
    fastest_ms_per_expert: float
    cpu_ms_per_expert: float
    gb_per_s: float
    relative_rms_error: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="rows that share their picks")
    parser.add_argument("--isa", choices=[isa.name for isa in Isa], default=Isa.AUTO.name)
    parser.add_argument("--bits", type=int, choices=range(1, 9), default=3, help="bits per weight, K")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    experts = _random_experts(arguments.bits)
    table = ExpertTable([(_as_matrix(gate), _as_matrix(up), _as_matrix(down)) for gate, up, down in experts])
    measurements = []
    for num_threads in arguments.threads:
        with KernelPool(num_threads, Isa[arguments.isa]) as pool:
            for precision in Precision:
                error = _relative_error(pool, experts[0], table, precision)
                for rows in arguments.rows:
                    wall, cpu = _time_calls(pool, table, rows, precision, arguments.repeats)
                    measurements.append(_measurement(pool, precision, arguments.bits, rows, wall, cpu, error))
    _report(measurements, as_json=arguments.json)
    return 0


def _random_experts(bits: int) -> list[tuple[exl3.Exl3Tensors, exl3.Exl3Tensors, exl3.Exl3Tensors]]:
    rng = np.random.default_rng(0)
    shapes = ((HIDDEN, INTERMEDIATE), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN))

    def expert() -> tuple[exl3.Exl3Tensors, exl3.Exl3Tensors, exl3.Exl3Tensors]:
        gate, up, down = (exl3.random_tensors(rng, *shape, bits, "mul1") for shape in shapes)
        return gate, up, down

    return [expert() for _ in range(NUM_EXPERTS)]


def _as_matrix(tensors: exl3.Exl3Tensors) -> Exl3Matrix:
    return Exl3Matrix(tensors.trellis, tensors.suh, tensors.svh, Codebook.MUL1)


def _relative_error(
    pool: KernelPool,
    expert: tuple[exl3.Exl3Tensors, exl3.Exl3Tensors, exl3.Exl3Tensors],
    table: ExpertTable,
    precision: Precision,
) -> float:
    """Give the relative RMS error of one expert against float64, over four rows of normal noise."""
    x = np.random.default_rng(1).normal(size=(4, HIDDEN)).astype(np.float32)
    picks, weights = np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32)
    y = pool.experts(x, table, picks, weights, LIMIT, precision=precision)
    expected = exl3.gated_expert(x.astype(np.float64), *expert, LIMIT)
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))


def _time_calls(
    pool: KernelPool, table: ExpertTable, rows: int, precision: Precision, repeats: int
) -> tuple[list[float], list[float]]:
    """Time `repeats` calls after one round through all experts; wall and processor seconds per expert."""
    x = np.random.default_rng(2).normal(size=(rows, HIDDEN)).astype(np.float32)
    weights = np.full((rows, NUM_PICKS), 1 / NUM_PICKS, np.float32)
    wall: list[float] = []
    cpu: list[float] = []
    warm_up = NUM_EXPERTS // NUM_PICKS
    for call in range(warm_up + repeats):
        first = call * NUM_PICKS % NUM_EXPERTS
        picks = np.tile(np.arange(first, first + NUM_PICKS, dtype=np.int32), (rows, 1))
        begin, cpu_begin = time.perf_counter(), time.process_time()
        pool.experts(x, table, picks, weights, LIMIT, precision=precision)
        if call >= warm_up:
            wall.append((time.perf_counter() - begin) / NUM_PICKS)
            cpu.append((time.process_time() - cpu_begin) / NUM_PICKS)
    return wall, cpu


def _measurement(
    pool: KernelPool,
    precision: Precision,
    bits: int,
    rows: int,
    wall: list[float],
    cpu: list[float],
    error: float,
) -> Measurement:
    median_s = statistics.median(wall)
    return Measurement(
        isa=pool.isa.name,
        precision=precision.name,
        bits=bits,
        threads=pool.num_threads,
        rows=rows,
        ms_per_expert=round(median_s * 1e3, 3),
        fastest_ms_per_expert=round(min(wall) * 1e3, 3),
        cpu_ms_per_expert=round(statistics.median(cpu) * 1e3, 3),
        gb_per_s=round(NUM_WEIGHTS * bits / 8 / median_s / 1e9, 2),
        relative_rms_error=float(f"{error:.2e}"),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    model = known.get("model name", platform.processor())
    return f"{model} (family {known.get('cpu family', '?')}, model {known.get('model', '?')})"


def _packed_megabytes(measurements: Sequence[Measurement]) -> float:
    return NUM_EXPERTS * NUM_WEIGHTS * measurements[0].bits / 8 / 1e6


def _report(measurements: list[Measurement], *, as_json: bool) -> None:
    if as_json:
        json.dump(
            {"cpu": _cpu_model(), "measurements": [asdict(m) for m in measurements]}, sys.stdout, indent=2
        )
        print()
        return
    print(f"cpu: {_cpu_model()}; {_packed_megabytes(measurements):.0f} MB of packed weights; medians")
    print("isa      precision  bits  threads  rows  ms/expert  fastest   cpu ms     GB/s     error")
    for m in measurements:
        print(
            f"{m.isa:<8} {m.precision:<9} {m.bits:>5} {m.threads:>8} {m.rows:>5} {m.ms_per_expert:>10.3f} "
            f"{m.fastest_ms_per_expert:>8.3f} {m.cpu_ms_per_expert:>8.3f} {m.gb_per_s:>8.2f} "
            f"{m.relative_rms_error:>9.1e}"
        )


if __name__ == "__main__":
    sys.exit(main())
