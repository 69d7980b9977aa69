"""`python -m triptych_services.frontend` as an operator starts and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helpers.byte_tokenizer import byte_tokenizer, write_model_directory
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.grpc_api import ask
from triptych.rpc.channel import open_channel
from triptych.types.outputs import FinishReason
from triptych.v1 import generation_pb2_grpc

TOKENIZER = byte_tokenizer()
START_S = 120.0  # a cold start on a busy machine
FREE_PORTS = {f"frontend.{name}": "0" for name in ("port", "admin-port", "http-port", "metrics-port")}


@dataclass
class Process:
    """One frontend and what it said on stderr."""

    process: asyncio.subprocess.Process
    ready_file: Path

    async def ports(self) -> dict[str, int]:
        async with asyncio.timeout(START_S):
            while not self.ready_file.exists():
                assert self.process.returncode is None, await self.rest_of_stderr()
                await asyncio.sleep(0.02)
        return json.loads(self.ready_file.read_text())

    async def rest_of_stderr(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def end(self) -> tuple[int, str]:
        """Exit code and the rest of stderr."""
        async with asyncio.timeout(START_S):
            text = await self.rest_of_stderr()
            return await self.process.wait(), text


@asynccontextmanager
async def start(
    tmp_path: Path,
    model: str,
    *,
    num_files: tuple[int, int] | None = None,
    program: Sequence[str] = ("-m", "triptych_services.frontend"),
    **flags: str,
) -> AsyncIterator[Process]:
    """`num_files`: soft and hard limit of open files. `program`: what the interpreter runs."""
    ready_file = tmp_path / "ready.json"
    options = (
        FREE_PORTS | {"model.model": model} | {name.replace("__", "."): text for name, text in flags.items()}
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *program,
        f"--ready-file={ready_file}",
        *(f"--{name.replace('_', '-')}={text}" for name, text in options.items()),
        stderr=asyncio.subprocess.PIPE,
        env={key: text for key, text in os.environ.items() if not key.startswith("TRIPTYCH_")},
        preexec_fn=None
        if num_files is None
        else functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, num_files),
    )
    try:
        yield Process(process, ready_file)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


COUNTING = """
import gc, os, runpy, sys
end = os._exit
def count_and_end(code):
    print("num_objects", len(gc.get_objects()), file=sys.stderr, flush=True)
    end(code)
