"""Metrics of the frontend: what requests leave behind, the engines' gauges, and vLLM's names."""

from __future__ import annotations

import asyncio
import functools
from contextlib import aclosing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.fake_engine import FakeEngine, eventually
from tests.helpers.frontend import answer, collect, frontend_core, raw_request
from tests.helpers.grpc_api import open_api
from triptych.admin.v1 import admin_pb2
from triptych.config.api_keys import entry_line
from triptych.errors import ModelNotFound
from triptych.observe.metrics import EngineGauges, FrontendMetrics, VllmNames
from triptych.types.events import DeltaEvent
from triptych.types.outputs import FinishReason
from triptych.types.sampling import OutputKind
from triptych.v1 import model_pb2
from triptych_services.frontend.access.keys import MAX_TENANT_LABELS, ApiKeys, label_of_tenant
from triptych_services.frontend.app import count_choices_without_token
from triptych_services.frontend.engines.status_watch import StatusWatch

PER_REQUEST = (
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
)
PER_CHOICE = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_time_per_output_token_seconds",
)


async def test_an_answer_is_observed_once_in_each_histogram_of_its_model() -> None:
    async with FakeEngine(lambda request: [65] * 9) as engine, frontend_core(engine) as core:
        got = await answer(core.generator, raw_request(sampling={"max_tokens": 9, "n": 2}))
        num_tokens = got.finished.usage.num_output_tokens
        assert num_tokens == 18
        assert core.metric("prompt_tokens_total", model_name="tiny") == got.finished.usage.num_prompt_tokens
        assert core.metric("generation_tokens_total", model_name="tiny") == num_tokens
        assert core.metric("request_generation_tokens_sum", model_name="tiny") == num_tokens
        assert core.metric("request_params_max_tokens_sum") == 9
        assert core.metric("request_max_num_generation_tokens_sum", model_name="tiny") == 9
        assert core.metric("request_success_total", model_name="tiny", finished_reason="length") == 2
        assert {name: core.metric(f"{name}_count") for name in PER_REQUEST} == dict.fromkeys(PER_REQUEST, 1)
        assert {name: core.metric(f"{name}_count") for name in PER_CHOICE} == dict.fromkeys(PER_CHOICE, 2)


async def test_tokens_of_a_stream_are_counted_while_it_runs() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        async with aclosing(core.generator.generate(raw_request(sampling={"max_tokens": 9}))) as events:
            first = asyncio.ensure_future(anext(events))
            request = await engine.next_submit()
            engine.emit(request, [])
            await first
            for num_so_far in (1, 2, 3):
                engine.emit(request, [65])
                assert isinstance(await anext(events), DeltaEvent)
                assert core.metric("generation_tokens_total") == num_so_far
                assert core.metric("inter_token_latency_seconds_count") == num_so_far - 1
        assert core.metric("generation_tokens_total") == 3, (
            "those of an answer that its client left count, too"
        )
        assert core.metric("request_success_total") == 0


async def test_tokens_of_a_whole_answer_are_counted_at_its_end() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        task = asyncio.create_task(collect(core.generator, raw_request(output_kind=OutputKind.FINAL_ONLY)))
        engine.emit(await engine.next_submit(), [65, 65, 65], finish=FinishReason.LENGTH)
        await task
        assert core.metric("generation_tokens_total") == 3
        assert core.metric("inter_token_latency_seconds_count") == 0


async def test_the_longest_choice_is_observed() -> None:
    async with FakeEngine(lambda request: [65] * (3 + 4 * request.index) + [299]) as engine:
        async with frontend_core(engine) as core:
            await answer(core.generator, raw_request(sampling={"max_tokens": 20, "n": 3}))
            lengths = core.metric("request_generation_tokens_sum")
            assert core.metric("request_max_num_generation_tokens_sum") == 3 + 4 * 2 + 1
            assert lengths > 3 + 4 * 2 + 1


async def test_choices_without_a_token_are_counted_by_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(entry_line("a", "key-a", tenant="acme"))
    keys = ApiKeys(file)
    async with FakeEngine() as engine, frontend_core(engine) as core:
        counts = functools.partial(count_choices_without_token, core.generator.alive, keys)
        assert counts() == {}
        tasks = [
            asyncio.create_task(collect(core.generator, raw_request(tenant=tenant, sampling={"n": n})))
            for tenant, n in (("acme", 3), ("made-up-1", 1), ("made-up-2", 1), ("", 1))
        ]
        await engine.next_submit(5)
        await eventually(lambda: counts() == {"acme": 3, "other": 2, "": 1})
        first = next(choice for choice in engine.submitted if choice.request.head.tenant == "acme")
        engine.emit(first, [65])
        await eventually(lambda: counts()["acme"] == 2)
        for choice in engine.submitted:
            engine.emit(choice, [65], finish=FinishReason.LENGTH)
        await asyncio.gather(*tasks)
        assert counts() == {}


