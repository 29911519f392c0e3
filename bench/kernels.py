"""`python -m bench.kernels`: time the gated expert of GLM-5.3-Flash (4096 x 2048 x 3, mul1; K = 3 unless
--bits says otherwise), check its error.

Weights come from DRAM: the picks walk through enough distinct experts that no cache holds them. 300 MB are
enough for a desktop; give --set-mb several times what a server has of L3. One call computes one row with 8
picks, as one decode step of one stream does; the time is that of the call divided by 8.

With several instruction sets (--isa AVX512 AMX) they take turns, so that a machine whose speed wanders treats
them alike. --check first compares the bits of all instruction sets there are, in the precision (fast16) and
the shapes in which they must be equal, and ends with status 1 if they are not.

    python -m bench.kernels --check --isa AVX512 AMX --precision FAST16 --threads 1 8 14 --rows 1 2 4 \\
        --set-mb 1500 --repeats 20
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.same_bits import compare_bits
from glm53srv.kernels import Codebook, Exl3Matrix, ExpertTable, Isa, KernelPool, Precision, cpu_features
from reference import exl3

HIDDEN, INTERMEDIATE, LIMIT = 4096, 2048, 10.0
NUM_PICKS = 8
NUM_WEIGHTS = 3 * HIDDEN * INTERMEDIATE
SET_MB = 370
"""Of packed weights, by default: 40 experts of K = 3."""
TURNS = 4


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


Tensors = tuple[exl3.Exl3Tensors, exl3.Exl3Tensors, exl3.Exl3Tensors]


@dataclass(slots=True)
class Walk:
    """Takes the experts in turn, so that each comes back cold; one for all calls of a run."""

    table: ExpertTable
    num_experts: int
    next_expert: int = 0

    def picks(self, rows: int) -> NDArray[np.int32]:
        """Give the next NUM_PICKS experts, for rows that share them."""
        first = self.next_expert
        self.next_expert = (first + NUM_PICKS) % self.num_experts
        return np.tile(np.arange(first, first + NUM_PICKS, dtype=np.int32), (rows, 1))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    if arguments.check and not _check(arguments.bits, max(arguments.threads)):
        return 1
    experts = _random_experts(arguments.bits, arguments.set_mb)
    table = ExpertTable([(_as_matrix(gate), _as_matrix(up), _as_matrix(down)) for gate, up, down in experts])
    walk = Walk(table, len(experts))
    measurements = []
    for num_threads in arguments.threads:
        with contextlib.ExitStack() as stack:
            pools = [stack.enter_context(KernelPool(num_threads, Isa[name])) for name in arguments.isa]
            for precision in (Precision[name] for name in arguments.precision):
                errors = [_relative_error(pool, experts[0], table, precision) for pool in pools]
                for rows in arguments.rows:
                    times = _time_in_turns(pools, walk, rows, precision, arguments.repeats)
                    measurements += [
                        _measurement(pool, precision, arguments.bits, rows, wall, cpu, error)
                        for pool, (wall, cpu), error in zip(pools, times, errors, strict=True)
                    ]
    _report(measurements, len(experts), as_json=arguments.json)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="rows that share their picks")
    parser.add_argument("--isa", choices=[isa.name for isa in Isa], nargs="+", default=[Isa.AUTO.name])
    names = [precision.name for precision in Precision]
    parser.add_argument("--precision", choices=names, nargs="+", default=names)
    parser.add_argument("--bits", type=int, choices=range(1, 9), default=3, help="bits per weight, K")
    parser.add_argument("--set-mb", type=int, default=SET_MB, help=f"packed weights, MB (default {SET_MB})")
    parser.add_argument("--repeats", type=int, default=24, help="calls timed for each line")
    parser.add_argument("--check", action="store_true", help="compare the instruction sets' bits first")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


def _check(bits: int, num_threads: int) -> bool:
    isas = [isa for isa in cpu_features().isas if isa >= Isa.AVX2]
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(KernelPool(num_threads, isa)) for isa in isas]
        num_products, wrong = compare_bits(pools, bits)
    names = ", ".join(isa.name for isa in isas)
    for each in wrong:
        print(f"check: not the bits of AVX2: {each}", file=sys.stderr)
    if not wrong:
        print(f"check: {names} give the same bits in {num_products} products", file=sys.stderr)
    return not wrong


def _random_experts(bits: int, set_mb: int) -> list[Tensors]:
    """Make experts of at least set_mb MB together, and so many that whole calls walk through them."""
    rng = np.random.default_rng(0)
    shapes = ((HIDDEN, INTERMEDIATE), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN))

    def expert() -> Tensors:
        gate, up, down = (exl3.random_tensors(rng, *shape, bits, "mul1") for shape in shapes)
        return gate, up, down

    num_calls = math.ceil(set_mb * 1e6 / (NUM_WEIGHTS * bits / 8) / NUM_PICKS)
    return [expert() for _ in range(max(1, num_calls) * NUM_PICKS)]


def _as_matrix(tensors: exl3.Exl3Tensors) -> Exl3Matrix:
    return Exl3Matrix(tensors.trellis, tensors.suh, tensors.svh, Codebook.MUL1)


def _relative_error(pool: KernelPool, expert: Tensors, table: ExpertTable, precision: Precision) -> float:
    """Give the relative RMS error of one expert against float64, over four rows of normal noise."""
    x = np.random.default_rng(1).normal(size=(4, HIDDEN)).astype(np.float32)
    picks, weights = np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32)
    y = pool.experts(x, table, picks, weights, LIMIT, precision=precision)
    expected = exl3.gated_expert(x.astype(np.float64), *expert, LIMIT)
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))


def _time_in_turns(
    pools: Sequence[KernelPool], walk: Walk, rows: int, precision: Precision, repeats: int
) -> list[tuple[list[float], list[float]]]:
    """Time `repeats` calls of each pool; wall and processor seconds per expert, by pool.

    The first call of a turn is not counted: it wakes the workers, and the first of all sizes their memory.
    """
    x = np.random.default_rng(2).normal(size=(rows, HIDDEN)).astype(np.float32)
    weights = np.full((rows, NUM_PICKS), 1 / NUM_PICKS, np.float32)
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in pools]
    for turn in range(TURNS):
        for pool, (wall, cpu) in zip(pools, times, strict=True):
            num_calls = repeats * (turn + 1) // TURNS - len(wall)
            for call in range(1 + num_calls):
                picks = walk.picks(rows)
                begin, cpu_begin = time.perf_counter(), time.process_time()
                pool.experts(x, walk.table, picks, weights, LIMIT, precision=precision)
                if call:
                    wall.append((time.perf_counter() - begin) / NUM_PICKS)
                    cpu.append((time.process_time() - cpu_begin) / NUM_PICKS)
    return times


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


def _report(measurements: list[Measurement], num_experts: int, *, as_json: bool) -> None:
    if as_json:
        json.dump(
            {"cpu": _cpu_model(), "measurements": [asdict(m) for m in measurements]}, sys.stdout, indent=2
        )
        print()
        return
    packed_mb = num_experts * NUM_WEIGHTS * measurements[0].bits / 8 / 1e6
    print(f"cpu: {_cpu_model()}; {packed_mb:.0f} MB of packed weights; medians")
    print("isa      precision  bits  threads  rows  ms/expert  fastest   cpu ms     GB/s     error")
    for m in measurements:
        print(
            f"{m.isa:<8} {m.precision:<9} {m.bits:>5} {m.threads:>8} {m.rows:>5} {m.ms_per_expert:>10.3f} "
            f"{m.fastest_ms_per_expert:>8.3f} {m.cpu_ms_per_expert:>8.3f} {m.gb_per_s:>8.2f} "
            f"{m.relative_rms_error:>9.1e}"
        )


if __name__ == "__main__":
    sys.exit(main())
