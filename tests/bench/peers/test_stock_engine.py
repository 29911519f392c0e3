"""Stock's engine over a package that is made up: which calls it makes, with what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch, as make test-triton installs it")

from bench.facts import REPOSITORY

PACKAGE = '''
import json, os
from types import SimpleNamespace
import torch

calls = []

class InferParams:
    """Only what the package reads."""
    __slots__ = ("moe_cpu_split", "moe_cpu_threads")
    def __init__(self): self.moe_cpu_split, self.moe_cpu_threads = 0, None

class Config:
    @staticmethod
    def from_directory(directory):
        config = Config()
        config.directory, config.infer_params = directory, InferParams()
        return config

class CacheLayer_fp16: pass

class State:
    def __init__(self, cache): self.cache, self.position = cache, 0
    def free(self): self.cache.free_slots += 1

class Cache:
    def __init__(self, model, max_num_tokens, layer_type, max_batch_size):
        assert layer_type is CacheLayer_fp16 and max_num_tokens % 256 == 0
        self.free_slots = self.num_slots = max_batch_size
    def get_new_state(self):
        assert self.free_slots > 0 and torch.is_inference_mode_enabled()
        self.free_slots -= 1
        return State(self)

class Model:
    @staticmethod
    def from_config(config):
        model = Model()
        model.config = config
        return model
    def load(self, device, progressbar):
        params = self.config.infer_params
        heat = json.load(open(os.environ["EXL3_MOE_CPU_SPLIT_STATS"]))
        calls.append(["load", device, params.moe_cpu_split, params.moe_cpu_threads, sorted(heat),
                      os.environ["EXL3_MOE_CPU_SWAP"]])
        experts = len(next(iter(heat.values())))
        self.layers = {
            key: SimpleNamespace(
                cpu_split_first=experts - params.moe_cpu_split,
                _split_perm=sorted(range(experts), key=lambda expert: -counts[expert]),
                routing_fn=lambda rows, config, z, params: "the router's",
            )
            for key, counts in heat.items()
        }
        last = self.layers[max(self.layers)]
        if os.environ.get("REFUSES") == "split": last.cpu_split_first = None
        if os.environ.get("REFUSES") == "heat": last._split_perm = None
    def find_module(self, key): return self.layers[key]
    def unload(self): calls.append(["unload"])
    def _run(self, name, ids, params):
        seqlens = params["cache_seqlens"].tolist()
        states = params["recurrent_states"]
        assert [state.position for state in states] == seqlens
        table = params["block_table"]
        assert params["attn_mode"] == "flash_attn" and table.dtype == torch.int32
        assert table.shape[1] * 256 >= max(seqlens) + ids.shape[1]
        for state in states: state.position += ids.shape[1]
        calls.append([name, list(ids.shape), seqlens, list(table.shape), table[:, 0].tolist()])
    def prefill(self, ids, params): self._run("prefill", ids, params)
    def forward(self, ids, params):
        self._run("forward", ids, params)
        rows, width = ids.shape
        count = params.get("last_tokens_only", width)
        logits = torch.zeros(rows, count, 8192, dtype=torch.half)
        logits[:, :, 8191] = 9  # beyond the vocabulary: padding
        for row in range(rows): logits[row, -1, int(ids[row, -1]) + 1] = 5
        return logits
'''
SCRIPT = """
import json, sys
from pathlib import Path
import exllamav3
from bench.peers.measure import Rounds, measure
from bench.peers.stock import StockPeer
from bench.peers.stock_engine import StockEngine, StockSetup, import_package
from glm53srv.engine.base import DecodeRow, PrefillSlice, StepPlan
from glm53srv.errors import EngineError, MachineError
from glm53srv.model.config import load_model_config
config = load_model_config(Path(sys.argv[1]))
setup = StockSetup(Path(sys.argv[1]), config, 5, json.loads(Path(sys.argv[2]).read_text()), 3, 8192, 4, 600)
answer = {"calls": exllamav3.calls}
try:
    engine = StockEngine.load(import_package(), setup)
    engine.warm_up()
    answer["warm"] = len(exllamav3.calls)
    figures = {}
    rounds = Rounds(2, 3, 1000, 20, (1, 3), 1, 1)
    measure(StockPeer(engine, None, {}), rounds, figures.__setitem__)
    answer["figures"] = figures
    answer["free"] = engine._cache.free_slots
    ids, layers = tuple(range(10, 30)), config.num_layers
    pages = tuple(range(8))
    first = engine.step(StepPlan(1, prefill=PrefillSlice(2, ids, 0, pages, 0, layers, True)))
    then = engine.step(StepPlan(2, decode=(DecodeRow(2, 77, 20, pages),)))
    answer["tokens"] = [[token.slot, token.token_id] for token in first.tokens + then.tokens]
    answer["done"] = [first.prefill_done, then.prefill_done]
    try:
        engine.step(StepPlan(3, prefill=PrefillSlice(1, ids, 0, pages, 0, 2, True)))
    except EngineError as error:
        answer["paused"] = str(error)
    for number, layer in enumerate(engine.layers):
        layer.change_routing(lambda router, number=number: lambda *call: (number, router(*call)))
    answer["routed"] = [layer.mlp.routing_fn(1, None, None, {}) for layer in engine.layers]
    engine.close()
    engine.close()
