"""Experts on their way before their layer is planned: guesses, orders to the copy engine, and who waits.

    main      router l   plan l   gather l   await l   experts l   attention ..   plan l+1   gather l+1
    guesses `- guess l+1 ---------------- order l+1                                       `- ...
    fetches                                       `--- keep l

The copy engine is in no kernel's way, but only the host can give it orders: a kernel posts them, a thread
enqueues the copies (offload/device/courier.py). So what is copied is in no stream's order:

    who waits        for                what would go wrong without
    order l+1        guess l+1          lists that are half written
    order l+1        gather l           the layer's own copies would share the link
    order l+1        experts l-1        they read the same buffers (through plan l, for which gather l waits)
    order l+1        keep l-1           likewise
    end of layer l   order l+1          memory of the router's input is used again; plan l+1 reads the guess
    await l          the courier        an expert that is not whole
    keep l           await l, plan l    likewise; its list

So there are two sets of buffers and lists, used in turn: while a set is read by experts l the other one is
filled. A wrong guess is waited for as a right one is. From gather l to plan l+1 the link has nothing else to
do; what takes longer shares it with gather l+1. (Here all of a layer's experts are drawn behind its copies;
landing_order.py draws those in VRAM.)

A step is captured into graphs that end at each latent attention (engine/cuda/graphs.py), and a graph's end
waits for all that was forked in it; orders are none of that, and cross.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.errors import EngineError
from glm53srv.offload.device.courier import Courier
from glm53srv.offload.device.gpu.copy_kernel import launch_gather
from glm53srv.offload.device.gpu.guess_kernel import (
    launch_choice,
    launch_lists,
    launch_scores,
    num_pieces,
)
from glm53srv.offload.device.gpu.launch import TOLD_WORDS, Ahead, Landing, RouterWeights, make_landing
from glm53srv.offload.device.gpu.order_kernel import (
    launch_await,
    launch_order,
    make_order_ring,
)
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.look_ahead import MAX_AHEAD, MORE_AHEAD, num_buffers_ahead


class Stream(Protocol):
    """torch's stream, as far as it is used here."""

    def record_event(self) -> Any:
        """Give an event that stands for all that is enqueued so far."""

    def wait_event(self, event: Any) -> None:
        """Let what is enqueued from here on wait for an event."""


@dataclass(frozen=True, slots=True)
class SideStreams:
    """guesses, fetches, landings, shared: one stream each, for guesses of the next layer's picks, for keeping
    what was fetched, for a layer's own copies, and for its shared expert. main: gives the stream that layers
    run on now. on: makes a stream the current one for a while."""

    guesses: Stream
    fetches: Stream
    landings: Stream
    shared: Stream
    main: Callable[[], Stream]
    on: Callable[[Any], contextlib.AbstractContextManager[Any]]


def make_side_streams(device: torch.device) -> SideStreams:
    """Make them on a GPU."""
    return SideStreams(
        torch.cuda.Stream(device),
        torch.cuda.Stream(device),
        torch.cuda.Stream(device),
        torch.cuda.Stream(device),
        lambda: torch.cuda.current_stream(device),
        torch.cuda.stream,
    )


@dataclass(frozen=True, slots=True)
class GuessedModel:
    """What guesses are about. routers: of each layer that is guessed, None for those that are not; the first
    never is. across: for each layer, whether a latent attention stands between it and the one in front.
    slots: int32 (experts,) for each layer, its row of the residency table. homes: addresses of the layers'
    first records."""

    geometry: ExpertGeometry
    record_bytes: int
    routers: list[RouterWeights | None]
    across: list[bool]
    slots: list[torch.Tensor]
    homes: list[int]


