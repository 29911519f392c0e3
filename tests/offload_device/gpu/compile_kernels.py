"""Compiles every kernel for one architecture, at the published model's sizes; prints what came out as JSON.

python -m tests.offload_device.gpu.compile_kernels 86
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from glm53srv.model.checkpoint import CodebookName
from glm53srv.offload.device.gpu.combine_kernel import BLOCK as COMBINE_BLOCK
from glm53srv.offload.device.gpu.combine_kernel import add_partial, await_answer
from glm53srv.offload.device.gpu.copy_kernel import NO_CUT, USUAL, gather_experts
from glm53srv.offload.device.gpu.guess_kernel import (
    INPUTS,
    SCORED,
    choose_experts,
    list_experts,
    score_experts,
)
from glm53srv.offload.device.gpu.host_reader import BLOCK as FETCH_BLOCK
from glm53srv.offload.device.gpu.host_reader import fetch_words
from glm53srv.offload.device.gpu.launch import UNIT_BYTES, WORD_BYTES, cut_of
from glm53srv.offload.device.gpu.order_kernel import MOST_POLLS, await_order, post_order
from glm53srv.offload.device.gpu.plan_kernel import plan_layer
from glm53srv.offload.device.gpu.point_kernel import point_layer
from glm53srv.offload.device.gpu.table_kernel import BLOCK as TABLE_BLOCK
from glm53srv.offload.device.gpu.table_kernel import apply_update
from glm53srv.offload.device.layout import RecordLayout

RECORD = {"record_bytes": 9_437_184, "up_offset": 3_145_728, "down_offset": 6_291_456}
TABLES = {"gate_table": "*i64", "up_table": "*i64", "down_table": "*i64"}

PLAN = {
    "picks": "*i64",
    "weights": "*fp16",
    "hit_weights": "*fp16",
    "x": "*fp16",
    "slots": "*i32",
    "heat": "*i32",
    "cpu_count": "*i32",
    "slot_addresses": "*i64",
    **TABLES,
    "scale_table": "*i64",
    "own_scales": "*i64",
    "log_picks": "*i32",
    "log_lanes": "*i8",
    "counts": "*i32",
    "gather_sources": "*i64",
    "gather_targets": "*i64",
    "gather_count": "*i32",
    "gather_skips": "*i32",
    "gather_mask": "*i64",
    "offers": "*i32",
    "offer_head": "*i32",
    "log_kept": "*i32",
    "first_seq": "*i32",
    "fence": "*i32",
    "ahead_experts": "*i64",
    "ahead_count": "*i32",
    "keep_sources": "*i64",
    "keep_targets": "*i64",
    "keep_count": "*i32",
    "ahead_told": "*i32",
    "home": "i64",
    "landing": "i64",
    "num_landing": "i32",
    "masked_scales": "i64",
    "ring": "i64",
    "layer": "i32",
    "rows": "i32",
    "num_picks": "i32",
    "side": "i32",
    "ahead_buffer": "i64",
}
PLAN_CONSTANTS = {
    **RECORD,
    "weights_offset": 384,
    "x_offset": 512,
    "num_cells": 64,
    "cell_bytes": 131_072,
    "hidden": 4096,
    "top_k": 8,
    "width": 32,
    "num_parts": 16,
    "part_blocks": 1,
}
PLANS = {
    "fast": {"has_cpu": True, "has_hits": True},
    "fast, one launch": {"has_cpu": True, "has_hits": False},
    "exact": {"has_cpu": False, "has_hits": False},
}

LAYOUT = RecordLayout(4096, 2048, (48, 48, 48), CodebookName.MUL1)
GATHER = {
    "sources": "*i64",
    "targets": "*i64",
    "count": "*i32",
    "skips": "*i32",
    "scales": "*fp16",
    "mask": "*i64",
}
GATHER_CONSTANTS = {
    "words": LAYOUT.record_bytes // 8,
    "num_programs": USUAL.programs,
    "items": USUAL.items,
    "num_scales": LAYOUT.intermediate,
    "unit_words": UNIT_BYTES // WORD_BYTES,
}

KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    **{
        f"plan_layer {mode}{ending}": (
            plan_layer,
            PLAN,
            {**PLAN_CONSTANTS, **kind, "has_clock": True, "has_ahead": bool(ending)},
        )
        for mode, kind in PLANS.items()
        for ending in ("", ", ahead")
    },
    "score_experts": (
        score_experts,
        {
            "x": "*fp16",
            "gate": "*fp16",
            "sums": "*fp32",
            "num_experts": "i32",
            "input_stride": "i32",
            "expert_stride": "i32",
            "max_rows": "i32",
        },
        {"hidden": 4096, "scored": SCORED, "inputs": INPUTS},
    ),
    "list_experts": (
        list_experts,
        {"sums": "*fp32", "bias": "*fp32", "lists": "*i64", "num_experts": "i32", "max_rows": "i32"},
        {"pieces": 16, "top_k": 8, "width": 512},
    ),
    "choose_experts": (
        choose_experts,
        {
            "lists": "*i64",
            "slots": "*i32",
            "experts": "*i64",
            "sources": "*i64",
            "targets": "*i64",
            "count": "*i32",
            "gate": "*i32",
            "home": "i64",
            "buffer": "i64",
            "rows": "i32",
            "num_ahead": "i32",
        },
        {"top_k": 8, "width": 32, "record_bytes": RECORD["record_bytes"], "most_word": 2},
    ),
    "point_layer": (
        point_layer,
        {
            "slots": "*i32",
            "slot_addresses": "*i64",
            **TABLES,
            "scale_table": "*i64",
            "own_scales": "*i64",
            "home": "i64",
            "num_experts": "i32",
        },
        {**RECORD, "width": 128},
    ),
    "apply_update": (
        apply_update,
        {
            "table": "*i32",
            "unmap_keys": "*i32",
            "bar_keys": "*i32",
            "map_keys": "*i32",
            "map_slots": "*i32",
            "num_unmap": "i32",
            "num_bar": "i32",
            "num_map": "i32",
        },
        {"block": TABLE_BLOCK},
    ),
    "gather_experts whole": (
        gather_experts,
        GATHER,
        {**GATHER_CONSTANTS, **dataclasses.asdict(NO_CUT), "is_cut": False},
    ),
    "gather_experts in part": (
        gather_experts,
        GATHER,
        {**GATHER_CONSTANTS, **dataclasses.asdict(cut_of(LAYOUT)), "is_cut": True},
    ),
    "post_order": (
        post_order,
        {
            "sources": "*i64",
            "targets": "*i64",
            "count": "*i32",
            "newest": "*i32",
            "expected": "*i32",
            "fence": "*i32",
            "ring": "i64",
        },
        {"turn": 1, "num_cells": 128, "num_buffers": 2},
    ),
    "await_order": (
        await_order,
        {
            "sources": "*i64",
            "targets": "*i64",
            "count": "*i32",
            "arrived": "*i32",
            "expected": "*i32",
            "gate": "*i32",
            "late": "i64",
        },
        {
            "turn": 1,
            "words": RECORD["record_bytes"] // WORD_BYTES,
            "num_programs": USUAL.programs,
            "items": USUAL.items,
            "most_polls": MOST_POLLS,
        },
    ),
    "fetch_words": (
        fetch_words,
        {"source": "*i32", "target": "*i32", "num_words": "i32"},
        {"block": FETCH_BLOCK},
    ),
    "await_answer": (
        await_answer,
        {"counts": "*i32", "first_seq": "*i32", "ring": "i64", "layer": "i32"},
        {"num_cells": 64, "cell_bytes": 131_072, "has_clock": True},
    ),
    "add_partial": (
        add_partial,
        {
            "out": "*fp32",
            "hit_sums": "*fp32",
            "counts": "*i32",
            "first_seq": "*i32",
            "ring": "i64",
            "layer": "i32",
            "rows": "i32",
        },
        {
            "hidden": 4096,
            "y_offset": 33_280,
            "num_cells": 64,
            "cell_bytes": 131_072,
            "block": COMBINE_BLOCK,
            "has_hits": True,
        },
    ),
}

OPTIONS = {"await_answer": {"num_warps": 1}}


def main(architecture: int) -> None:
    """Compile and print; raises what the compiler raises."""
    target = GPUTarget("cuda", architecture, 32)
    found = {}
    for name, (kernel, signature, constants) in KERNELS.items():
        full = {**signature, **dict.fromkeys(constants, "constexpr")}
        # As the launchers pass them: allocations begin at multiples of 16 bytes, and so does each row.
        pointers = {
            (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
            for argument, kind in signature.items()
            if kind.startswith("*")
        }
        source, options = ASTSource(kernel, full, constants, pointers), OPTIONS.get(name)
        compiled = triton.compile(source, target=target, options=options)
        ptx = compiled.asm["ptx"]
        stated = re.search(r"^\.target (sm_\d+)", ptx, re.MULTILINE)
        found[name] = {
            "cubin_bytes": len(compiled.asm["cubin"]),
            "shared_bytes": compiled.metadata.shared,
            "target": stated[1] if stated else "",
            "ptx": ptx,
        }
    print(json.dumps(found))  # noqa: T201  # this is the program's answer


if __name__ == "__main__":
    main(int(sys.argv[1]))
