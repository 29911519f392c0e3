"""In which order a decode layer's copies, its experts and the orders for the next layer go to which stream.

    main      plan l ---------- hits l ------------ wait ---- await l ---- the other experts l
    shared         |--- shared expert l ------------/  /
    landings       \\-- gather l ---------------------/
    guesses   guess l+1 ---------------- | -- order l+1

Without a launch of their own for hits, the experts in VRAM, gather goes by the main stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from glm53srv.offload.device.gpu.look_ahead import LookAhead, SideStreams


@dataclass(frozen=True, slots=True)
class OwnLaunches:
    """How a layer computes some of its experts before the others.

    hits: enqueues routed experts with these weights, float16 (rows, top_k), and gives their sums, float32
    (rows, hidden), which the next launch overwrites. shared: enqueues the shared expert.
    """

    hits: Callable[[torch.Tensor], torch.Tensor]
    shared: Callable[[], None]


@dataclass(frozen=True, slots=True)
class LayerWork:
    """planned: an event behind the layer's plan. x: float16 (rows, hidden), its router's input; ready: an
    event behind that.

    gather: enqueues the layer's copies. run_hits: the experts in VRAM, None if they go with the others.
    run_shared: the shared expert, None if it goes with them.
    """

    planned: Any
    ready: Any
    x: torch.Tensor
    gather: Callable[[], None]
    run_hits: Callable[[], None] | None
    run_shared: Callable[[], None] | None


def enqueue_copies(
    streams: SideStreams,
    look_ahead: LookAhead,
    layer: int,
    work: LayerWork,
) -> None:
    """Enqueue what comes between a layer's plan and its experts' kernels.

    The device begins what was enqueued first: so the copies first, on which most waits; then the experts in
    VRAM and the shared one; then the guess, which has until the copies' end.
    """
    main, shared = streams.main(), None
    if work.run_hits is None:
        look_ahead.guess(layer, work.x, work.ready)
        work.gather()
        shared = _beside(streams, work)
        gathered = main.record_event()
    else:
        streams.landings.wait_event(work.planned)
        with streams.on(streams.landings):
            work.gather()
        gathered = streams.landings.record_event()
        work.run_hits()
        shared = _beside(streams, work)
        look_ahead.guess(layer, work.x, work.ready)
        main.wait_event(gathered)
    look_ahead.order_behind(layer, gathered)
    if shared is not None:
        main.wait_event(shared)
    look_ahead.arrive(layer)


def _beside(streams: SideStreams, work: LayerWork) -> Any:
    """Enqueue the shared expert on its stream; gives its end, None if it goes with the others."""
    if work.run_shared is None:
        return None
    streams.shared.wait_event(work.planned)
    with streams.on(streams.shared):
        work.run_shared()
    return streams.shared.record_event()
