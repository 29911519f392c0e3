"""Say where a decode step's time goes, part by part, from a trace of the GPU, and draw one step's lanes.

    python -m bench.cuda.profile_step --mode fast --layers 15 --out trace      on the GPU machine
    python -m bench.profile trace.decode_of_1.json.gz --svg lanes.svg          anywhere

Reads a Chrome trace as torch's profiler writes it, device events only; needs the Python standard library.
Steps are told apart by the copy of the logits to the host, the largest of those. A part's time is that of its
kernels; `alone` is what of it no kernel of another part ran beside, `share` that of the step. The copy engine
is in no kernel's way: its copies are alone where no kernel ran. When nothing ran on the GPU it was idle:
between steps for the host, within one between two kernels. Up to three launches of experts stand behind a
layer's plan: the shared expert and, in fast mode, those in VRAM, then the others. Those in VRAM run the
kernels of the others; a shared expert that does, too, is the second of the two.
"""

from __future__ import annotations

import argparse
import gzip
import html
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    # In place of bench/, whose profile.py hides Python's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.errors import BadInput
from bench.report import run_command

TOOL = "profile"
ROUTED, EARLY, SHARED, IDLE = "routed experts", "experts in VRAM, before", "shared expert", "idle"
COPIES = "copies"
PARTS: tuple[tuple[str, str, str], ...] = (
    (ROUTED, r"exl3_moe", "#c0392b"),
    (EARLY, r"(?!)", "#e6b0aa"),  # by their places, see _name_parts
    (SHARED, r"(?!)", "#e59866"),
    ("experts on the link", r"gather_experts", "#e67e22"),
    ("guesses, orders, waits for them", r"score_experts|list_experts|choose_experts|_order", "#d35400"),
    ("wait for the CPU, add its part", r"add_partial|await_answer", "#8e44ad"),
    ("router, plan", r"routing_|plan_layer", "#f1c40f"),
    ("latent attention", r"_mla_|_dsa_", "#16a085"),
    ("linear attention", r"gdn_|kda_|conv1d|recurrent|gated_rms_norm", "#2ecc71"),
    ("hyper-connections, norms", r"hc_|rms_norm", "#7f8c8d"),
    ("head", r"(?!)", "#34495e"),  # the last product of a step
    ("other products", r"gemv|gemm|nvjet|splitK|cublas|cutlass", "#2980b9"),
    (COPIES, r"Memcpy|Memset", "#95a5a6"),
    ("other kernels", r"", "#bdc3c7"),
)
"""Name, kernels, colour; the first that matches counts."""
COLOURS = {name: colour for name, _, colour in PARTS}
LINK_PARTS = ("experts on the link", COPIES)
TO_HOST = "Memcpy DtoH"
DOWN = "coop_b_kernel"
OVERLAP_US = 1.0
"""By which one kernel may begin before the one before it has ended, in one lane."""
SMALL_GAP_US = 20.0
WIDTH, LEFT, LANE = 1180, 110, 34


@dataclass(frozen=True, slots=True)
class Event:
    """Something on the device; times in microseconds from the trace's first event."""

    name: str
    begin: float
    end: float
    stream: int
    part: str = ""
    num_bytes: int = 0


