"""The parts of a step are told by kernels' names and places, idle time by what lies between them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.errors import BadInput
from bench.profile import TO_HOST, Event, cut_steps, main, pack_lanes, read_events, summarize, times_alone

LAYER = (
    ("gdn_ba_gemv_kernel", 4.0),
    ("void exl3_gemv_int8_sq_kernel<5, 1>", 10.0),
    ("plan_layer", 2.0),
    ("exl3_moe_coop_a_kernel<5>", 6.0),
    ("exl3_moe_coop_b_kernel<5>", 3.0),
    ("exl3_moe_coop_a_kernel<3>", 40.0),
    ("exl3_moe_coop_b_kernel<3>", 20.0),
    ("add_partial", 5.0),
    ("void hc_apply_kernel<4>", 1.0),
)
HOST_GAP, SMALL_GAP = 500.0, 1.0
LOGITS, LOG = f"{TO_HOST} (Device -> Pinned)", f"{TO_HOST} (Device -> Pinned) of the log"
NUM_BYTES = {LOGITS: 619520, LOG: 5376}


def kernel(name: str, begin: float, length: float, stream: int = 7) -> dict[str, Any]:
    category = "gpu_memcpy" if "Memcpy" in name else "kernel"
    arguments = {"stream": stream} | ({"bytes": NUM_BYTES[name]} if name in NUM_BYTES else {})
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "args": arguments}


def make_trace(
    num_steps: int, layer: tuple[tuple[str, float], ...] = LAYER, num_layers: int = 6
) -> list[Any]:
    """Lay steps one behind the other: a gap of the host's, layers, head, logits."""
    events: list[Any] = [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add"},
    ]
    now = 1000.0
    for _ in range(num_steps):
        now += HOST_GAP
        events.append(kernel("Memcpy HtoD (Pinned -> Device)", now, 30.0, stream=139))
        for name, length in (*(layer * num_layers), ("exl3_gemv_int8_sq_kernel<6>", 100.0), (LOGITS, 15.0)):
            events.append(kernel(name, now, length))
            now += length + SMALL_GAP
        now -= SMALL_GAP
    return events