except MachineError as error:
    answer["error"] = str(error)
print(json.dumps(answer))
"""


def run(folder: Path, model_dir: Path, heat: Path, version: str = "1.5.1", **environ: str) -> dict[str, Any]:
    (folder / "exllamav3").mkdir()
    (folder / "exllamav3/__init__.py").write_text(PACKAGE)
    (folder / "exllamav3/version.py").write_text(f"__version__ = {version!r}\n")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model_dir), str(heat)],
        env={**os.environ, **environ, "PYTHONPATH": f"{folder}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def heat(random_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bench.peers.heat import router_heat, save_heat
    from glm53srv.model.config import load_model_config

    path = tmp_path_factory.mktemp("heat") / "heat.json"
    save_heat(path, router_heat(load_model_config(random_model_dir), random_model_dir))
    return path


@pytest.fixture(scope="module")
def answer(random_model_dir: Path, heat: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("package"), random_model_dir, heat)


def test_the_package_is_told_how_to_split_and_places_by_heat(answer: dict[str, Any], heat: Path) -> None:
    keys = sorted(json.loads(heat.read_text()))
    assert answer["calls"][0] == ["load", "cuda:0", 5, 3, keys, "0"]


def test_every_shape_is_warm_before_it_is_timed(answer: dict[str, Any]) -> None:
    shapes = {json.dumps([call[0], call[1]]) for call in answer["calls"][1 : answer["warm"]]}
    for width in (1, 2, 3, 4):
        assert json.dumps(["forward", [width, 1]]) in shapes
    assert json.dumps(["forward", [1, 600]]) in shapes


def test_a_long_prompt_runs_in_chunks_and_its_last_one_to_the_logits(answer: dict[str, Any]) -> None:
    chunks = [call for call in answer["calls"][answer["warm"] :] if call[1:2] in ([[1, 600]], [[1, 400]])]
    assert [call[:4] for call in chunks] == [
        ["prefill", [1, 600], [0], [1, 3]],
        ["forward", [1, 400], [600], [1, 4]],
    ]


def test_decode_is_one_forward_for_all_rows_each_with_its_own_pages(answer: dict[str, Any]) -> None:
    steps = [call for call in answer["calls"][answer["warm"] :] if call[1:2] == [[3, 1]]]
    assert [call[2] for call in steps] == [[20 + step] * 3 for step in range(2 + 3)]
    assert all(call[3] == [3, 16] and call[4] == [0, 1, 2] for call in steps)
    assert answer["figures"]["decode_3"]["tok_s"] > 0


def test_states_are_given_back(answer: dict[str, Any]) -> None:
    assert answer["free"] == 5
    assert answer["calls"][-1] == ["unload"]
    assert answer["calls"].count(["unload"]) == 1


def test_tokens_are_the_likeliest_of_the_vocabulary_not_of_its_padding(answer: dict[str, Any]) -> None:
    assert answer["tokens"] == [[2, 30], [2, 78]]
    assert answer["done"] == [True, False]


def test_a_slice_that_stops_between_layers_is_refused(answer: dict[str, Any]) -> None:
    assert "all layers" in answer["paused"]


def test_another_version_is_refused(random_model_dir: Path, heat: Path, tmp_path: Path) -> None:
    assert "1.6.5 is installed" in run(tmp_path, random_model_dir, heat, "1.6.5")["error"]


def test_a_layer_that_was_not_split_is_noticed(random_model_dir: Path, heat: Path, tmp_path: Path) -> None:
    error = run(tmp_path, random_model_dir, heat, REFUSES="split")["error"]
    assert "keeps all experts of layer" in error


def test_a_layer_that_was_not_placed_by_heat_is_noticed(
    random_model_dir: Path, heat: Path, tmp_path: Path
) -> None:
    error = run(tmp_path, random_model_dir, heat, REFUSES="heat")["error"]
    assert "did not place the experts of layer" in error


def test_the_routers_can_be_replaced_layer_by_layer(answer: dict[str, Any], heat: Path) -> None:
    layers = len(json.loads(heat.read_text()))
    assert answer["routed"] == [[number, "the router's"] for number in range(layers)]
