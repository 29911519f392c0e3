"""Lets a decode step's rows pick the experts of given traces, in place of what random weights' routers say.

Random weights give a router that knows popularity at best (synthetic.py's SKEW): what neighbouring tokens
share, on which a cache lives, comes from traces. The router runs all the same, and its weights are kept, so
that a step costs what it costs; one small copy a layer is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.offload.device.gpu.host_reader import launch_fetch


class ImposedRoutes:
    """Owns the picks of the step that runs. Engine thread only.

    traces: one for each stream, integers (tokens, sparse layers, top_k); a stream that reaches the end of its
    trace begins it again. send() must come before each decode step, whose end must have been waited for by
    the next call. Steps before the first call pick experts 0 to top_k - 1.
    """

    def __init__(self, traces: Sequence[NDArray[np.integer[Any]]], max_rows: int, device: Any) -> None:
        _, num_layers, top_k = traces[0].shape
        self._traces = [trace.astype(np.int64) for trace in traces]
        self._staged = torch.zeros(
            (num_layers, max_rows, top_k), dtype=torch.int64, pin_memory=torch.cuda.is_available()
        )
        self._staged[:] = torch.arange(top_k)
        self._picks = self._staged.to(device, copy=True)
        self._places = [0] * len(traces)

    def impose(self, layers: Sequence[Any]) -> None:
        """Make the sparse layers, in order, take their picks from here in steps of at most max_rows rows."""
        for index, layer in enumerate(layers):
            layer.change_routing(self._wrap(index))

    def send(self, streams: Sequence[int]) -> None:
        """Enqueue the next picks of these streams, one for each row of the step in order."""
        numbers = self._staged.numpy()
        for row, stream in enumerate(streams):
            trace, place = self._traces[stream], self._places[stream]
            numbers[:, row] = trace[place]
            self._places[stream] = (place + 1) % len(trace)
        launch_fetch(self._staged, self._picks)

    def _wrap(self, index: int) -> Callable[[Any], Any]:
        picks_of_layer = self._picks[index]

        def wrap(router: Any) -> Any:
            def routed(rows: int, config: Any, z: Any, params: dict[str, Any]) -> tuple[Any, Any]:
                picks, weights = router(rows, config, z, params)
                if rows <= len(picks_of_layer):
                    picks.copy_(picks_of_layer[:rows])
                return picks, weights

            return routed

        return wrap