def write(path: Path, events: list[Any]) -> Path:
    text = json.dumps({"traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_time_goes_to_the_parts_that_kernels_belong_to(tmp_path: Path, name: str) -> None:
    steps = cut_steps(read_events(write(tmp_path / name, make_trace(4))))
    assert len(steps) == 3
    span, rows = summarize(steps)
    found = {row.part: row for row in rows}
    expected = {
        "routed experts": (6 * 60.0, 12),
        "shared expert": (6 * 9.0, 12),
        "wait for the CPU, add its part": (6 * 5.0, 6),
        "router, plan": (6 * 2.0, 6),
        "linear attention": (6 * 4.0, 6),
        "other products": (6 * 10.0, 6),
        "head": (100.0, 1),
        "hyper-connections, norms": (6 * 1.0, 6),
        "copies": (30.0 + 15.0, 2),
    }
    for part, (microseconds, count) in expected.items():
        assert found[part].ms == pytest.approx(microseconds / 1e3)
        assert found[part].count == count
    assert found["idle: the host, between steps"].ms == pytest.approx(HOST_GAP / 1e3)
    launches = 6 * len(LAYER) + 2
    assert found["idle: between two kernels"].ms == pytest.approx((launches - 1) * SMALL_GAP / 1e3, rel=0.2)
    assert span == pytest.approx((HOST_GAP + 6 * 91.0 + 115.0 + (launches - 1) * SMALL_GAP) / 1e3, rel=1e-3)
    assert [row.ms for row in rows] == sorted((row.ms for row in rows), reverse=True)


def test_smaller_copies_to_the_host_end_no_step(tmp_path: Path) -> None:
    layer = (("plan_layer", 2.0), (LOG, 3.0), ("exl3_moe_coop_a_kernel<3>", 40.0))
    steps = cut_steps(read_events(write(tmp_path / "t.json", make_trace(4, layer))))
    assert [sum(event.name == LOG for event in step) for step in steps] == [6, 6, 6]
    assert all(step[-1].name == LOGITS for step in steps)


def test_one_launch_of_experts_behind_a_plan_is_the_routed_ones(tmp_path: Path) -> None:
    layer = tuple(each for each in LAYER if "<5>" not in each[0])  # the shared expert runs elsewhere
    _, rows = summarize(cut_steps(read_events(write(tmp_path / "t.json", make_trace(3, layer)))))
    found = {row.part: row.ms for row in rows}
    assert "shared expert" not in found
    assert found["routed experts"] == pytest.approx(0.36)


def experts(bits: int, gate: float, down: float) -> tuple[tuple[str, float], ...]:
    """Give the kernels of a launch for several rows."""
    return (
        ("exl3_moe_coop_rot_kernel", 1.0),
        (f"exl3_moe_coop_a_kernel<{bits}>", gate),
        (f"exl3_moe_coop_b_kernel<{bits}>", down),
    )


@pytest.mark.parametrize("bits", [5, 3])
def test_launches_that_overlap_are_told_apart_by_their_streams(tmp_path: Path, bits: int) -> None:
    events = [kernel(LOGITS, 0.0, 1.0)]
    for step in range(3):
        begin = 1000.0 * (step + 1)
        events += [
            kernel("plan_layer", begin, 1.0),
            kernel("exl3_moe_coop_a_kernel<3>", begin + 10, 50.0, stream=20),
            kernel(f"exl3_moe_coop_a_kernel<{bits}>", begin + 20, 7.0, stream=21),
            kernel("exl3_moe_coop_b_kernel<3>", begin + 60, 30.0, stream=20),
            kernel(f"exl3_moe_coop_b_kernel<{bits}>", begin + 70, 4.0, stream=21),
            kernel("exl3_moe_coop_a_kernel<3>", begin + 100, 12.0, stream=20),
            kernel("exl3_moe_coop_b_kernel<3>", begin + 112, 6.0, stream=20),
            kernel(LOGITS, begin + 200, 1.0),
        ]
    _, rows = summarize(cut_steps(read_events(write(tmp_path / "t.json", events))))
    found = {row.part: round(row.ms * 1e3) for row in rows}
    assert found["experts in VRAM, before"] == 80
    assert (found["shared expert"], found["routed experts"]) == (11, 18)


@pytest.mark.parametrize("has_shared", [True, False])
def test_experts_in_vram_are_the_launch_in_front_of_the_last(tmp_path: Path, has_shared: bool) -> None:
    early, late, shared = experts(3, 30.0, 9.0), experts(3, 12.0, 6.0), experts(5, 5.0, 2.0)
    layer = (("plan_layer", 2.0), *(shared if has_shared else ()), *early, *late)
    _, rows = summarize(cut_steps(read_events(write(tmp_path / "t.json", make_trace(4, layer)))))
    found = {row.part: (row.ms, row.count) for row in rows}
    assert found["experts in VRAM, before"] == pytest.approx((6 * 40e-3, 18))
    assert found["routed experts"] == pytest.approx((6 * 19e-3, 18))
    assert ("shared expert" in found) == has_shared
    if has_shared:
        assert found["shared expert"] == pytest.approx((6 * 8e-3, 18))


def test_what_runs_beside_other_parts_is_not_alone() -> None:
    def event(part: str, begin: float, end: float) -> Event:
        return Event("kernel", begin, end, 7, part)

    step = [
        *(event("link", 0, 100), event("experts", 10, 40), event("experts", 30, 60)),
        *(event("experts", 100, 130), event("others", 120, 125)),
    ]
    assert times_alone(step) == {"link": 10 + 40, "experts": 20 + 5}
    beside = [*step, event("copies", 5, 140)]  # in nobody's way
    assert times_alone(beside) == {"link": 10 + 40, "experts": 20 + 5, "copies": 10}


def test_the_picture_is_svg_with_lanes_for_the_gpu_and_for_the_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, picture = write(tmp_path / "t.json", make_trace(5)), tmp_path / "lanes.svg"
    assert main([str(trace), "--svg", str(picture), "--title", "15 layers & <more>"]) == 0
    assert "4 steps of" not in capsys.readouterr().out.splitlines()[-1]
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    texts = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert "15 layers & <more>" in texts
    assert texts.count("GPU") == texts.count("link") == 2
    assert "routed experts" in texts


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no json", "no trace of torch's profiler"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}', "has no device events"),
        ('{"other": 1}', "no trace of torch's profiler"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BadInput, match=reason):
        read_events(path)


def test_a_trace_of_too_few_steps_is_refused(tmp_path: Path) -> None:
    steps = cut_steps(read_events(write(tmp_path / "t.json", make_trace(2))))
    with pytest.raises(BadInput, match="fewer than three"):
        summarize(steps)


def test_lanes_hold_what_does_not_overlap_whatever_the_streams() -> None:
    def event(part: str, begin: float, end: float, stream: int) -> Event:
        return Event(part, begin, end, stream, part)

    step = [
        event("other products", 0, 10, 1),
        event("other products", 9.5, 20, 2),  # a microsecond is no overlap
        event("guesses", 4, 8, 3),
        event("experts on the link", 2, 30, 4),
        event("copies", 30, 40, 1),
    ]
    lanes = pack_lanes(step)
    assert [(name, [each.begin for each in events]) for name, events in lanes] == [
        ("GPU", [0, 9.5]),
        ("GPU, beside", [4]),
        ("link", [2, 30]),
    ]
