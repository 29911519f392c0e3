"""A captured step: what lies in which graph, what runs between two, and what is sent for each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from glm53srv.engine.cuda.graphs import DecodeGraph, Parts
from glm53srv.engine.cuda.step_inputs import DecodeRows

HIDDEN, VOCAB, PAGES = 8, 11, 16


@dataclass
class FakeGraph:
    """Notes its end and its replays. again: does at a replay what was captured, as far as a test needs it."""

    number: int
    told: list[Any]
    again: Callable[[], None] = lambda: None

    def capture_end(self) -> None:
        self.told.append(f"end {self.number}")

    def replay(self) -> None:
        self.told.append(f"replay {self.number}")
        self.again()


@dataclass
class FakeRecorder:
    """Stands for a GPU's captures."""

    told: list[Any] = field(default_factory=list)
    num_graphs: int = 0
    first_job: torch.Tensor | None = None

    def scratch(self) -> list[Any]:
        return ["workspace"]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def planning(self, num_rows: int, first_job: torch.Tensor) -> Iterator[None]:
        self.told.append(f"planning {num_rows}")
        self.first_job = first_job
        yield
        self.told.append("planned")

    def begin(self) -> FakeGraph:
        self.num_graphs += 1
        return FakeGraph(self.num_graphs - 1, self.told)


class Layer:
    """An attention or recurrent layer of the package, as far as a capture looks at it."""

    def __init__(self, told: list[Any], name: str, *, is_latent: bool) -> None:
        self.told, self.name = told, name
        self.caps = {"kv_cache": True} if is_latent else {}
        self.out_dtype = torch.float32
        self.bc_split = not is_latent

    def forward(self, x: torch.Tensor, params: dict[str, Any], out_dtype: Any = None) -> torch.Tensor:
        self.told.append((self.name, len(x), params))
        return x + 1

    def _bc_configure_slot_kda(self, rows: int, length: int, history: bool) -> None:
        self.told.append(f"set up {self.name} for {rows}")


class Gated:
    """A dense network whose compiled path holds a graph of the package's."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told
        self.bc: Any = "compiled"
        self.multi_gu: list[Any] = ["tables"]
        self.device = "cpu"

    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        return x

    def load_local(self, device: Any, load_slice: int) -> None:
        assert self.multi_gu == [None]
        self.told.append("dense set up")
        self.bc, self.multi_gu[0] = "compiled again", "tables again"


class Sparse:
    """A sparse layer; its shared expert is inside of its call or beside it."""

    def __init__(self, shared: Any, *, is_inside: bool, is_plain: bool = True) -> None:
        self.shared_experts, self.bc_sh_exp, self.is_plain = shared, is_inside, is_plain

    def shared_coop_ok(self) -> bool:
        return self.is_plain

    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        return x


class Block:
    """A block: attention, then network."""

    device = "cpu"

    def __init__(self, attn: Layer, mlp: Any) -> None:
        self.attn, self.mlp = attn, mlp

    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        return self.mlp.forward(self.attn.forward(x, params), params)


class Module:
    """A module in front of the blocks or behind them."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        return self._function(x)


def embed(ids: torch.Tensor) -> torch.Tensor:
    return ids.half()[..., None].expand(-1, -1, HIDDEN).contiguous()


def make(
    recorder: FakeRecorder,
    width: int,
    *,
    most_by_row: int = 0,
    mlp: Any = None,
    names: tuple[str, ...] = ("r0", "a1", "r2", "a3", "r4"),
    gates: Any = None,
) -> tuple[DecodeGraph, list[Layer]]:
    """Build blocks around recurrent layers, r, and latent attentions, a."""
    told = recorder.told
    layers = [Layer(told, name, is_latent=name[0] == "a") for name in names]
    blocks = [Block(layer, mlp or Sparse(None, is_inside=True)) for layer in layers]
    head = Module(lambda x: x[..., :1].float().expand(-1, -1, VOCAB).contiguous())
    parts = Parts([Module(embed), Module(lambda x: x.float())], blocks, [head])
    made: Any = recorder
    return DecodeGraph(parts, "cache", width, PAGES, made, most_by_row=most_by_row, gates=gates), layers


def fetch_with_first_graph(graph: DecodeGraph) -> None:
    """Let the first graph's replay do what its first kernel does."""
    first: Any = graph._segments[0].graph
    first.again = graph._inputs.fetch


def planner(recorder: FakeRecorder) -> Any:
    return recorder


def test_a_graph_reaches_from_one_attention_to_the_next_but_the_first_is_short() -> None:
    recorder = FakeRecorder()
    graph, layers = make(recorder, 2)
    graph.capture(planner(recorder))
    events = [each if isinstance(each, str) else each[0] for each in recorder.told]
    assert events == [
        *("set up r0 for 2", "set up r2 for 2", "set up r4 for 2"),
        *("planning 2", "r0", "end 0", "end 1", "r2", "end 2", "r4", "end 3", "planned"),
    ]
    assert all("forward" not in vars(layer) for layer in layers)  # the attentions are themselves again