class LookAhead:
    """Owns buffers and lists. Engine thread only.

    Per decode layer, in this order: ahead_of for its plan, then guess, order_behind, arrive, join; in every
    layer, also those that are not guessed. All of them enqueue, on the side streams and on what main() gives.
    """

    def __init__(
        self,
        model: GuessedModel,
        num_ahead: int,
        max_rows: int,
        device: torch.device,
        streams: SideStreams,
        courier: Courier | None = None,
    ) -> None:
        """Allocate two sets of buffers. Raises torch.OutOfMemoryError.

        num_ahead: experts that are fetched for a layer in steps of one row; see num_buffers_ahead. courier:
        takes the orders; without one, nothing is fetched ahead.
        """
        geometry = model.geometry
        self._model = model
        self._streams = streams
        shape = (2, num_buffers_ahead(num_ahead), model.record_bytes)
        self._buffers = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.told = torch.zeros((geometry.num_layers, TOLD_WORDS), dtype=torch.int32, device=device)
        self._fetches = [make_landing(buffers) for buffers in self._buffers]
        self._keeps = [make_landing(buffers) for buffers in self._buffers]
        self._experts = torch.zeros((2, MAX_AHEAD), dtype=torch.int64, device=device)
        hidden = max((router.gate.shape[0] for router in model.routers if router is not None), default=1)
        sums = (num_pieces(hidden), max_rows, geometry.num_experts)
        self._sums = torch.zeros(sums, dtype=torch.float32, device=device)
        self._lists = torch.zeros((max_rows, geometry.top_k), dtype=torch.int64, device=device)
        self._imposed: torch.Tensor | None = None
        self._gate: torch.Tensor = torch.tensor([MAX_AHEAD, 0, MAX_AHEAD], dtype=torch.int32, device=device)
        self._allowed = (MAX_AHEAD, MAX_AHEAD)
        self._ring = None if courier is None else make_order_ring(courier, 2, self._gate, device)
        self._kept: list[Any] = [None, None]  # events behind the last reader of each set
        self._guessed: Any = None  # and behind the newest guess or order
        self._is_captured = False
        self._limits = (num_ahead, num_ahead)
        self._num_more = 0  # in a step of several rows
        self._aheads = [self._make(layer) for layer in range(geometry.num_layers)]

    def limit(self, num_ahead: int, num_across: int | None = None) -> None:
        """Fetch at most num_ahead experts for each layer, in steps of several rows MORE_AHEAD more, and not
        more than there is room for.

        num_across: likewise for layers behind a latent attention, None for as many. Graphs that were
        captured before do as before; no step may run.
        """
        self._limits = (num_ahead, num_ahead if num_across is None else num_across)
        self._aheads = [self._make(layer) for layer in range(len(self.told))]
        self.told.zero_()  # a layer that is not guessed any more tells nothing

    @property
    def num_ahead(self) -> int:
        """Experts that are fetched for a layer in a step of one row, at most."""
        return 0 if self._ring is None else self._limits[0]

    def impose(self, lists: torch.Tensor) -> None:
        """Guess what these lists say in place of what routers say, which run all the same; for measurements.

        lists: int64 (layers, at least max_rows, top_k) on the device, each row's guesses of a layer, best
        first; read by each step. Before the first step that is captured.
        """
        self._imposed = lists

    def begin_step(self, num_rows: int) -> None:
        """Enqueue layers of steps of so many rows from here on."""
        num_more = MORE_AHEAD if num_rows > 1 else 0
        if num_more != self._num_more:
            self._num_more = num_more
            self._aheads = [self._make(layer) for layer in range(len(self.told))]

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Let what is enqueued inside be captured into graphs that are cut at latent attentions."""
        self._is_captured = True
        self._kept = [None, None]  # a capture cannot wait for what was enqueued outside
        try:
            yield
        finally:
            self._is_captured = False

    @property
    def arrived(self) -> torch.Tensor | None:
        """Where the courier leaves the numbers of orders that are done; None without one."""
        return None if self._ring is None else self._ring.arrived

    def try_out(self, courier: Courier, settle: Callable[[], None], record: NDArray[np.uint8]) -> None:
        """Have a record of layer 0, expert 0, fetched once. Raises EngineError if it does not come as it is.

        settle: waits for the courier's stream.
        """
        if self._ring is None or not self._fetches[0].num_experts:
            return
        fetches = self._fetches_of(0)
        fetches.sources[0] = self._model.homes[0]
        fetches.targets[0] = self._buffers[0, 0].data_ptr()
        fetches.count.fill_(1)
        launch_order(fetches, self._ring, 0)
        newest = self.newest_order()
        courier.catch_up(newest)
        settle()
        if int(self._ring.arrived.item()) != newest:
            raise EngineError("the driver did not write the number of an order")
        if not np.array_equal(self._buffers[0, 0].cpu().numpy(), record):
            raise EngineError("the copy engine's copy of an expert differs from it")
        fetches.count.zero_()

    def give_up(self) -> None:
        """Fetch nothing ahead from now on; before the first step that is captured."""
        self._ring = None
        self._aheads = [None] * len(self.told)

    def newest_order(self) -> int:
        """Read the number of the newest order to the courier; no step may run."""
        return 0 if self._ring is None else int(self._ring.newest.item())

    def allow(self, plain: int, across: int) -> None:
        """Let the next steps fetch at most so many experts for a layer, also those that were captured.

        across: for one behind a latent attention. No more than limit() says in any case.
        """
        for place, wanted, before in zip((0, 2), (plain, across), self._allowed, strict=True):
            if wanted != before:
                self._gate[place : place + 1].fill_(wanted)
        self._allowed = (plain, across)

    def open_gate(self) -> None:
        """Let steps fetch again after a wait that took too long; no order may be on its way."""
        self._gate[1:2].zero_()

    def ahead_of(self, layer: int) -> Ahead | None:
        """Give what was fetched for a layer, for its plan; None for one that is not guessed."""
        return self._aheads[layer]

    def guess(self, layer: int, x: torch.Tensor, ready: Any) -> None:
        """Guess the layer behind this one from its router's input, float16 (rows, hidden), of the event
        `ready`; enqueued behind this one's plan."""
        target = layer + 1
        router = self._router(target)
        if router is None:
            return
        stream, model, lists, turn = self._streams.guesses, self._model, self._lists, target % 2
        stream.wait_event(ready)
        with self._streams.on(stream):
            launch_scores(x, router, self._sums)
            launch_lists(self._sums, router.bias, lists, len(x))
            lists = lists if self._imposed is None else self._imposed[target]
            launch_choice(
                lists,
                len(x),
                model.slots[target],
                model.homes[target],
                model.record_bytes,
                self._fetches_of(target),
                self._experts[turn],
                self._gate,
                is_across=model.across[target],
            )
        self._guessed = stream.record_event()

    def order_behind(self, layer: int, event: Any) -> None:
        """Order what was guessed for the next layer, once `event` has passed: behind this layer's copies."""
        target = layer + 1
        if self._ring is None or self._router(target) is None:
            return
        stream, turn = self._streams.guesses, target % 2
        stream.wait_event(event)
        if self._kept[turn] is not None:
            stream.wait_event(self._kept[turn])
        with self._streams.on(stream):
            launch_order(self._fetches_of(target), self._ring, turn)
        self._guessed = stream.record_event()

    def arrive(self, layer: int) -> None:
        """In front of a layer's experts: wait for those that were fetched for it, and keep what of them was
        right and found a slot."""
        if self._ring is None or self.ahead_of(layer) is None:
            return
        turn, stream = layer % 2, self._streams.fetches
        launch_await(self._fetches_of(layer), self._ring, turn, self._model.record_bytes)
        stream.wait_event(self._streams.main().record_event())
        with self._streams.on(stream):
            launch_gather(self._keeps[turn], self._model.record_bytes)
        self._kept[turn] = stream.record_event()

    def join(self, layer: int) -> None:
        """Behind a layer's experts: wait for the guess, and for what is kept where a graph ends."""
        main, is_guessed = self._streams.main(), self._router(layer + 1) is not None
        if is_guessed:
            main.wait_event(self._guessed)
        if self.ahead_of(layer) is not None and (not is_guessed or self._is_cut(layer + 1)):
            main.wait_event(self._streams.fetches.record_event())
            self._kept = [None, None]

    def _fetches_of(self, layer: int) -> Landing:
        """Give a layer's buffers, as many as it may use."""
        limit = self._limits[self._model.across[layer]]
        limit += self._num_more if limit else 0
        fetches = self._fetches[layer % 2]
        return replace(fetches, num_experts=min(limit, fetches.num_experts))

    def _is_cut(self, layer: int) -> bool:
        """Tell whether a graph ends between a layer and the one in front; only while graphs are captured."""
        return self._is_captured and layer < len(self._model.across) and self._model.across[layer]

    def _router(self, layer: int) -> RouterWeights | None:
        """Give the router of a layer that is guessed, None for another."""
        return self._model.routers[layer] if self._may_guess(layer) else None

    def _may_guess(self, layer: int) -> bool:
        routers = self._model.routers
        if self._ring is None or layer >= len(routers):
            return False
        return routers[layer] is not None and self._fetches_of(layer).num_experts > 0

    def _make(self, layer: int) -> Ahead | None:
        if not self._may_guess(layer):
            return None
        turn = layer % 2
        return Ahead(self._experts[turn], self._fetches_of(layer), self._keeps[turn], self.told[layer])
