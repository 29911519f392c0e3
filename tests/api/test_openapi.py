"""/openapi.json says what the server does."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from starlette.routing import Route

from tests.api.harness import MODEL, make_server, serving

VALID: dict[str, dict[str, Any]] = {
    "ChatCompletionRequest": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "CompletionRequest": {"prompt": "a", "max_tokens": 1},
    "GenerateRequest": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "TokenizeRequest": {"prompt": "a"},
    "DetokenizeRequest": {"tokens": [1]},
    "AbortRequest": {"rid": "x"},
}
NO_OWN_CHECK = {"TokenizeRequest": {"reasoning_effort", "chat_template_kwargs", "tools"}}
"""Fields that are read only together with messages."""


TEXT_FIELDS = ("rid", "text", "prompt", "model", "stop", "guided_regex", "guided_grammar")
OBJECT_FIELDS = ("logit_bias", "chat_template_kwargs", "sampling_params", "stream_options", "guided_json")


def wrong_values(name: str) -> list[Any]:
    """Give values of types that a field does not have."""
    wrongs: list[Any] = [] if name in TEXT_FIELDS else ["#"]
    wrongs.append(5.5 if name in OBJECT_FIELDS else {"x": []})
    return wrongs


def document() -> dict[str, Any]:
    async def main() -> Any:
        async with serving(make_server()) as client:
            return (await client.get("/openapi.json")).json()

    result: dict[str, Any] = asyncio.run(main())
    return result


def operations(doc: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, entry) for path, item in doc["paths"].items() for method, entry in item.items()]


def test_every_route_is_described_and_nothing_else() -> None:
    doc = document()
    routes = {
        (re.sub(r":\w+\}", "}", route.path), method.lower())
        for route in make_server().app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    described = {(path, method) for path, method, _ in operations(doc)}
    assert described == routes - {("/openapi.json", "get"), ("/docs", "get")}
    assert len({entry["operationId"] for _, _, entry in operations(doc)}) == len(described)


def test_every_reference_leads_somewhere() -> None:
    doc = document()
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(doc)))
    assert names <= set(doc["components"]["schemas"])
    assert set(VALID) == names - {"Error", "SamplingParams"}


@pytest.mark.parametrize("schema", VALID)
def test_every_described_field_is_checked_and_null_is_absent(schema: str) -> None:
    """A value of no described type is a 400 that names the field; null changes nothing."""
    doc = document()
    path = next(
        path for path, _, entry in operations(doc) if f"/{schema}" in json.dumps(entry.get("requestBody", {}))
    )
    properties = doc["components"]["schemas"][schema]["properties"]
    required = doc["components"]["schemas"][schema]["required"]

    async def main() -> None:
        async with serving(make_server()) as client:

            async def status(**fields: Any) -> tuple[int, Any]:
                body = json.dumps({**VALID[schema], **fields}).encode()
                answer = await client.open("POST", path, body).answer()
                return answer.status, answer.json()

            assert (await status())[0] == 200
            for name in properties:
                if name in NO_OWN_CHECK.get(schema, ()):
                    continue
                for wrong in wrong_values(name):
                    code, answer = await status(**{name: wrong})
                    assert code == 400, (name, wrong, answer)
                    assert answer["error"]["param"].startswith((name, "text", "prompt")), (name, answer)
                if name not in required and name not in VALID[schema]:
                    assert (await status(**{name: None}))[0] == 200, name

    asyncio.run(main())


def test_bounds_are_those_of_the_server() -> None:
    doc = document()

    async def main() -> None:
        async with serving(make_server()) as client:
            schemas = doc["components"]["schemas"]
            for schema, path in (
                ("ChatCompletionRequest", "/v1/chat/completions"),
                ("CompletionRequest", "/v1/completions"),
            ):
                for name, entry in schemas[schema]["properties"].items():
                    for key, beyond in (("minimum", -1), ("maximum", 1)):
                        if key not in entry:
                            continue
                        body = {
                            **VALID[schema],
                            "model": MODEL,
                            "logprobs": schema == "ChatCompletionRequest" or 1,
                        }
                        for value, expected in ((entry[key] + beyond, 400), (entry[key], 200)):
                            if name == "max_tokens" and value == 0:
                                body["echo"] = True
                            if name == "best_of":
                                body["n"] = value
                            data = json.dumps({**body, name: value}).encode()
                            answer = await client.open("POST", path, data).answer()
                            assert answer.status == expected, (name, value, answer.body)

    asyncio.run(main())


def test_the_page_lists_every_path() -> None:
    async def main() -> None:
        async with serving(make_server()) as client:
            page = await client.get("/docs")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            text = page.body.decode()
            assert "<script" not in text
            for path, _, _ in operations((await client.get("/openapi.json")).json()):
                assert f"<code>{path}</code>" in text

    asyncio.run(main())


@pytest.mark.parametrize(
    ("schema", "path"), [("GenerateRequest", "/generate"), ("TokenizeRequest", "/tokenize")]
)
def test_alternatives_are_those_of_the_server(schema: str, path: str) -> None:
    """Each alternative is taken alone; none of them and both together are refused."""
    doc = document()
    names = [entry["required"][0] for entry in doc["components"]["schemas"][schema]["oneOf"]]
    values = {
        "text": "a",
        "input_ids": [1],
        "prompt": "a",
        "messages": VALID["ChatCompletionRequest"]["messages"],
    }

    async def main() -> None:
        async with serving(make_server()) as client:
            for given, expected in ([names[0]], 200), ([names[1]], 200), ([], 400), (names, 400):
                body = json.dumps({name: values[name] for name in given}).encode()
                assert (await client.open("POST", path, body).answer()).status == expected, given

    asyncio.run(main())
