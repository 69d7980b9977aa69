"""Three real processes with mTLS between them and API keys in front, around a simulated model."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import READY_S
from tests.e2e.test_simulated_stack import FREE_PORTS
from tests.helpers.certificates import Authority
from triptych.cli import main
from triptych.client.llm import LLM
from triptych.config import TlsConfig
from triptych.config.api_keys import entry_line
from triptych.config.loader import load_config
from triptych.errors import ConfigError, EngineUnavailable, Unauthenticated
from triptych.launcher.launch import launch
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.sampling import SamplingParams

pytestmark = pytest.mark.model  # of which the config and the tokenizer are read

KEY, ADMIN_KEY = "tk-client", "tk-operator"


@dataclass(frozen=True)
class SecureStack:
    cluster: LocalCluster
    authority: Authority
    tls: TlsConfig
    """The files of a client."""

    @property
    def words(self) -> list[str]:
        """The client's files, as the command line takes them."""
        return [
            "--tls-ca", self.tls.ca, "--tls-certificate", self.tls.certificate, "--tls-key", self.tls.key,
        ]  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureStack]:
    folder: Path = tmp_path_factory.mktemp("secure")
    authority = Authority(folder)
    certificate, key = authority.issue("stack")
    keys = folder / "keys.yaml"
    keys.write_text(f"{entry_line('client', KEY)}\n{entry_line('operator', ADMIN_KEY, admin=True)}\n")
    flags = {
        **FREE_PORTS,
        "simulation.enabled": "true",
        "frontend.api_keys_file": str(keys),
        "tls.certificate": certificate,
        "tls.key": key,
        "tls.client_ca": authority.file,
        "tls.ca": authority.file,
    }
    lines: list[str] = []
    with LocalCluster(load_config(env={}, flags=flags), on_log_line=lines.append) as cluster:
        try:
            cluster.wait_ready(READY_S)
            yield SecureStack(cluster, authority, authority.client("client"))
        finally:
            print("\n".join(lines[-40:]))


def test_llm_generates_through_mtls_with_a_key(stack: SecureStack) -> None:
    with LLM(address=stack.cluster.address, api_key=KEY, tls=stack.tls) as llm:
        (output,) = llm.generate(["Once"], SamplingParams(max_tokens=5), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    with (
        LLM(address=stack.cluster.address, api_key="tk-wrong", tls=stack.tls) as llm,
        pytest.raises(Unauthenticated),
    ):
        llm.generate(["Once"], SamplingParams(max_tokens=5), use_tqdm=False)


def test_no_port_takes_plain_text_or_a_stranger(stack: SecureStack) -> None:
    cluster = stack.cluster
    ports = (
        cluster.address,
        cluster.admin_address,
        cluster.engine_address,
        cluster.config.engine.worker_address,
    )
    for address in ports:
        assert main(["health", address, *stack.words]) == 0
        assert main(["health", address]) == 1
        assert main(["health", address, "--tls-ca", stack.authority.file]) == 1
    with pytest.raises(EngineUnavailable):
        LLM(address=cluster.address, api_key=KEY, ready_timeout_s=0.5)


def test_openai_client_over_https_with_a_key(stack: SecureStack) -> None:
    context = ssl.create_default_context(cafile=stack.authority.file)
    context.load_cert_chain(stack.tls.certificate, stack.tls.key)
    with (
        httpx.Client(verify=context, timeout=60) as http,
        openai.OpenAI(
            base_url=f"https://{stack.cluster.http_address}/v1", api_key=KEY, http_client=http, max_retries=0
        ) as client,
    ):
        answer = client.completions.create(model="embedded", prompt="Once", max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


def test_an_operator_needs_certificate_and_key(
    stack: SecureStack, capsys: pytest.CaptureFixture[str]
) -> None:
    status = ["admin", "status", "--address", stack.cluster.admin_address]
    assert main([*status, *stack.words, "--api-key", ADMIN_KEY]) == 0
    assert "num_running" in capsys.readouterr().out
    assert main([*status, *stack.words, "--api-key", KEY]) == 1
    assert "is not one of an administrator" in capsys.readouterr().err
    assert main([*status, *stack.words]) == 1
    assert main([*status, "--api-key", ADMIN_KEY]) == 1


def test_a_local_stack_says_what_is_missing_before_it_starts(stack: SecureStack) -> None:
    flags = {"tls.certificate": stack.tls.certificate, "tls.key": stack.tls.key} | FREE_PORTS
    with pytest.raises(ConfigError, match=r"tls\.ca: needed"):
        launch(load_config(env={}, flags=flags), show_progress=False)
    with pytest.raises(ConfigError, match=r"tls\.key: /no: No such file"):
        launch(load_config(env={}, flags={**flags, "tls.key": "/no"}), show_progress=False)
