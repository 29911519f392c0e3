"""Lets a decode step's rows pick the experts of given traces, in place of what random weights' routers say.

Random weights give a router that knows popularity at best (synthetic.py's SKEW): what neighbouring tokens
share, on which a cache lives, comes from traces. The router runs all the same, and its weights are kept, so
that a step costs what it costs; one small copy a layer is added. What a router would say one layer early
(offload/look_ahead.py) is as meaningless then, so guesses are prescribed too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.offload.device.gpu.host_reader import launch_fetch

NUM_STAGED = 4
"""Pinned copies, used in turn. A step takes two at most, and when it begins all were read that were sent
before the step in front of it."""


class ImposedRoutes:
    """Owns the picks of the step that runs, and guesses of them. Engine thread only.

    traces: one for each stream, integers (tokens, sparse layers, top_k); a stream that reaches the end of its
    trace begins it again. guesses: of each trace, likewise; the traces themselves if None. send() must come
    before each decode step; the end of the one before it must have been waited for. Steps before the first
    call pick experts 0 to top_k - 1.

    guesses_of_step: int64 (sparse layers, max_rows, top_k) on the device, for LookAhead.impose.
    """

    def __init__(
        self,
        traces: Sequence[NDArray[np.integer[Any]]],
        max_rows: int,
        device: Any,
        guesses: Sequence[NDArray[np.integer[Any]]] | None = None,
    ) -> None:
        _, num_layers, top_k = traces[0].shape
        guesses = traces if guesses is None else guesses
        self._traces = [
            np.stack([picks, guessed], axis=1).astype(np.int64)
            for picks, guessed in zip(traces, guesses, strict=True)
        ]
        self._staged = torch.zeros(
            (NUM_STAGED, 2, num_layers, max_rows, top_k),
            dtype=torch.int64,
            pin_memory=torch.cuda.is_available(),
        )
        self._staged[:] = torch.arange(top_k)
        self._sent = self._staged[0].to(device, copy=True)
        self._picks, self.guesses_of_step = self._sent
        self._places = [0] * len(traces)
        self._num_sent = 0
        self._last: tuple[int, ...] = ()
        self._ahead: tuple[int, ...] = ()

    def impose(self, layers: Sequence[Any]) -> None:
        """Make the sparse layers, in order, take their picks from here in steps of at most max_rows rows."""
        for index, layer in enumerate(layers):
            layer.change_routing(self._wrap(index))

    def send(self, streams: Sequence[int]) -> None:
        """Enqueue the next picks of these streams, one for each row of the step in order.

        Nothing is left to do when send_ahead() has sent them.
        """
        self._last, ahead, self._ahead = tuple(streams), self._ahead, ()
        if ahead != self._last:
            self._enqueue(self._last)
        for stream in streams:
            self._places[stream] = (self._places[stream] + 1) % len(self._traces[stream])

    def rewind(self) -> None:
        """Let every stream begin its trace again; no step may be running."""
        self._places = [0] * len(self._traces)
        self._ahead = ()

    def send_ahead(self) -> None:
        """Enqueue the same streams' next picks, behind a step that is enqueued already.

        So that what a server does not do is not done between two steps, where the device waits for it.
        """
        self._enqueue(self._last)
        self._ahead = self._last

    def _enqueue(self, streams: tuple[int, ...]) -> None:
        staged = self._staged[self._num_sent % NUM_STAGED]
        self._num_sent += 1
        numbers = staged.numpy()
        for row, stream in enumerate(streams):
            numbers[:, :, row] = self._traces[stream][self._places[stream]]
        launch_fetch(staged, self._sent)

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
