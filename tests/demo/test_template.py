"""The demo's chat template writes GLM's prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from reference.demo.rendering import load_template

CASES = (
    "plain",
    "system",
    "effort_medium_falls_to_max",
    "enable_thinking_false_ignored",
    "tools",
    "tool_turn_results_out_of_order_null_content",
    "tool_turn_empty_content",
    "history_default",
    "history_clear_true",
    "history_clear_false",
    "history_inline_think",
    "history_no_reasoning",
    "parts",
    "image_part",
)


def goldens(shared_dir: Path) -> dict[str, Any]:
    path = shared_dir / "fixtures/glm/template_goldens.json"
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


@pytest.mark.parametrize("name", CASES)
def test_prompt_equals_the_official_templates(shared_dir: Path, name: str) -> None:
    case = goldens(shared_dir)[name]

    prompt = load_template().render(case["input"])

    assert prompt == case["render"]["04sep"]["prompt"]


def test_every_golden_case_is_covered(shared_dir: Path) -> None:
    assert set(goldens(shared_dir)) == {*CASES, "args_as_json_string"}


def test_arguments_as_text_are_refused_like_the_official_template_does(shared_dir: Path) -> None:
    case = goldens(shared_dir)["args_as_json_string"]

    with pytest.raises(jinja2.UndefinedError):
        load_template().render(case["input"])


def test_results_with_an_unknown_id_stay_in_given_order() -> None:
    call = {"name": "f", "arguments": {}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": call}]},
        {"role": "tool", "tool_call_id": "other", "content": "1"},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]

    prompt = load_template().render({"messages": messages})

    assert prompt.endswith("<|observation|><tool_response>1</tool_response><tool_response>2</tool_response>")
