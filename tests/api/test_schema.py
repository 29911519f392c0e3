"""Fields of a chat request: honoured, refused with their name, or ignored."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53srv.api.schema import IGNORED_FIELDS, REFUSED_FIELDS, ChatRequest, parse_chat_request
from glm53srv.api.wire import is_too_deep, parse_body
from glm53srv.errors import InvalidRequest
from glm53srv.request import SamplingParams

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.95)
MESSAGES = [{"role": "user", "content": "hi"}]


def parse(**fields: Any) -> ChatRequest:
    return parse_chat_request({"messages": MESSAGES, **fields}, DEFAULTS)


def test_a_bare_request_takes_the_defaults_of_the_checkpoint() -> None:
    request = parse()
    assert request.sampling == DEFAULTS
    assert (request.max_tokens, request.num_choices, request.is_stream, request.stop) == (None, 1, False, ())


def test_null_is_not_given() -> None:
    names = (
        "temperature",
        "top_p",
        "seed",
        "stop",
        "n",
        "tools",
        "tool_choice",
        "stream",
        "logit_bias",
        "model",
    )
    assert parse(**dict.fromkeys(names)) == parse()


def test_all_sampling_fields_are_honoured() -> None:
    sampling = parse(
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        seed=-3,
        logit_bias={"5": -100, "7": 2.5},
        logprobs=True,
        top_logprobs=3,
        stop_token_ids=[9],
        min_tokens=2,
        ignore_eos=True,
    ).sampling
    assert sampling == SamplingParams(
        temperature=0.0,
        top_k=40,
        top_p=0.5,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        seed=-3,
        logit_bias=((5, -100.0), (7, 2.5)),
        num_logprobs=3,
        stop_token_ids=(9,),
        min_tokens=2,
        ignore_eos=True,
    )


def test_logprobs_without_a_number_gives_the_sampled_token_only() -> None:
    assert parse(logprobs=True).sampling.num_logprobs == 0
    assert parse(logprobs=False, top_logprobs=0).sampling.num_logprobs is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
)
def test_both_names_of_the_output_limit(fields: dict[str, int], expected: int) -> None:
    assert parse(**fields).max_tokens == expected


def test_top_k_minus_one_is_off_and_a_whole_float_is_whole() -> None:
    assert parse(top_k=-1).sampling.top_k == 0
    assert parse(top_k=3.0).sampling.top_k == 3


@pytest.mark.parametrize(("stop", "expected"), [("x", ("x",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_is_a_string_or_a_list(stop: Any, expected: tuple[str, ...]) -> None:
    assert parse(stop=stop).stop == expected


@pytest.mark.parametrize(
    ("fields", "enable", "clear", "effort"),
    [
        ({}, True, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, False, None),
        ({"chat_template_kwargs": {"thinking": False, "clear_thinking": True}}, False, True, None),
        ({"enable_thinking": False}, False, False, None),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, True, False, None),
        ({"thinking": {"type": "disabled", "clear_thinking": True}}, False, True, None),
        ({"thinking": {"type": "enabled"}}, True, False, None),
        ({"reasoning_effort": "none"}, True, False, "low"),
        ({"reasoning_effort": "minimal"}, True, False, "low"),
        ({"reasoning_effort": "medium"}, True, False, "max"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            True,
            False,
            "high",
        ),
    ],
)
def test_thinking_options(fields: dict[str, Any], enable: bool, clear: bool, effort: str | None) -> None:
    template = parse(**fields).template
    assert (template.enable_thinking, template.clear_thinking, template.reasoning_effort) == (
        enable,
        clear,
        effort,
    )


def test_template_arguments_nobody_reads_are_reported() -> None:
    assert parse(chat_template_kwargs={"enable_thnking": False, "thinking": True}).ignored == (
        "enable_thnking",
    )


def test_tool_choice_none_hides_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert len(parse(tools=tools).tools) == 1
    assert len(parse(tools=tools, tool_choice="auto").tools) == 1
    assert parse(tools=tools, tool_choice="none").tools == ()


def test_unknown_and_ignored_fields_change_nothing() -> None:
    assert parse(**dict.fromkeys(IGNORED_FIELDS, "x"), some_new_field={"a": 1}) == parse()


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_fields_that_cannot_be_honoured_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**{name: {"a": 1}})
    assert caught.value.param == name
    assert parse(**{name: None}) == parse()


BAD = [
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", -1),
    ("temperature", 101),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("seed", "x"),
    ("seed", 1.5),
    ("seed", 2**64),
    ("max_tokens", 0),
    ("max_tokens", "many"),
    ("max_completion_tokens", -1),
    ("min_tokens", -1),
    ("n", 0),
    ("n", 17),
    ("n", True),
    ("stream", "yes"),
    ("ignore_eos", 1),
    ("logprobs", 2),
    ("stop", 3),
    ("stop", ""),
    ("stop", ["a"] * 65),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", "1"),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {"1": 101}),
    ("model", 3),
    ("reasoning_effort", "huge"),
    ("reasoning_effort", 3),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tools", {}),
    ("modalities", ["text", "audio"]),
    ("continue_final_message", True),
    ("add_generation_prompt", False),
    ("parallel_tool_calls", "no"),
    ("stream_options", True),
    ("chat_template_kwargs", []),
    ("response_format", "json"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ],
)
def test_a_bad_member_names_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":"m", x}',
        b"null",
        b"[]",
        b"123",
        b'"a"',
        b'{"a":NaN}',
        b"\xff",
        b'{"a":"\\ud800"}',
    ],
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Request body"):
        parse_body(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "messages",
        "tools",
        "stop",
        "n",
        "temperature",
        "logit_bias",
        "stream_options",
        "thinking",
        "tool_choice",
        "top_logprobs",
        "response_format",
        "chat_template_kwargs",
        "seed",
        "max_tokens",
        "modalities",
    ]
)


@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_any_json_is_a_request_or_an_invalid_request(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):  # and nothing else
        request = parse_chat_request({"messages": MESSAGES, **fields}, DEFAULTS)
        assert request.messages


def test_depth_is_measured_without_recursion() -> None:
    value: Any = 1
    for _ in range(50_000):
        value = [value]
    assert is_too_deep(value)
    assert not is_too_deep([[[{"a": [1]}]]], limit=5)
    assert is_too_deep([[[1]]], limit=2)
