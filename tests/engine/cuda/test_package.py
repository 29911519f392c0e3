"""Opening exllamav3: numerics are set before it is read, choices are kept, what is wrong is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53srv.engine.cuda.package import EXTENSION_SEAMS, PINNED, SEAMS, gemm_file_name, numerics_of
from glm53srv.engine.cuda.pins import Pin, write_pins
from glm53srv.offload.cost import Mode
from tests.engine.cuda.fake_packages import EXTENSION, FILES, TORCH, open_in_process


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_the_modes_numerics_are_in_the_environment(tmp_path: Path, mode: Mode) -> None:
    opened = open_in_process(tmp_path, mode, environ={"EXL3_INT8_GEMV": "2"})
    assert numerics_of(mode, (8, 6)).items() <= opened["environ"].items()
    assert opened["environ"]["CUDA_MODULE_LOADING"] == "LAZY"
    assert "EXLLAMAV3_TUNE_CACHE" not in opened["environ"]


@pytest.mark.parametrize(
    ("mode", "capability", "sums"),
    [("fast", (8, 6), "1"), ("fast", (12, 0), "1"), ("fast", (9, 0), "0"), ("exact", (8, 9), "0")],
)
def test_fp16_sums_are_for_fast_mode_on_cards_that_gain_by_them(
    mode: Mode, capability: tuple[int, int], sums: str
) -> None:
    numerics = numerics_of(mode, capability)
    assert numerics["EXL3_HGEMM_F16ACC"] == sums
    assert numerics.keys() == PINNED[mode].keys()


def test_each_autotuner_is_left_its_first_configuration(tmp_path: Path) -> None:
    opened = open_in_process(tmp_path)
    assert opened["kernels"] == {"one_kernel": [16], "two_kernel": [128]}
    assert opened["pin_file"] == "sm86-triton3.6.json"


def test_a_pin_file_of_this_architecture_and_triton_is_followed(tmp_path: Path) -> None:
    pins = {"one_kernel": Pin((("BK", 64),), 4, 2), "two_kernel": Pin((("BK", 512),), 8, 3)}
    write_pins(tmp_path / "tuned" / "sm86-triton3.6.json", pins, "here")
    opened = open_in_process(tmp_path / "site", tuning_dir=tmp_path / "tuned")
    assert opened["kernels"] == {"one_kernel": [64], "two_kernel": [512]}
    write_pins(tmp_path / "tuned2" / "sm90-triton3.6.json", pins, "another card's")
    opened = open_in_process(tmp_path / "site", tuning_dir=tmp_path / "tuned2")
    assert opened["kernels"] == {"one_kernel": [16], "two_kernel": [128]}
    assert any("sm86-triton3.6.json is not in" in line for line in opened["log"])


def test_the_command_that_makes_pins_finds_them_untouched(tmp_path: Path) -> None:
    opened = open_in_process(tmp_path, pins_kernels=False)
    assert opened["kernels"] == {"one_kernel": [16, 32, 64], "two_kernel": [128, 256]}


def test_gemm_choices_are_kept_by_model_of_the_gpu(tmp_path: Path) -> None:
    opened = open_in_process(tmp_path / "site", tuning_dir=tmp_path / "new" / "folder")
    path = Path(opened["environ"]["EXLLAMAV3_TUNE_CACHE"])
    assert path == tmp_path / "new/folder/gemm-NVIDIA-GeForce-RTX-3090-exllamav3-1.5.1.bin"
    assert path.is_file()
    path.write_bytes(b"kept")
    open_in_process(tmp_path / "site", tuning_dir=tmp_path / "new" / "folder")
    assert path.read_bytes() == b"kept"


def test_the_packages_own_variable_goes_before(tmp_path: Path) -> None:
    opened = open_in_process(
        tmp_path / "site", tuning_dir=tmp_path / "tuned", environ={"EXLLAMAV3_TUNE_CACHE": "/my/file"}
    )
    assert opened["environ"]["EXLLAMAV3_TUNE_CACHE"] == "/my/file"


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    opened = open_in_process(tmp_path / "site", tuning_dir=tmp_path / "file")
    assert "EXLLAMAV3_TUNE_CACHE" not in opened["environ"]
    (line,) = [line for line in opened["log"] if "cannot be written" in line]
    assert "--tuning-dir" in line


def test_names_of_gpus_make_names_of_files() -> None:
    assert gemm_file_name("NVIDIA H200") == "gemm-NVIDIA-H200-exllamav3-1.5.1.bin"
    assert gemm_file_name("NVIDIA RTX 4090 (Ti/Super)") == "gemm-NVIDIA-RTX-4090-Ti-Super-exllamav3-1.5.1.bin"


REFUSALS = [
    ({"torch/__init__.py": TORCH.replace("return True", "return False")}, "torch finds no CUDA device"),
    (
        {"exllamav3/version.py": "__version__ = '1.6.5'\n"},
        "exllamav3 1.6.5 is installed, this engine needs 1.5.1",
    ),
    (
        {"exllamav3/__init__.py": "import no_such_package\n"},
        "cannot import exllamav3 (No module named 'no_such",
    ),
    (
        {"exllamav3/__init__.py": "raise OSError('CUDA_HOME is not set')\n"},
        "cannot load exllamav3: CUDA_HOME",
    ),
    (
        {"exllamav3/ext.py": EXTENSION.replace("pinned_cuda_view", "other")},
        "extension lacks pinned_cuda_view",
    ),
    (
        {"exllamav3/cache/cache.py": "class Cache:\n    get_new_state = 1\n"},
        "exllamav3's Cache lacks release_state: the package was changed",
    ),
    (
        {"exllamav3/modules/block_sparse_mlp.py": "class BlockSparseMLP:\n    forward = 1\n"},
        "BlockSparseMLP lacks load_local, cpu_split_combine",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSALS, ids=[reason[:30] for _, reason in REFUSALS])
def test_a_package_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    told = open_in_process(tmp_path, changes=changes)["error"]
    assert reason in told
    assert "\n" not in told


def test_an_import_with_other_numerics_is_refused(tmp_path: Path) -> None:
    told = open_in_process(tmp_path, imports_before=True)["error"]
    assert "exllamav3 was imported with other numerics" in told
    assert "start a new process" in told
    opened = open_in_process(tmp_path, imports_before=True, environ=PINNED["exact"])
    assert "error" not in opened


def test_the_files_stand_for_every_seam() -> None:
    for path, names in SEAMS.items():
        module, _, _ = path.rpartition(".")
        text = FILES[f"{module.replace('.', '/')}.py"]
        assert all(name in text for name in names)
    assert all(name in EXTENSION for name in EXTENSION_SEAMS)
