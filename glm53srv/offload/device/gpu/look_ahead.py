"""Experts on their way before their layer is planned: guesses, copies beside the attention, and who waits.

    main      router l   plan l   gather l   experts l   attention ..   plan l+1   gather l+1   experts l+1
    guesses `- guess l+1 ------------------ | --'(joined)
    fetches                                 `--- fetch l+1 -----------------------------'(joined)
                                                                            `--- keep l+1

    who waits        for                what would go wrong without
    fetch l+1        guess l+1          lists that are half written
    fetch l+1        experts l          they would share the card with copies: 69 us, not 44 to 54 (traced)
    fetch l+1        experts l-1        they read the same buffers (experts l follow)
    end of layer l   guess l+1          memory of the router's input is used again; plan l+1 reads the guess
    experts l+1      fetch l+1          an expert that is not whole
    keep l+1         plan l+1           its list; fetch l+1 comes before it on the same stream

So there are two sets of buffers and lists, used in turn: while a set is read by experts l the other one is
filled. A wrong guess is waited for as a right one is. From gather l to plan l+1 the link has nothing else to
do, from experts l on it is used; what takes longer shares it with gather l+1. (Here all of a layer's experts
are drawn behind its copies; landing_order.py draws those in VRAM.)

A step is captured into graphs that end at each latent attention (engine/cuda/graphs.py), and a graph's end
waits for all of it. A layer behind such a place is guessed in the graph in front, but fetched between the
graphs, beside the attention, by a launch of its own: cross(). The graph behind waits for that by an event
from outside.

With a courier (offload/device/courier.py) the copy engine fetches. What it copies is in no stream's order:

    main      router l   plan l   gather l   await l   experts l   attention ..   plan l+1   gather l+1
    guesses `- guess l+1 ---------------- order l+1 (behind gather l, and keep l-1)
    fetches                                        `--- keep l

    order l+1 waits for guess l+1, for gather l, and for who reads the same buffers: experts l-1, keep l-1
    keep l waits for await l: its expert must be whole
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from glm53srv.offload.device.courier import Courier
from glm53srv.offload.device.gpu.copy_kernel import USUAL, launch_gather
from glm53srv.offload.device.gpu.guess_kernel import (
    launch_choice,
    launch_lists,
    launch_scores,
    num_pieces,
)
from glm53srv.offload.device.gpu.launch import TOLD_WORDS, Ahead, Landing, RouterWeights, make_landing
from glm53srv.offload.device.gpu.order_kernel import (
    OrderRing,
    launch_await,
    launch_order,
    make_order_ring,
)
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.look_ahead import MAX_AHEAD

MAX_ROWS = 1
"""Rows of a step whose layers are guessed. Products of a KDA layer for more rows are cooperative kernels, as
attention's in exact mode: they began when every copy had ended (H200, traced, 2026-11-30), so nothing would
go on beside the copies."""


class Stream(Protocol):
    """torch's stream, as far as it is used here."""

    def record_event(self) -> Any:
        """Give an event that stands for all that is enqueued so far."""

    def wait_event(self, event: Any) -> None:
        """Let what is enqueued from here on wait for an event."""


class LastingEvent(Protocol):
    """An event that is recorded again and again; a graph that was captured with a wait for it waits, whenever
    it is launched, for what was recorded last."""

    def record(self, stream: Any) -> None:
        """Stand for all that is enqueued on a stream so far."""


@dataclass(frozen=True, slots=True)
class SideStreams:
    """guesses, fetches, landings, shared: one stream each, for guesses of the next layer's picks, for copies
    of what was guessed, for a layer's own copies, and for its shared expert. lasting_event: makes an event.
    main: gives the stream that layers run on now. on: makes a stream the current one for a while."""

    guesses: Stream
    fetches: Stream
    landings: Stream
    shared: Stream
    lasting_event: Callable[[], LastingEvent]
    main: Callable[[], Stream]
    on: Callable[[Any], contextlib.AbstractContextManager[Any]]


