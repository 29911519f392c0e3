"""What the server says about itself, and the few things it can be told."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from glm53srv import __version__
from glm53srv.api.info_routes import describe_server
from glm53srv.config import load_config
from glm53srv.engine.fake import StepGate
from glm53srv.offload.calibrate import assume
from glm53srv.offload.cost import CostOverrides, default_costs
from glm53srv.offload.cost_ledger import CostLedger
from glm53srv.offload.report import OffloadCounts, OffloadReport
from tests.api.builders import small_tokenizer
from tests.api.harness import MODEL, Answer, Client, LoadGate, ids_of, make_server, serving


async def post(client: Client, path: str, **fields: Any) -> Answer:
    return await client.open("POST", path, json.dumps(fields).encode()).answer()


async def scrape(client: Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Read /metrics with Prometheus' own parser; gives values by name and labels but the model's."""
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation
        for sample in family.samples:
            labels = tuple(sorted(pair for pair in sample.labels.items() if pair[0] != "model_name"))
            values[sample.name, labels] = sample.value
    return values


def test_metrics_count_requests_tokens_and_times() -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            before = await scrape(client)
            assert before["vllm:request_success_total", (("finished_reason", "stop"),)] == 0
            server.script("r", "a</think>bc")
            usage = (await client.chat()).json()["usage"]
            await client.chat("cut", max_tokens=2, ignore_eos=True)
            values = await scrape(client)
            num_output = usage["completion_tokens"] + 2
            assert values["vllm:generation_tokens_total", ()] == num_output
            assert values["vllm:prompt_tokens_total", ()] == 2 * usage["prompt_tokens"]
            assert values["vllm:request_success_total", (("finished_reason", "stop"),)] == 1
            assert values["vllm:request_success_total", (("finished_reason", "length"),)] == 1
            assert values["vllm:num_requests_running", ()] == 0
            assert values["vllm:kv_cache_usage_perc", ()] == 0
            assert values["vllm:time_to_first_token_seconds_count", ()] == 2
            assert values["vllm:inter_token_latency_seconds_count", ()] == num_output - 2
            for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time"):
                assert values[f"vllm:{name}_seconds_count", ()] == 2
                assert values[f"vllm:{name}_seconds_sum", ()] >= 0
            assert values["vllm:request_generation_tokens_sum", ()] == num_output

    asyncio.run(main())


def test_metrics_show_what_runs_and_waits_and_how_it_ended() -> None:
    async def main() -> None:
        gate = StepGate()
        server = make_server(before_step=gate.pass_through, max_streams=1)
        async with serving(server) as client:
            gate.hold()
            first, second = client.open_chat("first", stream=True), client.open_chat("second", stream=True)
            await first.wait_for(b"assistant")
            await second.wait_for(b"assistant")
            await asyncio.to_thread(gate.wait_until_held)
            values = await scrape(client)
            assert values["vllm:num_requests_running", ()] == 1
            assert values["vllm:num_requests_waiting", ()] == 1
            assert values["vllm:kv_cache_usage_perc", ()] > 0
            first.disconnect()
            await first.task
            assert (await post(client, "/abort_request", rid="second")).json()["num_aborted"] == 1
            gate.open()
            await second.answer()
            values = await scrape(client)
            assert values["vllm:request_success_total", (("finished_reason", "abort"),)] == 2

    asyncio.run(main())


def test_servers_in_one_process_do_not_share_metrics() -> None:
    async def main() -> None:
        one, other = make_server(), make_server()
        async with serving(one) as client, serving(other) as second:
            await client.chat(max_tokens=1)
            assert (await scrape(client))["glm53srv:requests_total", ()] == 1
            assert (await scrape(second))["glm53srv:requests_total", ()] == 0

    asyncio.run(main())


def test_stats_show_the_scheduler_and_no_offload_where_there_is_none() -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            await client.chat(max_tokens=3, ignore_eos=True)
            stats = (await client.get("/stats")).json()
            assert (stats["status"], stats["step_loop"], stats["model"]) == ("ready", "running", MODEL)
            assert stats["scheduler"]["total_output_tokens"] == 3
            assert stats["scheduler"]["num_pages_used"] == 0
            assert stats["limits"]["max_streams"] == 4
            assert stats["offload"] is None
            assert stats["uptime_s"] >= 0

    asyncio.run(main())