def test_tenants_beyond_a_bound_have_one_label(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    lines = [entry_line(f"k{i}", f"key-{i}", tenant=f"t{i}") for i in range(MAX_TENANT_LABELS + 5)]
    file.write_text("\n".join(lines))
    keys = ApiKeys(file)
    labels = {label_of_tenant(f"t{i}", keys) for i in range(MAX_TENANT_LABELS + 50)}
    assert labels == {*(f"t{i}" for i in range(MAX_TENANT_LABELS)), "other"}
    assert label_of_tenant("", keys) == ""
    assert label_of_tenant("t0", None) == "other", "without keys a tenant is what a client claims"


async def test_a_refused_request_has_no_model_and_no_latency() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        with pytest.raises(ModelNotFound):
            await collect(core.generator, raw_request(model="another"))
        assert core.metric("requests_total", model_name="", outcome="MODEL_NOT_FOUND") == 1
        assert core.metric("e2e_request_latency_seconds_count") == 0


async def test_the_engines_gauges_come_and_go_with_the_engine() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        watch = StatusWatch()
        core.registry.register(EngineGauges(watch.latest, lambda: watch.states(core.router.engines)))
        task = asyncio.create_task(watch.follow(core.router.engines[0]))
        who = {"model_name": "tiny", "engine": "engine-0"}
        await eventually(lambda: core.metric("num_requests_running", **who) == 3)
        assert core.metric("kv_cache_usage_perc", **who) == 0.25
        assert core.metric("cache_config_info", **who, block_size="16", num_gpu_blocks="8") == 1
        assert core.metric("engine_ready", **who) == 1
        assert core.metric("engines", state="ready") == 1
        assert core.metric("engines", state="lost") == 0
        await engine.die()
        await eventually(lambda: not list(watch.latest()))
        await eventually(lambda: core.metric("engines", state="lost") == 1)
        assert core.metric("engine_ready", **who) == 0, "an alert needs a value, under the last name"
        await engine.start()
        await eventually(lambda: core.metric("num_requests_running", **who) == 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_vllm_s_names_say_the_same_in_the_text_that_scrapers_read() -> None:
    """The names are those that the model-server protocol of inference gateways maps for vLLM."""
    async with FakeEngine(lambda request: [65] * 4) as engine, frontend_core(engine) as core:
        watch = StatusWatch()
        task = asyncio.create_task(watch.follow(core.router.engines[0]))
        await eventually(lambda: bool(list(watch.latest())))
        metrics = FrontendMetrics.create(CollectorRegistry())
        metrics.of_model("tiny").generation_tokens.inc(4)
        metrics.of_model("tiny").time_to_first_token.observe(0.3)
        metrics.of_model("tiny").request_max_num_generation_tokens.observe(4)
        metrics.http_responses.labels("/v1/models", 200).inc()
        metrics.rate_limited.labels("acme", "tokens").inc()
        registry = CollectorRegistry()
        registry.register(VllmNames((EngineGauges(watch.latest, list), *metrics.collectors)))
        text = generate_latest(registry).decode()
        assert "/v1/models" not in text, "vLLM has other names for these"
        assert "acme" not in text
        families = text_string_to_metric_families(text)
        values = {
            sample.name: sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("model_name") == "tiny"
        }
        assert values["vllm:num_requests_running"] == 3
        assert values["vllm:num_requests_waiting"] == 0
        assert values["vllm:kv_cache_usage_perc"] == 0.25
        assert values["vllm:cache_config_info"] == 1
        assert values["vllm:generation_tokens_total"] == 4
        assert values["vllm:time_to_first_token_seconds_count"] == 1
        assert values["vllm:request_max_num_generation_tokens_sum"] == 4
        assert not [name for name in values if "triptych" in name]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_engines_that_all_rest_are_a_reason_to_wait() -> None:
    async with (
        FakeEngine() as first,
        FakeEngine(engine_id="engine-1") as second,
        open_api(first, second) as api,
    ):
        why_waiting = api.core.generator.why_waiting
        assert why_waiting() == ""
        await api.admin.Pause(admin_pb2.PauseRequest(engine_id="engine-1"))
        await api.admin.Sleep(admin_pb2.SleepRequest(engine_id="engine-0"))
        await eventually(lambda: why_waiting() != "")
        told = (
            "requests for tiny wait: engine-0 is asleep (`triptych admin wake`), "
            "engine-1 is paused (`triptych admin resume`)"
        )
        assert why_waiting() == told
        info = await api.models.GetServerInfo(model_pb2.GetServerInfoRequest())
        assert (info.ready, info.why_waiting) == (True, told)
        await api.admin.Wake(admin_pb2.WakeRequest(engine_id="engine-0"))
        await eventually(lambda: why_waiting() == "")  # the other one still rests, and this one serves
