"""`glm53srv doctor --plan` as a user runs it, for this machine and for one that is not bought yet."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from glm53srv.__main__ import main
from glm53srv.machine import GIB
from tests.pretended_machine import RTX_3090, PretendedProbe, server_machine, with_gpu


def run(
    capsys: pytest.CaptureFixture[str], *words: str, probe: PretendedProbe | None = None
) -> tuple[int, str]:
    code = main(["doctor", "--plan", *words], probe or PretendedProbe(server_machine(nvidia_devices=())))
    return code, capsys.readouterr().out


def run_json(
    capsys: pytest.CaptureFixture[str], *words: str, probe: PretendedProbe | None = None
) -> dict[str, Any]:
    code, text = run(capsys, "--json", *words, probe=probe)
    answer: dict[str, Any] = json.loads(text)
    assert answer["exit_code"] == code
    assert answer["fits"] == (code == 0)
    return answer


def test_a_machine_that_is_not_bought_yet(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--vram", "24", "--ram", "128")
    assert code == 0
    assert "built-in numbers of GLM-5.3-Flash" in text
    assert "8448 of 131072 tokens (-cs) from the start x 11264 B" in text
    assert text.splitlines()[-1].startswith("fits; the largest cache that does is -cs ")


def test_the_largest_cache_that_is_named_fits_and_one_more_page_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = run_json(capsys, "--vram", "24", "--ram", "128", "-cs", "2000000")
    assert not answer["fits"]
    largest = answer["largest_cache_tokens"]
    assert answer["verdict"] == f"does not fit: use -cs {largest}"
    assert run_json(capsys, "--vram", "24", "--ram", "128", "-cs", str(largest))["fits"]
    assert not run_json(capsys, "--vram", "24", "--ram", "128", "-cs", str(largest + 1))["fits"]


def test_an_8_gb_control_group_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    probe = with_gpu(RTX_3090, limit_bytes=8 * GIB)
    answer = run_json(capsys, probe=probe)
    assert answer["problems"] == ["RAM: 111.1 GiB needed, 8.0 there: all experts lie in RAM"]
    assert answer["verdict"] == "does not fit: add 104 GiB of RAM or free it"
    assert answer["exit_code"] == 4


def test_a_card_too_small_for_any_context(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "--vram", "8", "--ram", "128")
    assert answer["largest_cache_tokens"] is None
    assert answer["verdict"].startswith("does not fit with any -cs: ")


def test_mode_and_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    def slots(*words: str, name: str = "slots") -> int:
        found = run_json(capsys, "--vram", "24", "--ram", "128", *words)[name]
        assert isinstance(found, int)
        return found

    plain = slots()
    assert slots("--mode", "exact") > plain
    assert slots("--ec-max-slots", "320") == 320
    assert slots("--ec-reserve-gb", "3") < plain
    assert slots("--max-streams", "1") > plain
    assert slots("-cs", "32768", name="page_slots") < slots(name="page_slots") < plain


def test_a_real_card_counts_by_what_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    busy = dataclasses.replace(RTX_3090, free_bytes=20 * GIB)
    answer = run_json(capsys, probe=with_gpu(busy))
    assert answer["vram"][0] == {
        "name": "GPU memory",
        "bytes": 20 * GIB,
        "basis": "measured",
        "reason": "free on this GPU",
        "is_part": False,
    }
    assert answer["slots"] < run_json(capsys, probe=with_gpu(RTX_3090))["slots"]


def test_without_a_gpu_the_plan_is_for_the_cpu_engine(
    capsys: pytest.CaptureFixture[str], random_model_dir: Path
) -> None:
    answer = run_json(capsys, "--model", str(random_model_dir))
    assert (answer["engine"], answer["vram"], answer["model"]) == ("cpu", [], str(random_model_dir))
    small = run_json(capsys, "--model", str(random_model_dir), "--ram", "0.05", "-cs", "131072")
    assert small["verdict"] == f"does not fit: use -cs {small['largest_cache_tokens']}"
    words = ("--model", str(random_model_dir), "--ram", "0.05", "-cs")
    assert run_json(capsys, *words, str(small["largest_cache_tokens"]))["fits"]


def test_the_published_model_on_the_cpu_needs_all_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "--ram", "160")["fits"]
    answer = run_json(capsys, "--ram", "100")
    assert answer["verdict"].startswith("does not fit with any -cs")


def test_a_checkpoint_that_is_named_is_used(
    capsys: pytest.CaptureFixture[str], random_model_dir: Path
) -> None:
    answer = run_json(capsys, "--vram", "24", "--model", str(random_model_dir))
    assert answer["model"] == str(random_model_dir)
    assert answer["slots"] == 224  # all of them


def test_a_wrong_checkpoint_says_how_to_plan_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--plan", "--model", str(tmp_path)], with_gpu(RTX_3090)) == 3
    assert "leave --model and GLM53_MODEL_DIR away" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--vram", "much"], ["--vram", "0"], ["--ram", "nan"], ["--ram", "-1"]])
def test_a_pretended_size_must_be_one(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", *words]) == 2
    assert "must be a number of GiB above 0" in capsys.readouterr().err


def test_a_pretended_machine_belongs_to_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--vram", "24"]) == 2
    assert "add --plan" in capsys.readouterr().err