def test_stats_show_the_engines_offload() -> None:
    async def main() -> None:
        ledger = CostLedger(assume(default_costs(2), CostOverrides(0.05)), CostOverrides(0.05), 8, "fast")
        report = OffloadReport(
            kind="simulate",
            mode="fast",
            num_slots=27,
            num_resident=25,
            num_lent=0,
            hit_share=0.5,
            counts=OffloadCounts(num_steps=3, num_vram=4, num_cpu=4),
            costs=ledger.report(1_000_000),
            crew_expert_ms=0.1,
            crew_threads=2,
        )
        async with serving(make_server(offload_report=report)) as client:
            shown = (await client.get("/stats")).json()["offload"]
            assert (shown["num_slots"], shown["hit_share"], shown["counts"]["num_vram"]) == (27, 0.5, 4)
            assert shown["costs"]["now"]["cpu_fixed_ms"] == 0.05
            assert shown["costs"]["sources"]["cpu_fixed_ms"] == "set"
            assert shown["costs"]["sources"]["zero_copy_ms"] == "assumed"
            assert shown["heat"] == {"path": None, "is_warm": False, "num_saves": 0}

    asyncio.run(main())


def test_server_info_spells_paths_as_text() -> None:
    environ = {"HOME": "/home/somebody"}
    config = load_config(["--model", "m", "--ec-heat", "/tmp/heat.npz"], environ)
    options = describe_server(config).options
    offload = options["offload"]
    assert isinstance(offload, dict)
    assert offload["heat_path"] == "/tmp/heat.npz"
    assert (options["model_dir"], options["tuning_dir"]) == ("m", "/home/somebody/.cache/glm53srv")
    assert orjson.loads(orjson.dumps(options))["model_dir"] == "m", "as the page is written"


def test_what_needs_no_model_answers_while_it_loads_and_the_rest_says_503() -> None:
    async def main() -> None:
        gate = LoadGate()
        async with serving(make_server(before_load=gate), wait=False) as client:
            for path in ("/metrics", "/stats", "/version", "/openapi.json", "/docs", "/health/live"):
                assert (await client.get(path)).status == 200, path
            for path in (
                "/server_info",
                "/model_info",
                "/v1/loads",
                "/health_generate",
                "/ready",
                "/flush_cache",
            ):
                answer = await client.get(path)
                assert (answer.status, answer.headers["retry-after"]) == (503, "5"), path
            for path in ("/tokenize", "/generate", "/v1/completions", "/abort_request"):
                assert (await post(client, path)).status == 503, path
            gate.let_go()
            await client.server.lifecycle.wait_settled()
            assert (await client.get("/ready")).status == 200

    asyncio.run(main())


def test_server_and_model_info_have_what_sglangs_clients_read() -> None:
    async def main() -> None:
        async with serving(make_server(max_context_tokens=512)) as client:
            for path in ("/server_info", "/get_server_info"):
                info = (await client.get(path)).json()
                assert info["max_req_input_len"] == 511
                assert info["max_total_num_tokens"] >= 512
                assert info["internal_states"][0]["num_running_reqs"] == 0
                assert info["version"] == __version__
                assert "tokenizer_path" in info
            for path in ("/model_info", "/get_model_info"):
                model = (await client.get(path)).json()
                assert (model["served_model_name"], model["is_generation"]) == (MODEL, True)
                assert model["has_image_understanding"] is False
            loads = (await client.get("/v1/loads")).json()
            assert loads["loads"][0]["token_usage"] == 0
            assert (await client.get("/version")).json() == {"version": __version__}

    asyncio.run(main())


def test_the_description_names_no_secret() -> None:
    """Only options that are listed as harmless are shown, so an option of tomorrow is not."""
    config = load_config(["--model", "/models/x", "--port", "1234"], {})
    info = describe_server(config)
    assert info.options["port"] == 1234
    assert info.options["model_dir"] == "/models/x"
    assert not [name for name in info.options if "key" in name or ("token" in name and "tokens" not in name)]
    assert info.launch_command == "glm53srv serve --model /models/x"


def test_health_generate_runs_one_token_and_leaves_nothing() -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            assert (await client.get("/health_generate")).json()["status"] == "ready"
            assert server.steps.stats().total_output_tokens == 1
            server.check_idle()

    asyncio.run(main())


def test_a_health_probe_that_leaves_frees_its_place() -> None:
    async def main() -> None:
        gate = StepGate()
        server = make_server(before_step=gate.pass_through)
        async with serving(server) as client:
            gate.hold()
            probe = client.open("GET", "/health_generate")
            await asyncio.to_thread(gate.wait_until_held)
            probe.disconnect()
            await probe.task
            assert probe.sent == []
            gate.open()
            await client.chat(max_tokens=1)
            server.check_idle()

    asyncio.run(main())


