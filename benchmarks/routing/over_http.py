"""The same loads over HTTP: at one frontend with all engines, or at a router of others before a frontend per engine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.harness.command import ROOT, module_command
from benchmarks.harness.processes import Child
from benchmarks.routing.engines import POLL_S, START_S, start_frontend, wait_ports
from benchmarks.routing.loads import Tokens, User
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig
from triptych.hub import resolve_model
from triptych.text.tokenizer import Tokenizer
from triptych_services.worker.simulation.vocabulary import read_word_ids

PEERS = {"smg": "smg==1.13.0", "sglang-router": "sglang-router==0.3.2", "vllm-router": "vllm-router==0.1.17"}
"""Router to the package that it is installed from, into a Python of its own under build/routers."""
_LAUNCH = {
    "smg": ("smg", "launch"),
    "sglang-router": ("sglang-router", "launch"),
    "vllm-router": ("vllm-router",),
}
_SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's outcome."""

    first_s: float
    """Seconds to its first token, in the engines' time."""
    num_prompt_tokens: int
    num_cached_tokens: int


def install(router: str) -> Path:
    """Return the folder of a router's programs; install it first if it is not there."""
    directory = ROOT / "build" / "routers" / router
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if not (directory / "bin" / _LAUNCH[router][0]).exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        pip = [
            str(directory / "bin" / "python"),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
        ]
        subprocess.run([*pip, PEERS[router]], check=True, env=environment)
    return directory / "bin"


def measure(
    contender: str, num_engines: int, users: Sequence[User], slowdown: float
) -> tuple[list[Answer], list[float]]:
    """Run a load. Return the answers, and the seconds that each accelerator has computed.

    Args:
        contender: A policy of Triptych's, or a name in `PEERS`.
        slowdown: Seconds of this machine for each of the engines.
    """
    with ExitStack() as stack:
        options = f"--engines={num_engines}", f"--slowdown={slowdown}"
        engines = stack.enter_context(Child(module_command("benchmarks.routing.engines", *options)))
        ports = engines.receive(START_S)["ports"]
        # engines that share a core may be silent for a while, so nothing moves
        if contender in PEERS:
            workers = [start_frontend(stack, [port], moves="never") for port in ports]
            url = _start_router(stack, contender, [wait_ports(worker)["http_port"] for worker in workers])
        else:
            frontend = start_frontend(stack, ports, routing=contender, moves="never")
            url = f"http://127.0.0.1:{wait_ports(frontend)['http_port']}"
        answers = asyncio.run(_run(url, users, slowdown, num_engines))
        return answers, engines.ask({}, START_S)["busy_s"]


def _start_router(stack: ExitStack, router: str, ports: Sequence[int]) -> str:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics_port = one.getsockname()[1], other.getsockname()[1]
    program, *launch = _LAUNCH[router]
    command = [str(install(router) / program), *launch, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "cache_aware", "--prometheus-port", str(metrics_port), "--worker-urls"]
    command += [f"http://127.0.0.1:{worker}" for worker in ports]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    log = stack.enter_context((ROOT / "build" / f"{router}.log").open("wb"))
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return f"http://127.0.0.1:{port}"


class _Words:
    """Texts of as many tokens as asked for, and the text of what an engine says."""

    def __init__(self) -> None:
        directory = resolve_model(EngineConfig().model.model)
        architecture = read_architecture(directory)
        self._ids = np.array(read_word_ids(directory, architecture.vocab_size, architecture.eos_token_ids))
        self._tokenizer = Tokenizer.from_directory(directory)

    def text(self, tokens: Tokens) -> str:
        ids = self._ids[tokens % len(self._ids)]
        return self._tokenizer.decode(ids.tolist())


async def _run(url: str, users: Sequence[User], slowdown: float, num_engines: int) -> list[Answer]:
    words, answers = _Words(), []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:
        model = await _wait_served(http, url)
        for number in range(8 * num_engines):  # so that each engine has measured its steps
            prompt = words.text(np.arange(number * 97, number * 97 + 64).astype(np.uint32))
            await _complete(http, url, model, prompt, 8)

        async def converse(user: User) -> None:
            said = ""
            for turn in user.turns:
                await asyncio.sleep(turn.pause_s * slowdown)
                said += words.text(turn.tokens)
                text, answer = await _complete(http, url, model, said, turn.num_output_tokens)
                answers.append(
                    Answer(answer.first_s / slowdown, answer.num_prompt_tokens, answer.num_cached_tokens)
                )
                said += text

        async with asyncio.TaskGroup() as group:
            for user in users:
                group.create_task(converse(user))
    return answers


async def _wait_served(http: aiohttp.ClientSession, url: str) -> str:
    """Return the model's name once the engines serve it."""
    ends_at = time.monotonic() + START_S
    while True:
        try:
            async with http.get(f"{url}/v1/models") as response:
                models = (await response.json(content_type=None))["data"]
            await _complete(http, url, models[0]["id"], "Hello", 1)
            await asyncio.sleep(_SETTLE_S)  # until a router has seen all of its workers
            return str(models[0]["id"])
        except (aiohttp.ClientError, KeyError, IndexError, ValueError, RuntimeError) as error:
            if time.monotonic() > ends_at:
                raise RuntimeError(f"{url} does not serve: {error!r}") from None
            await asyncio.sleep(POLL_S)


async def _complete(
    http: aiohttp.ClientSession, url: str, model: str, prompt: str, num_tokens: int
) -> tuple[str, Answer]:
    """Return the text of a completion, and what it took."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_at, first_s, parts, usage = time.monotonic(), None, [], None
    async with http.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if choice["text"]:
                    first_s = first_s or time.monotonic() - began_at
                    parts.append(choice["text"])
    if first_s is None or usage is None:
        raise RuntimeError("the answer has no text, or no usage")
    details = usage.get("prompt_tokens_details") or {}
    return "".join(parts), Answer(first_s, usage["prompt_tokens"], details.get("cached_tokens") or 0)