def test_recurrent_layers_launch_their_own_kernels_while_they_are_captured() -> None:
    class Gates:
        @contextlib.contextmanager
        def standing_in(self, layers: list[Layer], rows: int) -> Iterator[None]:
            recorder.told.append(f"{[layer.name for layer in layers]} of {rows} stand in")
            yield
            recorder.told.append("themselves")

    recorder = FakeRecorder()
    graph, _ = make(recorder, 2, gates=Gates())
    graph.capture(planner(recorder))
    events = [each for each in recorder.told if isinstance(each, str)]
    first = events.index("['r0', 'r2', 'r4'] of 2 stand in")
    assert events.index("set up r4 for 2") < first < events.index("planning 2")
    assert events.index("themselves") > events.index("end 3")


def test_an_attention_in_the_first_block_ends_the_first_graph_by_itself() -> None:
    recorder = FakeRecorder()
    graph, _ = make(recorder, 1, names=("a0", "r1"))
    graph.capture(planner(recorder))
    recorder.told.clear()
    graph.run(DecodeRows([1], [0], [(0,)], [3], 1, first_job=0))
    assert [each if isinstance(each, str) else each[0] for each in recorder.told] == [
        *("replay 0", "a0", "replay 1")
    ]


def test_the_second_graph_goes_on_with_what_the_first_one_left() -> None:
    recorder = FakeRecorder()
    graph, _ = make(recorder, 2, names=("r0", "r1"))
    graph.capture(planner(recorder))
    rows = DecodeRows([3, 5], [0, 1], [(0,), (1,)], [3, 4], 1, first_job=0)
    inputs: Any = graph._inputs
    inputs.write(rows)
    inputs.fetch()
    graph.capture(planner(recorder))  # its calls compute, as a replay would
    assert graph._logits is not None
    assert graph._logits[:, 0].tolist() == [5.0, 7.0]


@pytest.mark.parametrize("most_by_row", [0, 2, 3])
def test_a_step_replays_graphs_with_the_attentions_between(most_by_row: int) -> None:
    recorder = FakeRecorder()
    graph, _ = make(recorder, 3, most_by_row=most_by_row)
    graph.capture(planner(recorder))
    recorder.told.clear()
    fetch_with_first_graph(graph)
    rows = DecodeRows([5, 6, 7], [2, 0, 1], [(4, 5), (6, 7), (8,)], [300, 301, 9], 2, first_job=-7)
    logits = graph.run(rows)
    assert logits.shape == (3, VOCAB)
    counts = [1, 1, 1] if most_by_row >= 3 else [3]
    names = [each if isinstance(each, str) else (each[0], each[1]) for each in recorder.told]
    assert names == [
        *("replay 0", "replay 1"),
        *(("a1", count) for count in counts),
        "replay 2",
        *(("a3", count) for count in counts),
        "replay 3",
    ]
    calls = [each[2] for each in recorder.told if each[0] == "a3"]
    assert torch.cat([call["block_table"] for call in calls]).tolist() == [[4, 5], [6, 7], [8, 0]]
    assert torch.cat([call["cache_seqlens"] for call in calls]).tolist() == [300, 301, 9]
    assert [length for call in calls for length in call["_mla_host_seqlens"]] == [300, 301, 9]
    assert all(call["block_table"].is_contiguous() for call in calls)
    assert recorder.first_job is not None
    assert recorder.first_job.tolist() == [-7]


def test_attention_rows_go_where_the_next_graph_reads_them() -> None:
    recorder = FakeRecorder()
    graph, _ = make(recorder, 2, most_by_row=2)
    graph.capture(planner(recorder))
    segment = graph._segments[1]
    assert segment.x is not None
    assert segment.y is not None
    segment.x.copy_(torch.tensor([1.0, 5.0])[:, None, None])
    graph.run(DecodeRows([1, 2], [0, 1], [(0,), (1,)], [3, 4], 1, first_job=0))
    assert segment.y[:, 0, 0].tolist() == [2.0, 6.0]


def test_what_would_launch_a_graph_of_the_packages_is_set_up_anew() -> None:
    recorder = FakeRecorder()
    dense = Gated(recorder.told)
    graph, _ = make(recorder, 1, mlp=dense)
    graph.capture(planner(recorder))
    assert recorder.told.count("dense set up") == 5
    kept = graph._kept
    assert kept[:2] == ["compiled", "tables"]  # other widths' graphs read them
    assert kept[-1] == "workspace"


def test_a_shared_expert_beside_the_routed_ones_is_set_up_anew() -> None:
    recorder = FakeRecorder()
    shared = Gated(recorder.told)
    graph, _ = make(recorder, 1, mlp=Sparse(shared, is_inside=False))
    graph.capture(planner(recorder))
    assert "dense set up" in recorder.told


def test_a_shared_expert_that_runs_as_a_graph_inside_cannot_be_captured() -> None:
    recorder = FakeRecorder()
    graph, _ = make(recorder, 1, mlp=Sparse(Gated(recorder.told), is_inside=True, is_plain=False))
    with pytest.raises(RuntimeError, match="shared expert runs as a graph"):
        graph.capture(planner(recorder))


def test_a_capture_that_fails_ends_its_graph_and_leaves_the_attentions_alone() -> None:
    recorder = FakeRecorder()
    graph, layers = make(recorder, 1)

    def fail(x: Any, params: Any, out_dtype: Any = None) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    layers[2].forward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="not permitted"):
        graph.capture(planner(recorder))
    assert [each for each in recorder.told if str(each).startswith("end")] == ["end 0", "end 1", "end 2"]
    assert not graph._segments
    assert all("forward" not in vars(layer) for layer in (layers[0], layers[1], layers[3]))
