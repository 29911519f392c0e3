"""The table of a run, of whatever figures its peers left."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from glm53srv.model.published import PUBLISHED
from glm53srv.model.published_files import published_model
from glm53srv.offload.device.layout import sparse_layers

Results = Mapping[str, Any]

WIDTHS = (1, 2, 4)
_HEAD = (
    "peer",
    *(f"ms x{width}" for width in WIDTHS),
    *(f"tok/s x{width}" for width in WIDTHS),
    "prefill tok/s",
    "first s",
    "open s",
    "RAM GiB",
    "VRAM GiB",
)


def figures(results: Results) -> dict[str, float]:
    """Give the columns of a peer by name; NaN for what it did not come to.

    The best of the long prompts and the median of the short ones: the first of a length may still compile.
    """
    options, facts = results.get("options", {}), results.get("facts", {})
    found = {}
    for width in WIDTHS:
        decode = results.get(f"decode_{width}", {})
        found[f"ms x{width}"] = decode.get("step_ms", math.nan)
        found[f"tok/s x{width}"] = decode.get("tok_s", math.nan)
    prefill_s = results.get("prefill_s")
    tokens = options.get("rounds", {}).get("prefill_tokens", math.nan)
    found["prefill tok/s"] = tokens / min(prefill_s) if prefill_s else math.nan
    first_s = results.get("first_token_s")
    found["first s"] = statistics.median(first_s) if first_s else math.nan
    found["open s"] = results.get("open_s", math.nan)
    found["RAM GiB"] = facts.get("peak_ram_gib", math.nan)
    found["VRAM GiB"] = facts.get("peak_vram_gib", math.nan)
    return found


def render(peers: Mapping[str, Results], layers: int, base: str = "stock") -> str:
    """Write the table: figures as measured, ratios to base, and the extrapolation, named as what it is."""
    columns = {name: figures(results) for name, results in peers.items()}
    rows: list[Sequence[str]] = [_HEAD]
    rows += [(name, *(_number(found[column]) for column in _HEAD[1:])) for name, found in columns.items()]
    lines = [f"as measured, {layers} of {PUBLISHED.num_layers} layers:", *_align(rows)]
    if base in columns:
        lines += ["", *_ratios(columns, base)]
    lines += ["", *_extrapolation(columns, layers)]
    return "\n".join(lines)


def _ratios(columns: Mapping[str, Mapping[str, float]], base: str) -> list[str]:
    shown = [f"tok/s x{width}" for width in WIDTHS] + ["prefill tok/s"]
    lines = []
    for name, found in columns.items():
        if name != base:
            parts = (f"{column} {_number(found[column] / columns[base][column])}" for column in shown)
            lines.append(f"{name} / {base}: {', '.join(parts)}")
    return lines


def _extrapolation(columns: Mapping[str, Mapping[str, float]], layers: int) -> list[str]:
    """Scale decode by the sparse layers, which are nearly all of a step."""
    whole, cut = len(sparse_layers(PUBLISHED)), len(sparse_layers(published_model(layers)))
    factor = whole / cut
    if factor == 1:
        return []
    lines = [f"times {factor:.2f} ({whole} sparse layers for {cut}), an extrapolation and no measurement:"]
    for name, found in columns.items():
        parts = (f"x{width} {_number(found[f'tok/s x{width}'] / factor)}" for width in WIDTHS)
        prefill = _number(found["prefill tok/s"] / factor)
        lines.append(f"  {name}: tok/s {', '.join(parts)}, prefill {prefill}")
    return lines


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