def read_events(path: Path) -> list[Event]:
    """Read the device's events of a trace, in order. Raises BadInput for what is no such trace."""
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            items = json.load(file)["traceEvents"]
        found = [
            Event(
                str(item["name"]),
                float(item["ts"]),
                float(item["ts"]) + float(item["dur"]),
                _number(item, "stream"),
                num_bytes=_number(item, "bytes"),
            )
            for item in items
            if item.get("ph") == "X" and item.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: no trace of torch's profiler ({type(error).__name__}: {error})") from error
    if not found:
        raise BadInput(f"{path}: the trace has no device events")
    found.sort(key=lambda event: event.begin)
    first = found[0].begin
    return [replace(each, begin=each.begin - first, end=each.end - first) for each in found]


def _number(item: dict[str, object], name: str) -> int:
    arguments = item.get("args")
    return int(arguments.get(name, 0)) if isinstance(arguments, dict) else 0


def cut_steps(events: Sequence[Event]) -> list[list[Event]]:
    """Give the events of each whole step, from behind one copy of logits to the next, parts named."""
    copies = [index for index, event in enumerate(events) if event.name.startswith(TO_HOST)]
    most = max((events[index].num_bytes for index in copies), default=0)
    ends = [index for index in copies if events[index].num_bytes == most]
    return [_name_parts(events[begin + 1 : end + 1]) for begin, end in itertools.pairwise(ends)]


def _cut_launches(step: Sequence[Event], experts: Sequence[int]) -> list[list[int]]:
    """Group the experts' kernels behind a plan by launches, in the order in which these begin: on one stream
    one behind the other, the last of each a DOWN kernel. Launches on several streams overlap."""
    open_ones: dict[int, list[int]] = {}
    closed = []
    for index in experts:
        launch = open_ones.setdefault(step[index].stream, [])
        launch.append(index)
        if DOWN in step[index].name:
            closed.append(open_ones.pop(step[index].stream))
    return sorted(closed)


def _name_parts(step: Sequence[Event]) -> list[Event]:
    """Name each event's part, of experts by their launches behind one plan."""
    names = [next(name for name, kernels, _ in PARTS if re.search(kernels, event.name)) for event in step]
    plans = [index for index, event in enumerate(step) if "plan_layer" in event.name]
    for begin, end in zip(plans, [*plans[1:], len(step)], strict=True):
        experts = [index for index in range(begin, end) if names[index] == ROUTED]
        launches = _cut_launches(step, experts)
        kinds = {ROUTED}
        for launch in launches[:-1]:
            is_same = step[launch[-1]].name == step[launches[-1][-1]].name
            kind = EARLY if is_same and EARLY not in kinds else SHARED
            kinds.add(kind)
            for index in launch:
                names[index] = kind
    products = [index for index, name in enumerate(names) if name == "other products"]
    if products:
        names[products[-1]] = "head"
    return [replace(event, part=name) for event, name in zip(step, names, strict=True)]


def idle_times(step: Sequence[Event], begin: float) -> tuple[float, float]:
    """Give a step's idle microseconds: before its first kernels and in long gaps, and between kernels.

    begin: when the step before ended.
    """
    long, short, last = 0.0, 0.0, begin
    for event in sorted(step, key=lambda each: each.begin):
        gap = event.begin - last
        if gap > SMALL_GAP_US:
            long += gap
        elif gap > 0:
            short += gap
        last = max(last, event.end)
    return long, short


def times_alone(step: Sequence[Event]) -> dict[str, float]:
    """Give each part's microseconds in which kernels of no other part ran; copies are no kernels."""
    found = _times_alone([event for event in step if event.part != COPIES])
    copied = _times_alone(step).get(COPIES)
    return found if copied is None else found | {COPIES: copied}


def _times_alone(step: Sequence[Event]) -> dict[str, float]:
    changes = sorted(
        (at, sign, event.part) for event in step for at, sign in ((event.begin, 1), (event.end, -1))
    )
    running: dict[str, int] = {}
    found: dict[str, float] = {}
    last = 0.0
    for at, sign, part in changes:
        if len(running) == 1:
            (only,) = running
            found[only] = found.get(only, 0.0) + at - last
        running[part] = running.get(part, 0) + sign
        if not running[part]:
            del running[part]
        last = at
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. ms: median over the steps; count: kernels or copies a step; alone_ms: while no
    kernel of another part ran."""

    part: str
    ms: float
    count: float
    alone_ms: float = 0.0


def summarize(steps: Sequence[Sequence[Event]]) -> tuple[float, list[Row]]:
    """Give the median step in ms and the time by part, the largest first. Steps follow one another."""
    if len(steps) < 2:
        raise BadInput("the trace has fewer than three decode steps")
    timed = steps[1:]  # the first has no step before it to measure its gap from
    begins = [step[-1].end for step in steps[:-1]]
    spans = [(step[-1].end - begin) / 1e3 for step, begin in zip(timed, begins, strict=True)]
    rows = []
    alone = [times_alone(step) for step in timed]
    for part, _, _ in PARTS:
        own = [[event for event in step if event.part == part] for step in timed]
        if any(own):
            times = [sum(event.end - event.begin for event in events) / 1e3 for events in own]
            alone_ms = statistics.median(each.get(part, 0.0) for each in alone) / 1e3
            rows.append(Row(part, statistics.median(times), statistics.fmean(map(len, own)), alone_ms))
    gaps = [idle_times(step, begin) for step, begin in zip(timed, begins, strict=True)]
    for number, reason in enumerate(("the host, between steps", "between two kernels")):
        ms = statistics.median(gap[number] for gap in gaps) / 1e3
        rows.append(Row(f"{IDLE}: {reason}", ms, 0, ms))
    return statistics.median(spans), sorted(rows, key=lambda row: -row.ms)


def draw(step: Sequence[Event], begin: float, title: str) -> str:
    """Draw a step as SVG: all of it, and its middle four experts' layers enlarged."""
    plans = [event.begin for event in step if "plan_layer" in event.name]
    middle = max(0, len(plans) // 2 - 2)
    near = (
        (plans[middle], plans[min(len(plans) - 1, middle + 4)]) if len(plans) > 4 else (begin, step[-1].end)
    )
    lanes = pack_lanes(step)
    parts = [name for name, _, _ in PARTS if any(event.part == name for event in step)]
    height = 60 + 2 * (len(lanes) * LANE + 56) + 22 * (len(parts) // 5 + 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LEFT + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="10" y="20" font-size="14">{html.escape(title)}</text>',
    ]
    top = 34.0
    for label, low, high in (("one step", begin, step[-1].end), ("four layers", *near)):
        lines.append(f'<text x="10" y="{top + 14}">{label}</text>')
        for lane, (name, events) in enumerate(lanes):
            y = top + 20 + lane * LANE
            lines.append(f'<text x="10" y="{y + 17}">{name}</text>')
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{LANE - 8}" fill="#f4f4f4"/>')
            lines += _boxes(events, low, high, y)
        axis = top + 20 + len(lanes) * LANE + 8
        lines += _axis(low, high, axis)
        top = axis + 22
    for index, part in enumerate(parts):
        x, y = 10 + index % 5 * 250, top + 12 + index // 5 * 22
        lines.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[part]}"/>')
        lines.append(f'<text x="{x + 18}" y="{y}">{html.escape(part)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def pack_lanes(step: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Share a step's events out to lanes in which none overlaps another: name and events of each.

    What travels over the link has lanes of its own. Not by stream: a graph's kernels run on dozens of them.
    """
    found = []
    for name, is_link in (("GPU", False), ("link", True)):
        lanes: list[list[Event]] = []
        for event in sorted(step, key=lambda each: each.begin):
            if (event.part in LINK_PARTS) != is_link:
                continue
            free = next((lane for lane in lanes if lane[-1].end <= event.begin + OVERLAP_US), None)
            if free is None:
                lanes.append([event])
            else:
                free.append(event)
        found += [(name if number == 0 else f"{name}, beside", lane) for number, lane in enumerate(lanes)]
    return found


def _boxes(events: Iterable[Event], low: float, high: float, y: float) -> list[str]:
    boxes = []
    for event in events:
        begin, end = max(event.begin, low), min(event.end, high)
        if end <= begin:
            continue
        x = LEFT + (begin - low) / (high - low) * WIDTH
        width = max(0.4, (end - begin) / (high - low) * WIDTH)
        boxes.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 8}" fill="{COLOURS[event.part]}">'
            f"<title>{html.escape(event.name[:60])}, {event.end - event.begin:.1f} us</title></rect>"
        )
    return boxes


def _axis(low: float, high: float, y: float) -> list[str]:
    step = next(each for each in (50, 100, 200, 500, 1000, 2000, 5000, 10000) if (high - low) / each <= 12)
    return [
        f'<text x="{LEFT + at / (high - low) * WIDTH:.0f}" y="{y + 6}" fill="#555">{at / 1000:g} ms</text>'
        for at in range(0, int(high - low) + 1, step)
    ]


def main(argv: Sequence[str]) -> int:
    """Print the table; draw if asked."""
    parser = argparse.ArgumentParser(
        prog=f"python3 -m bench.{TOOL}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="a .json or .json.gz of decode steps")
    parser.add_argument("--svg", type=Path, help="picture of a step to write")
    parser.add_argument("--title", default="a decode step", help="what the picture is of")
    given = parser.parse_args(list(argv))
    steps = cut_steps(read_events(given.trace))
    span, rows = summarize(steps)
    print(f"{len(steps) - 1} steps of {span:.2f} ms (median)")
    print(f"{'part':34s} {'ms':>7s} {'alone':>7s} {'share':>6s} {'launches':>9s}")
    for row in rows:
        count = f"{row.count:9.1f}" if row.count else " " * 9
        print(f"{row.part:34s} {row.ms:7.3f} {row.alone_ms:7.3f} {row.alone_ms / span:6.1%} {count}")
    together = span - sum(row.alone_ms for row in rows)
    print(f"{'several at once':34s} {'':7s} {together:7.3f} {together / span:6.1%}")
    if given.svg is not None:
        # the one with most lanes: not every step copies experts
        number = max(range(1, len(steps)), key=lambda each: len({event.stream for event in steps[each]}))
        picture = draw(steps[number], steps[number - 1][-1].end, given.title)
        given.svg.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
