"""In which order a decode layer's copies, its experts and the copies for the next layer go to which stream.

    main      plan l ---------- hits l ------------ wait ---- the other experts l
    landings       \\-- gather l ----------------/       /
    fetches    ... fetch l -------------------------- /  fetch l+1 ...

Without a launch of their own for hits, the experts in VRAM, gather goes by the main stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glm53srv.offload.device.gpu.look_ahead import LookAhead, SideStreams


def enqueue_copies(
    streams: SideStreams,
    look_ahead: LookAhead,
    layer: int,
    planned: Any,
    gather: Callable[[], None],
    run_hits: Callable[[], None] | None,
) -> None:
    """Enqueue what comes between a layer's plan, the event `planned`, and its experts' kernels.

    gather: the layer's copies. run_hits: computes the experts in VRAM, None if they go with the others.
    Copies are enqueued first: the experts' kernel may fill the card before a later one finds place.
    """
    main = streams.main()
    if run_hits is None:
        gather()
        look_ahead.fetch(layer, main.record_event())
    else:
        streams.landings.wait_event(planned)
        with streams.on(streams.landings):
            gather()
        gathered = streams.landings.record_event()
        look_ahead.fetch(layer, gathered)
        run_hits()
        main.wait_event(gathered)
    look_ahead.arrive()