def make_side_streams(device: torch.device) -> SideStreams:
    """Make them on a GPU."""
    return SideStreams(
        torch.cuda.Stream(device),
        torch.cuda.Stream(device),
        torch.cuda.Stream(device),
        torch.cuda.Stream(device),
        lambda: torch.cuda.Event(external=True),
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

    Per decode layer, in this order: ahead_of for its plan, then guess, keep, arrive, fetch_behind, join; in
    every layer, also those that are not guessed. All of them enqueue, on the side streams and on what main()
    gives.
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
        """Allocate two sets of num_ahead buffers. Raises torch.OutOfMemoryError.

        courier: has the copy engine fetch, in steps of any number of rows; None for a kernel.
        """
        geometry = model.geometry
        self._model = model
        self._streams = streams
        self._buffers = torch.zeros((2, num_ahead, model.record_bytes), dtype=torch.uint8, device=device)
        self.told = torch.zeros((geometry.num_layers, TOLD_WORDS), dtype=torch.int32, device=device)
        self._fetches = [make_landing(buffers) for buffers in self._buffers]
        self._keeps = [make_landing(buffers) for buffers in self._buffers]
        self._experts = torch.zeros((2, MAX_AHEAD), dtype=torch.int64, device=device)
        hidden = max((router.gate.shape[0] for router in model.routers if router is not None), default=1)
        sums = (num_pieces(hidden), max_rows, geometry.num_experts)
        self._sums = torch.zeros(sums, dtype=torch.float32, device=device)
        shape = (max_rows, geometry.top_k)
        self._lists = torch.zeros(shape, dtype=torch.int64, device=device)
        self._imposed: torch.Tensor | None = None
        self._gate = torch.tensor([MAX_AHEAD, 0], dtype=torch.int32, device=device)
        self._allowed = MAX_AHEAD
        self._ring = None if courier is None else make_order_ring(courier, 2, self._gate, device)
        self._orders = self._ring  # None while a kernel fetches
        self._max_rows = max_rows
        self._kept: list[Any] = [None, None]  # events behind the last reader of each set
        self.copy_shape = USUAL
        self._num_across = num_ahead
        self._is_captured = False
        self.num_ahead = num_ahead
        self.order_copies(True)
        self.is_on = True
        self._crossed = {
            layer: self._make_crossed() for layer, is_across in enumerate(model.across) if is_across
        }
        self._aheads = [self._make(layer) for layer in range(geometry.num_layers)]
        self._arrived: Any = None  # events of what is on its way to the layer that runs, and to the next
        self._guessed: Any = None
        self._fetched: Any = None

    def limit(self, num_ahead: int, num_across: int | None = None) -> None:
        """Fetch at most num_ahead experts for each layer, and no more than there is room for.

        num_across: likewise for layers behind a latent attention, None for as many. Graphs that were
        captured before do as before; no step may run.
        """
        self.num_ahead = num_ahead
        self._num_across = num_ahead if num_across is None else num_across
        self._aheads = [self._make(layer) for layer in range(len(self.told))]
        self.told.zero_()  # a layer that is not guessed any more tells nothing

    def impose(self, lists: torch.Tensor) -> None:
        """Guess what these lists say in place of what routers say, which run all the same; for measurements.

        lists: int64 (layers, at least max_rows, top_k) on the device, each row's guesses of a layer, best
        first; read by each step. Before the first step that is captured.
        """
        self._imposed = lists

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

    def newest_order(self) -> int:
        """Read the number of the newest order to the courier; no step may run."""
        return 0 if self._ring is None else int(self._ring.newest.item())

    def begin_step(self, num_rows: int) -> None:
        """Guess the layers of a step of so many rows, if that pays: see MAX_ROWS."""
        self.is_on = num_rows <= self.max_rows

    def order_copies(self, is_wanted: bool) -> None:
        """Have the copy engine fetch from now on if there is a courier, or a kernel; before the next capture.

        Copies by the engine are in no kernel's way: they begin behind a layer's own copies, and in steps of
        any number of rows. A kernel's begin behind the layer's experts: see landing_order.py.
        """
        self._orders = self._ring if is_wanted else None
        self.max_rows = MAX_ROWS if self._orders is None else self._max_rows
        self.behind_experts = self._orders is None

    def allow(self, is_wanted: bool) -> None:
        """Let the next steps fetch, or not, also those that were captured."""
        wanted = MAX_AHEAD if is_wanted else 0
        if wanted != self._allowed:
            self._allowed = wanted
            self._gate[:1].fill_(wanted)

    def open_gate(self) -> None:
        """Let steps fetch again after a wait that took too long; no order may be on its way."""
        self._gate[1:].zero_()

    def ahead_of(self, layer: int) -> Ahead | None:
        """Give what was fetched for a layer, for its plan; None for one that is not guessed."""
        return self._aheads[layer] if self.is_on else None

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
            )
        self._guessed = stream.record_event()

    def keep(self, layer: int, planned: Any) -> None:
        """Behind the plan of a layer, the event `planned`: keep what of its fetched experts was right and
        found a slot."""
        self._arrived = None
        if self.ahead_of(layer) is None or self._orders is not None:
            return
        stream = self._streams.fetches
        self._arrived = self._fetched
        stream.wait_event(planned)
        if self._is_cut(layer):
            self._arrived = self._crossed[layer]
            stream.wait_event(self._arrived)
        with self._streams.on(stream):
            launch_gather(self._keeps[layer % 2], self._model.record_bytes)

    def fetch_behind(self, layer: int, event: Any) -> None:
        """Fetch for the layer behind this one, once `event` has passed: this one's copies, or its experts."""
        if self._router(layer + 1) is None:
            return
        if self._orders is not None:
            self._order(layer + 1, event, self._orders)
            return
        if self._is_cut(layer + 1):
            return
        stream = self._streams.fetches
        stream.wait_event(self._guessed)
        stream.wait_event(event)
        self._fetch(layer + 1)
        self._fetched = stream.record_event()

    def crossing(self, layer: int) -> Callable[[], None] | None:
        """Give what must be called in each step between the graph in front of a layer's attention and the
        attention; None for a layer that is not guessed across one."""
        if self._router(layer) is None or not self._model.across[layer] or self._orders is not None:
            return None
        return functools.partial(self._cross, layer)

    def arrive(self, layer: int) -> None:
        """In front of a layer's experts: wait for those that were fetched for it."""
        if self._arrived is not None:
            self._streams.main().wait_event(self._arrived)
        if self._orders is not None and self.ahead_of(layer) is not None:
            self._await(layer, self._orders)

    def join(self, layer: int) -> None:
        """Behind a layer's experts: wait for the guess, and for the copies where a graph ends."""
        main, is_guessed = self._streams.main(), self._router(layer + 1) is not None
        if is_guessed:
            main.wait_event(self._guessed)
        if self.ahead_of(layer) is not None and (not is_guessed or self._is_cut(layer + 1)):
            main.wait_event(self._streams.fetches.record_event())
            self._kept = [None, None]

    def _order(self, layer: int, event: Any, orders: OrderRing) -> None:
        """Order what was guessed for a layer, behind the event and the last reader of its buffers."""
        stream, turn = self._streams.guesses, layer % 2
        stream.wait_event(event)
        if self._kept[turn] is not None:
            stream.wait_event(self._kept[turn])
        with self._streams.on(stream):
            launch_order(self._fetches_of(layer), orders, turn)
        self._guessed = stream.record_event()

    def _await(self, layer: int, orders: OrderRing) -> None:
        """Wait for what was ordered for a layer, and keep what of it was right."""
        turn, stream = layer % 2, self._streams.fetches
        launch_await(self._fetches_of(layer), orders, turn, self._model.record_bytes)
        stream.wait_event(self._streams.main().record_event())
        with self._streams.on(stream):
            launch_gather(self._keeps[turn], self._model.record_bytes)
        self._kept[turn] = stream.record_event()

    def _cross(self, layer: int) -> None:
        stream = self._streams.fetches
        stream.wait_event(self._streams.main().record_event())
        self._fetch(layer)
        self._crossed[layer].record(stream)

    def _fetch(self, layer: int) -> None:
        with self._streams.on(self._streams.fetches):
            launch_gather(self._fetches_of(layer), self._model.record_bytes, self.copy_shape)

    def _fetches_of(self, layer: int) -> Landing:
        """Give a layer's buffers, as many as it may use."""
        limit = self._num_across if self._model.across[layer] else self.num_ahead
        fetches = self._fetches[layer % 2]
        return replace(fetches, num_experts=min(limit, fetches.num_experts))

    def _is_cut(self, layer: int) -> bool:
        """Tell whether a graph ends between a layer and the one in front; only while graphs are captured."""
        return self._is_captured and layer < len(self._model.across) and self._model.across[layer]

    def _make_crossed(self) -> LastingEvent:
        event = self._streams.lasting_event()
        event.record(self._streams.fetches)  # or a wait would be for nothing, and leave no trace in a graph
        return event

    def _router(self, layer: int) -> RouterWeights | None:
        """Give the router of a layer that is guessed in this step, None for another."""
        return self._model.routers[layer] if self.is_on and self._may_guess(layer) else None

    def _may_guess(self, layer: int) -> bool:
        routers = self._model.routers
        return layer < len(routers) and routers[layer] is not None and self._fetches_of(layer).num_experts > 0

    def _make(self, layer: int) -> Ahead | None:
        if not self._may_guess(layer):
            return None
        turn = layer % 2
        return Ahead(self._experts[turn], self._fetches_of(layer), self._keeps[turn], self.told[layer])