def test_abort_request_ends_one_request_with_its_choices_or_all() -> None:
    async def main() -> None:
        server = make_server(max_context_tokens=100_000)
        async with serving(server) as client:
            body = {"text": ["one", "two"], "rid": "job", "stream": True}
            body["sampling_params"] = {"ignore_eos": True, "n": 2}
            job = client.open("POST", "/generate", json.dumps(body).encode())
            other = client.open_chat("other", stream=True, ignore_eos=True)
            for exchange in (job, other):
                await exchange.wait_for(b'"index":0')
            assert (await post(client, "/abort_request", rid="nobody")).json()["num_aborted"] == 0
            assert (await post(client, "/abort_request", rid="job")).json()["num_aborted"] == 4
            events = (await job.answer()).events()
            ends = {e["index"]: e["meta_info"]["finish_reason"] for e in events[:-1]}
            assert [ends[at]["type"] for at in range(4)] == ["abort"] * 4
            assert (await post(client, "/abort_request", abort_all=True)).json()["num_aborted"] == 1
            assert (await other.answer()).events()[-2]["choices"][0]["finish_reason"] == "abort"
            for fields in ({}, {"rid": 5}, {"abort_all": "x"}):
                assert (await post(client, "/abort_request", **fields)).status == 400
            await client.chat(max_tokens=1)
            server.check_idle()

    asyncio.run(main())


def test_flush_cache_is_taken_by_get_and_post() -> None:
    async def main() -> None:
        async with serving(make_server()) as client:
            assert (await client.get("/flush_cache")).json()["success"] is True
            assert (await post(client, "/flush_cache")).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokenize_takes_text_texts_and_messages(path: str) -> None:
    async def main() -> None:
        async with serving(make_server()) as client:
            one = (await post(client, path, prompt="the <|user|>hello")).json()
            ids = small_tokenizer().encode_with_controls("the <|user|>hello")
            assert one == {"tokens": ids, "count": len(ids), "max_model_len": 1024}
            assert (await post(client, path, content="the <|user|>hello")).json() == one
            many = (await post(client, path, prompt=["a", "bcd"])).json()
            assert many["tokens"] == [ids_of("a"), ids_of("bcd")]
            assert many["count"] == [1, 3]
            assert (await post(client, path, prompt="")).json()["tokens"] == []
            messages = [{"role": "user", "content": "hello"}]
            chat = (await post(client, path, messages=messages)).json()
            usage = (await client.chat(messages=messages, max_tokens=1)).json()["usage"]
            assert chat["count"] == usage["prompt_tokens"]
            low = (await post(client, path, messages=messages, reasoning_effort="low")).json()
            assert low["tokens"] != chat["tokens"]
            named = (await post(client, path, prompt="é", return_token_strs=True)).json()
            assert named["token_strs"] == ["\ufffd", "\ufffd"]
            pieces = (await post(client, path, content="é!", with_pieces=True)).json()
            assert [entry["piece"] for entry in pieces["tokens"]] == [[0xC3], [0xA9], "!"]

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_detokenize_is_the_way_back(path: str) -> None:
    async def main() -> None:
        async with serving(make_server()) as client:
            ids = small_tokenizer().encode_with_controls("héllo<|user|></think>!")
            whole = (await post(client, path, tokens=ids, skip_special_tokens=False)).json()
            assert whole["text"] == whole["prompt"] == whole["content"] == "héllo<|user|></think>!"
            assert (await post(client, path, tokens=ids)).json()["text"] == "héllo</think>!"
            assert (await post(client, path, tokens=[ids_of("a"), ids_of("b")])).json()["text"] == ["a", "b"]
            assert (await post(client, path, tokens=[])).json()["text"] == ""

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": ["a", 1]}, "prompt[1]"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "with_pieces": 1}, "with_pieces"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [[1], [10**7]]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, None]}, "tokens[0]"),
    ],
)
def test_wrong_input_names_the_field(path: str, fields: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with serving(make_server()) as client:
            answer = await post(client, path, **fields)
            assert (answer.status, answer.json()["error"]["param"]) == (400, param), answer.body

    asyncio.run(main())


def test_probes_are_quiet_also_while_the_model_loads(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        gate = LoadGate()
        async with serving(make_server(before_load=gate), wait=False) as client:
            with caplog.at_level(logging.INFO, "glm53srv.api.routes"):
                for path in ("/health", "/ready", "/health/live", "/metrics"):
                    await client.get(path)
                assert caplog.records == []
                await client.get("/v1/models")
                assert len(caplog.records) == 1
            gate.let_go()
            await client.server.lifecycle.wait_settled()

    asyncio.run(main())
