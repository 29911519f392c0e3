"""Replay routing traces through an offload policy on a simulated machine. Nothing here is a measurement.

    python -m bench.replay_routing                           the published runs, ours by choices, what-ifs
    python -m bench.replay_routing --policy ours --profile 3090-one-copy --streams 1 4
    python -m bench.replay_routing --policy ours --routes a.npy b.npy     recorded traces, one per stream

Routes are synthetic unless recorded ones are given (bench/synth_routes.py). Columns: share of all distinct
picks served from VRAM, over the link, by the CPU; admissions per token; GB per token by zero-copy reads, by
the copy engine, and read by the CPU; ms per step in which the GPU waits for the CPU; ms per step; tokens/s
in all.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bench.reference_policy import InStepClock
from bench.synth_routes import load_routes, pick_counts
from glm53srv.bench_model.routes import Routes, generate, route_model
from glm53srv.offload.copy_budget import CopyBudget, CopyBudgetParams
from glm53srv.offload.cost import ZERO_COPY_MS, CostModel, CostOverrides, Mode, Parts, cpu_count_table
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.residency_params import ResidencyParams
from glm53srv.offload.simulate.device import SimulatedDevice
from glm53srv.offload.simulate.profile import (
    H200_AS_24GB,
    PROFILES,
    RTX3090_EXACT,
    RTX3090_ONE_COPY,
    RTX3090_SLOW_GATHER,
    RTX3090_TWO_COPIES,
    HardwareProfile,
)
from glm53srv.offload.simulate.replay import OffloadReplay
from glm53srv.offload.simulate.timing import StepTime, StepTimer

PolicyName = Literal["reference", "exact", "in-step", "ours"]

SHIPPED = ResidencyParams()
PLAIN_CLOCK = ResidencyParams(touch_window_steps=2, victim_window=1, min_heat_gain=-2.0)
PUBLISHED_FAST = {1: 28.15, 2: 31.57, 4: 33.98}  # tokens/s, GFO run G067: RTX 3090, two copies
PUBLISHED_ONE_COPY = {1: 22.09, 2: 23.32, 4: 24.64}  # its NVMe code with all experts in RAM, run N137
PUBLISHED_EXACT = {1: 12.57}  # GFO run G066a
OUR_KERNEL = (
    "derived: fast16 on the native layout, 2.61 ms per expert and thread (3.6 GB/s; EPYC family 25 model 17, "
    "shared, `python -m bench.kernels`, Nov 2026), over 22 threads as if they scaled"
)
NUM_PARTS, NUM_LANDING = 16, 16  # of an expert of the published model; what GLM53_EC_LANDING is by default
LIVE_HITS_SLOTS = 720  # so few slots that the published rule hits .36 at one stream, as its live counters say


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the output: a policy on a machine.

    split_counts_vram: the split rule knows that hits take time on the GPU lane. believed_zero_copy_ms: what
    the split rule takes a read in place to cost, None for the truth. mode: of the split under "ours".
    num_parts: by which lanes share an expert under "ours", 1 for whole ones.
    """

    label: str
    policy: PolicyName
    profile: HardwareProfile
    residency: ResidencyParams = SHIPPED
    link_share: float = 0.25
    split_counts_vram: bool = True
    believed_zero_copy_ms: float | None = None
    mode: Mode = "fast"
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the counted steps of one case at one number of streams; see the head of the file."""

    num_streams: int
    hit_share: float
    link_share: float
    cpu_share: float
    copies_per_token: float
    link_gb: float
    copied_gb: float
    cpu_gb: float
    cpu_wait_ms: float
    step_ms: float

    @property
    def tokens_per_s(self) -> float:
        """All streams together."""
        return 1000.0 * self.num_streams / self.step_ms


@dataclass(frozen=True, slots=True)
class Traces:
    """Routes of up to four streams, and how popular experts were in other conversations (for a warm start).

    popularity: float32 (num_keys,), picks per token.
    """

    streams: tuple[Routes, ...]
    popularity: NDArray[np.float32]


def synthetic_traces(num_tokens: int, seed: int = 0, conversation_tokens: int = 2300) -> Traces:
    """Generate four streams and the popularity in twelve other conversations."""
    model = route_model()
    streams = tuple(
        generate(num_tokens, seed=seed + i, model=model, conversation_tokens=conversation_tokens)
        for i in range(4)
    )
    others = generate(3000, seed=seed + 10_000, model=model, conversation_tokens=250)
    return Traces(streams, (pick_counts(others).ravel() / len(others)).astype(np.float32))


def recorded_traces(routes: Sequence[Routes]) -> Traces:
    """Take recorded streams, cut to the shortest; popularity is that of their own first quarter.

    Raises ValueError when their shapes differ.
    """
    if len({r.shape[1:] for r in routes}) != 1:
        raise ValueError("recorded traces must have the same layers and top_k")
    length = min(map(len, routes))
    early = np.concatenate([r[: max(1, length // 4)] for r in routes])
    num_experts = max(ExpertGeometry().num_experts, max(int(r.max()) for r in routes) + 1)
    popularity = (pick_counts(early, num_experts).ravel() / len(early)).astype(np.float32)
    return Traces(tuple(r[:length] for r in routes), popularity)


def replay(case: Case, traces: Traces, num_streams: int, warm_steps: int = 200) -> Outcome:
    """Run one case and return its means after warm_steps."""
    num_layers, top_k = traces.streams[0].shape[1:]
    geometry = ExpertGeometry(num_layers, len(traces.popularity) // num_layers, top_k)
    picks = np.concatenate(traces.streams[:num_streams], axis=2).astype(np.int32)
    timer = StepTimer(case.profile, geometry.expert_bytes)
    run = _replay_ours if case.policy == "ours" else _replay_reference
    counts, times, copies = run(case, traces, picks, timer, geometry)
    total, mean = counts[warm_steps:].sum(axis=0), times[warm_steps:]
    steps = len(mean)
    shares = total / total.sum()
    return Outcome(
        num_streams=num_streams,
        hit_share=float(shares[0]),
        link_share=float(shares[1]),
        cpu_share=float(shares[2]),
        copies_per_token=float(np.mean(copies[warm_steps:])) / num_streams,
        link_gb=sum(t.link_bytes for t in mean) / steps / num_streams / 1e9,
        copied_gb=sum(t.copied_bytes for t in mean) / steps / num_streams / 1e9,
        cpu_gb=sum(t.cpu_bytes for t in mean) / steps / num_streams / 1e9,
        cpu_wait_ms=sum(t.cpu_wait_ms for t in mean) / steps,
        step_ms=sum(t.total_ms for t in mean) / steps,
    )


def _split_costs(case: Case, geometry: ExpertGeometry) -> CostModel:
    costs = CostOverrides(zero_copy_ms=case.believed_zero_copy_ms).apply(
        case.profile.costs(geometry.expert_bytes)
    )
    return costs if case.split_counts_vram else replace(costs, vram_expert_ms=0.0)


def _replay_ours(
    case: Case, traces: Traces, picks: NDArray[np.int32], timer: StepTimer, geometry: ExpertGeometry
) -> tuple[NDArray[np.float64], list[StepTime], list[int]]:
    profile = case.profile
    policy = ResidencyPolicy(geometry, profile.num_slots, case.residency)
    policy.warm_start(np.minimum(traces.popularity, 1.0).astype(np.float32))
    device = SimulatedDevice(geometry, profile.num_slots, timer)
    copy_ms = geometry.expert_bytes / (profile.copy_gb_s * 1e6)
    budget = CopyBudget(CopyBudgetParams(link_share=case.link_share, copy_ms=copy_ms))
    parts = Parts(case.num_parts, NUM_LANDING)
    table = cpu_count_table(_split_costs(case, geometry), picks.shape[2], case.mode, parts)
    loop = OffloadReplay(policy, device, budget, table, case.num_parts)
    loop.fill()
    done = [loop.step(row, picks.shape[2] // geometry.top_k) for row in picks]
    counts = [[s.split.num_hits.sum(), s.split.link_load.sum(), s.split.cpu_load.sum()] for s in done]
    admitted = [s.num_copies + s.num_kept for s in done]
    return np.array(counts, np.float64), [s.time for s in done], admitted


def _replay_reference(
    case: Case, traces: Traces, picks: NDArray[np.int32], timer: StepTimer, geometry: ExpertGeometry
) -> tuple[NDArray[np.float64], list[StepTime], list[int]]:
    mode: Literal["fast", "exact"] = "exact" if case.policy == "exact" else "fast"
    table = cpu_count_table(_split_costs(case, geometry), picks.shape[2], mode)
    guard = case.residency if case.policy == "in-step" else None
    clock = InStepClock(geometry, case.profile.num_slots, table, traces.popularity, guard)
    counts, times, copies = [], [], []
    for row in picks:
        layers = clock.step(row)
        in_vram = layers.num_hits + layers.num_admitted  # a copied expert is then computed from its slot
        streams = picks.shape[2] // geometry.top_k
        times.append(timer.step(in_vram, layers.num_link, layers.num_cpu, streams, 0.0))
        counts.append([layers.num_hits.sum(), layers.num_link.sum(), layers.num_cpu.sum()])
        copies.append(int(layers.num_admitted.sum()))
    return np.array(counts, np.float64), times, copies


def published_cases() -> list[tuple[Case, dict[int, float]]]:
    """Return the runs to reproduce, with their measured tokens/s by streams."""
    two_copies = RTX3090_TWO_COPIES
    few_slots = two_copies.amended("", "hit share of the live counters", {"num_slots": LIVE_HITS_SLOTS})
    return [
        (Case("fast, two copies", "reference", two_copies, split_counts_vram=False), PUBLISHED_FAST),
        (Case("same, hits as live", "reference", few_slots, split_counts_vram=False), PUBLISHED_FAST),
        (Case("exact", "exact", RTX3090_EXACT), PUBLISHED_EXACT),
        (ladder(RTX3090_SLOW_GATHER)[1], PUBLISHED_ONE_COPY),
    ]


def ladder(one_copy: HardwareProfile) -> list[Case]:
    """Return our way from the published rule to the shipped policy on one copy, one choice per line."""
    yielding = one_copy.amended("", "assumed: copies released between layers", {"is_copy_yielding": True})
    fused = yielding.amended("", "assumed: one launch over all experts", {"is_gpu_overlapped": True})
    kernel = fused.amended("", OUR_KERNEL, {"cpu_expert_ms": 0.119})
    coldest = replace(SHIPPED, min_heat_gain=-2.0)
    plain, blind = PLAIN_CLOCK, False
    return [
        Case("published rule, two copies", "reference", RTX3090_TWO_COPIES, split_counts_vram=blind),
        Case(
            "published rule, one copy",
            "reference",
            one_copy,
            split_counts_vram=blind,
            believed_zero_copy_ms=ZERO_COPY_MS,
        ),
        Case("+ costs measured online", "reference", one_copy, split_counts_vram=blind),
        Case("+ copy engine, second touch", "ours", one_copy, plain, split_counts_vram=blind),
        Case("+ split knows VRAM time", "ours", one_copy, plain),
        Case("+ window 8, coldest victim", "ours", one_copy, coldest),
        Case("+ only if hotter by .02", "ours", one_copy),
        Case("+ copies yield to reads", "ours", yielding),
        Case("+ VRAM and link at once", "ours", fused, split_counts_vram=blind),
        Case("+ our CPU kernel, .124 -> .119", "ours", kernel, split_counts_vram=blind),
    ]


def what_ifs() -> list[Case]:
    """Return what the last line of the ladder depends on, and the other machine."""
    best = ladder(RTX3090_ONE_COPY)[-1]
    slow = ladder(RTX3090_SLOW_GATHER)[-1]
    apart = {"is_gpu_overlapped": False, "is_copy_yielding": False}

    def changed(label: str, changes: Mapping[str, object]) -> Case:
        return replace(best, label=label, profile=best.profile.amended("", "what-if", changes))

    live = {"num_slots": LIVE_HITS_SLOTS}
    return [
        changed("CPU expert .150", {"cpu_expert_ms": 0.150}),
        changed("CPU expert .104", {"cpu_expert_ms": 0.104}),
        changed("hand-over .03 ms instead of .11", {"cpu_fixed_ms": 0.03}),
        changed("fixed part 9 / 10.5 / 15 ms", {"fixed_ms": {1: 9.0, 2: 10.5, 4: 15.0}}),
        replace(slow, label="gather 14.5 GB/s"),
        changed("gather 14.5, CPU .104", {"zero_copy_gb_s": 14.5, "cpu_expert_ms": 0.104}),
        replace(best, label="one expert shared by the lanes", num_parts=NUM_PARTS),
        changed("admissions free of charge", {"copy_gb_s": 1e6, "link_gb_s": 1e6}),
        replace(changed("copies do not yield, no overlap", apart), split_counts_vram=True),
        replace(changed("same, decided inside the step", apart), split_counts_vram=True, policy="in-step"),
        replace(changed("all of it, decided in the step", {}), policy="in-step"),
        changed("hits as live", live),
        changed("hits as live, CPU .104", {**live, "cpu_expert_ms": 0.104}),
        changed("hits as live, CPU .104 + .03", {**live, "cpu_expert_ms": 0.104, "cpu_fixed_ms": 0.03}),
        Case("H200 as 24 GB, published rule", "reference", H200_AS_24GB, split_counts_vram=False),
        Case("H200 as 24 GB, ours", "ours", H200_AS_24GB),
        Case("H200 as 24 GB, one shared", "ours", H200_AS_24GB, num_parts=NUM_PARTS),
    ]


def print_head() -> None:
    print(f"{'':31s} C   VRAM  link   CPU  adm/tok  GB/token: link  copy   CPU   wait    step   tok/s")


def print_outcome(label: str, outcome: Outcome, published: float | None = None) -> None:
    """Print one line; published: measured tokens/s to compare with."""
    o = outcome
    line = (
        f"{label:31s} {o.num_streams}  {o.hit_share:5.3f} {o.link_share:5.3f} {o.cpu_share:5.3f}"
        f"  {o.copies_per_token:6.1f}        {o.link_gb:8.3f} {o.copied_gb:5.3f} {o.cpu_gb:5.3f}"
        f"  {o.cpu_wait_ms:5.1f}  {o.step_ms:6.1f}  {o.tokens_per_s:6.2f}"
    )
    if published is not None:
        line += f"   measured {published:.2f}, {100 * (o.tokens_per_s / published - 1):+.1f} %"
    print(line)


def print_story(traces: Traces, streams: Sequence[int]) -> None:
    """Print the published runs, the ladder, and the what-ifs."""
    print("Published runs on a simulated RTX 3090 + EPYC 7443P")
    print_head()
    for case, measured in published_cases():
        for count in measured:
            print_outcome(case.label, replay(case, traces, count), measured[count])
    chapters = (
        ("Ours on one copy, choice by choice: gather as in the two-copy engine", ladder(RTX3090_ONE_COPY)),
        ("The same, gather as in the one-copy engine", ladder(RTX3090_SLOW_GATHER)),
        ("What it depends on", what_ifs()),
    )
    for title, cases in chapters:
        print(f"\n{title}")
        print_head()
        for case in cases:
            for count in streams:
                print_outcome(case.label, replay(case, traces, count))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description="Replay routing traces on a simulated machine.")
    parser.add_argument(
        "--policy", choices=("reference", "exact", "in-step", "ours"), help="one policy instead of the story"
    )
    parser.add_argument("--profile", choices=tuple(PROFILES), default="3090-one-copy")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4], choices=(1, 2, 4))
    parser.add_argument(
        "--tokens", type=int, default=600, help="steps, of which the first 200 are not counted"
    )
    parser.add_argument("--seed", type=int, default=0, help="which conversations are generated")
    parser.add_argument("--conversation-tokens", type=int, default=2300, help="when the topic changes")
    parser.add_argument(
        "--routes", type=Path, nargs="+", help="recorded traces (tokens, layers, top_k), .npy"
    )
    parser.add_argument("--mode", choices=("fast", "exact"), default="fast", help="of our policy's split")
    parser.add_argument(
        "--parts", type=int, default=1, help="equal parts by which link and CPU share an expert; 1: none"
    )
    parser.add_argument("--slots", type=int, help="experts in VRAM instead of the profile's number")
    parser.add_argument("--link-share", type=float, default=0.25, help="part of the link for admissions")
    parser.add_argument("--touch-window", type=int, default=SHIPPED.touch_window_steps, help="steps")
    parser.add_argument("--heat-keep", type=float, default=SHIPPED.heat_keep)
    parser.add_argument("--victim-window", type=int, default=SHIPPED.victim_window)
    parser.add_argument("--min-heat-gain", type=float, default=SHIPPED.min_heat_gain)
    parser.add_argument("--offers", type=int, default=SHIPPED.num_offers, help="slots offered to the link")
    parser.add_argument("--offer-heat-gain", type=float, default=SHIPPED.offer_heat_gain)
    args = parser.parse_args(argv)
    if args.routes:
        traces = recorded_traces([load_routes(path) for path in args.routes])
    else:
        traces = synthetic_traces(args.tokens, args.seed, args.conversation_tokens)
    if args.policy is None:
        print_story(traces, args.streams)
        return 0
    profile = PROFILES[args.profile]
    if args.slots:
        profile = profile.amended(profile.name, "command line", {"num_slots": args.slots})
    params = ResidencyParams(
        touch_window_steps=args.touch_window,
        heat_keep=args.heat_keep,
        victim_window=args.victim_window,
        min_heat_gain=args.min_heat_gain,
        num_offers=args.offers,
        offer_heat_gain=args.offer_heat_gain,
    )
    case = Case(
        f"{args.policy}, {profile.name}",
        args.policy,
        profile,
        params,
        args.link_share,
        mode=args.mode,
        num_parts=args.parts,
    )
    print_head()
    for count in args.streams:
        if count in profile.fixed_ms and count <= len(traces.streams):
            print_outcome(case.label, replay(case, traces, count))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
