"""The checks at the size they are for: 147,000 tensors in 15 files of 122 GB, without the bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from glm53srv.config import Config, load_config
from glm53srv.doctor.examine import examine, require_servable
from glm53srv.doctor.findings import Severity
from glm53srv.doctor.model import open_model
from glm53srv.engine.factory import EngineChoice
from glm53srv.errors import CheckpointError, MachineError
from glm53srv.machine import GIB
from glm53srv.model.published import PUBLISHED
from glm53srv.model.weight_sizes import checkpoint_sizes, published_sizes
from tests.doctor.full_size import write_full_size
from tests.pretended_machine import RTX_3090, PretendedProbe, server_machine, with_gpu


def use_cuda(config: object, machine: object, version: object) -> EngineChoice:
    """Choose as a version does that can use the GPU."""
    return EngineChoice("cuda", "for the test")


@pytest.fixture(scope="module")
def full_size_dir(random_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full_size(tmp_path_factory.mktemp("full-size"), random_model_dir)


def configure(model_dir: Path, *arguments: str) -> Config:
    return load_config(["--model", str(model_dir), "--port", "0", *arguments], {}, num_cores=24)


def test_its_files_are_of_the_published_sizes(full_size_dir: Path) -> None:
    opened = open_model(configure(full_size_dir).engine)
    assert opened.config == PUBLISHED
    assert checkpoint_sizes(opened.config, opened.checkpoint) == published_sizes()
    quantised = [name for name in opened.checkpoint.names() if name.endswith(".trellis")]
    # The published text part has 147,017 tensors and 22 more in kpool_aux; mul1 is left out here.
    assert len(opened.checkpoint.names()) + len(quantised) == 147_017 + 22


def test_a_good_machine_serves_it_and_a_smaller_one_does_not(full_size_dir: Path) -> None:
    config = configure(full_size_dir)
    good = dataclasses.replace(with_gpu(RTX_3090), rate=3e9)
    findings = {finding.name: finding for finding in examine(config, good, use_cuda)}
    assert [name for name, finding in findings.items() if finding.severity is not Severity.OK] == []
    assert findings["gpu memory"].text.startswith("1568 experts in VRAM; fits")
    assert "40.6 s for the weights" in findings["disk"].text
    with pytest.raises(MachineError, match=r"RAM: 111.1 GiB needed, 96.0 there: .*; add 16 GiB of RAM"):
        require_servable(config, with_gpu(RTX_3090, limit_bytes=96 * GIB), use_cuda)


def test_the_cpu_engine_wants_all_of_it_in_memory(full_size_dir: Path) -> None:
    with pytest.raises(MachineError, match=r"= 118.0 GiB, usable 8.0 \(control group limit 8.0\); free some"):
        require_servable(configure(full_size_dir), PretendedProbe(server_machine(limit_bytes=8 * GIB)))


def test_a_missing_shard_is_named_among_fifteen(full_size_dir: Path) -> None:
    shard = full_size_dir / "model-00007-of-00015.safetensors"
    away = shard.rename(full_size_dir / "away")
    try:
        with pytest.raises(CheckpointError, match=r"model-00007-of-00015\.safetensors is missing; fetch"):
            open_model(configure(full_size_dir).engine)
    finally:
        away.rename(shard)