os._exit = count_and_end
runpy.run_module("triptych_services.frontend", run_name="__main__")
"""
"""Runs a frontend. Says at its end how many objects a full collection would look at."""


async def until_ready(channel: grpc.aio.Channel) -> None:
    request = health_pb2.HealthCheckRequest(service="triptych.v1.GenerationService")
    async with asyncio.timeout(START_S):
        async for response in health_pb2_grpc.HealthStub(channel).Watch(request):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return


def http_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=START_S)


async def test_it_serves_both_doors_and_drains_on_sigterm(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path)
    async with (
        FakeEngine() as engine,
        start(tmp_path, str(model), frontend__engine_addresses=engine.address) as frontend,
    ):
        ports = await frontend.ports()
        assert ports["pid"] == frontend.process.pid
        async with open_channel(f"127.0.0.1:{ports['port']}") as channel, http_client() as http:
            await until_ready(channel)
            base = f"http://127.0.0.1:{ports['http_port']}"
            assert (await http.get(f"{base}/health")).status_code == 200
            assert (await http.get(f"{base}/v1/models")).json()["data"][0]["id"] == "tiny"
            metrics = (await http.get(f"http://127.0.0.1:{ports['metrics_port']}/metrics")).text
            for line in (
                'triptych_frontend_http_responses_total{route="/v1/models",status="200"} 1.0',
                "# TYPE triptych_frontend_choices_without_token gauge",
                "# TYPE triptych_frontend_child_tasks_total counter",
                "# TYPE triptych_frontend_rate_limited_requests_total counter",
            ):
                assert line in metrics
            assert re.search(r'triptych_build_info\{.*service="frontend".*\} 1', metrics)

            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.StreamGenerate(ask("last", text="Hello"))
            request = await engine.next_submit()
            assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 40)
            engine.emit(request, TOKENIZER.encode("x"))
            responses: list[Any] = [await call.read(), await call.read()]

            frontend.process.send_signal(signal.SIGTERM)
            engine_sees_nothing = engine.aborted == []
            engine.emit(request, TOKENIZER.encode("yz"), finish=FinishReason.LENGTH)
            while (response := await call.read()) is not grpc.aio.EOF:
                responses.append(response)
        assert engine_sees_nothing
        assert "".join(response.output.text for response in responses) == "xyz"
        code, stderr = await frontend.end()
    assert code == 0, stderr
    assert "sampling defaults of the checkpoint temperature=0.5 top_k=40" in stderr
    assert stderr.count("request_id=last") == 1
    assert "Traceback" not in stderr


@pytest.mark.thorough
async def test_full_collections_do_not_look_at_modules(tmp_path: Path) -> None:
    model, program = write_model_directory(tmp_path), ("-c", COUNTING)
    async with (
        FakeEngine() as engine,
        start(tmp_path, str(model), program=program, frontend__engine_addresses=engine.address) as frontend,
    ):
        ports = await frontend.ports()
        async with http_client() as http:  # its modules are imported last
            await http.get(f"http://127.0.0.1:{ports['http_port']}/health")
        frontend.process.send_signal(signal.SIGTERM)
        code, stderr = await frontend.end()
    assert code == 0, stderr
    found = re.search(r"num_objects (\d+)", stderr)
    assert found, stderr
    assert int(found[1]) < 10_000  # 55,000 with the modules that serve HTTP


@pytest.mark.thorough
async def test_it_serves_grpc_and_operators_alone(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path)
    options = {
        "frontend__serve_http": "false",
        "frontend__serve_admin_http": "true",
        "frontend__admin_http_port": "0",
    }
    async with (
        FakeEngine() as engine,
        start(tmp_path, str(model), frontend__engine_addresses=engine.address, **options) as frontend,
    ):
        ports = await frontend.ports()
        assert "http_port" not in ports
        async with open_channel(f"127.0.0.1:{ports['port']}") as channel, http_client() as http:
            await until_ready(channel)
            base = f"http://127.0.0.1:{ports['admin_http_port']}"
            assert (await http.post(f"{base}/sleep")).status_code == 200
            assert (await http.get(f"{base}/is_sleeping")).json() == {"is_sleeping": True}
        frontend.process.send_signal(signal.SIGTERM)
        code, stderr = await frontend.end()
    assert code == 0, stderr
    assert "Traceback" not in stderr


@pytest.mark.thorough
async def test_what_outlasts_the_drain_is_ended(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path)
    flags = {"frontend__drain_s": "0.05", "frontend__keep_s": "0"}  # what is kept goes on at another frontend
    async with (
        FakeEngine() as engine,
        start(tmp_path, str(model), frontend__engine_addresses=engine.address, **flags) as frontend,
    ):
        ports = await frontend.ports()
        async with open_channel(f"127.0.0.1:{ports['port']}") as channel:
            await until_ready(channel)
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.StreamGenerate(ask(text="Hello"))
            await engine.next_submit()
            frontend.process.send_signal(signal.SIGTERM)
            code, stderr = await frontend.end()
            assert code == 0, stderr
            assert "1 requests did not finish within frontend.drain_s = 0.05" in stderr
            call.cancel()


async def test_a_taken_port_stops_the_boot_by_name(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for option in ("frontend.port", "frontend.http_port"):
            async with start(tmp_path, str(model), **{option.replace(".", "__"): port}) as frontend:
                code, stderr = await frontend.end()
                assert code == 2
                assert option in stderr
                assert port in stderr
                assert "Traceback" not in stderr


async def test_a_model_that_cannot_be_had_ends_the_process_in_one_line(tmp_path: Path) -> None:
    async with start(tmp_path, str(tmp_path / "nowhere.gguf")) as frontend:
        code, stderr = await frontend.end()
    assert code == 2
    assert "cannot serve: model: " in stderr
    assert "nowhere.gguf" in stderr
    assert "Traceback" not in stderr


@pytest.mark.thorough
async def test_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    """Hundreds from several addresses to each port, where 700 files may be open and no more."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine())
        frontend = await stack.enter_async_context(
            start(
                tmp_path,
                str(write_model_directory(tmp_path)),
                num_files=(256, 700),
                frontend__engine_addresses=engine.address,
            )
        )
        ports = await frontend.ports()
        held = []
        for number in range(300):
            for port in ("http_port", "port"):
                held.append(stack.enter_context(socket.socket()))
                held[-1].bind((f"127.0.1.{number % 16 + 1}", 0))
                held[-1].settimeout(5)
                with contextlib.suppress(OSError):
                    held[-1].connect(("127.0.0.1", ports[port]))
        async with http_client() as http:
            base = f"http://127.0.0.1:{ports['http_port']}"
            assert (await http.get(f"{base}/health")).status_code == 200
        for connection in held[1::2]:
            connection.close()
        async with open_channel(f"127.0.0.1:{ports['port']}") as channel:
            await until_ready(channel)
        frontend.process.send_signal(signal.SIGTERM)
        code, text = await frontend.end()
    assert code == 0
    assert "frontend.max_grpc_connections 4096, frontend.max_connections 8192 do not fit: 700 files" in text
    assert "Too many open files" not in text
