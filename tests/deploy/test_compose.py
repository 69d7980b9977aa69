"""docker-compose.yml and what it mounts: valid by the Compose specification, true to the code."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import re
import shutil
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.facts import (
    OPTION_BY_ENV,
    ROOT,
    SERVICES,
    assert_env_is_known,
    default,
    module_exists,
    ports,
)
from triptych.config.loader import load_config
from triptych.observe.metrics_server import MetricsServer

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
CONTAINERS: dict[str, dict[str, Any]] = COMPOSE["services"]
TIER = {"frontend": "frontend", "enginecore": "enginecore", "worker": "worker", "worker-gpu": "worker"}
"""container -> the service that runs in it"""
DOT_ENV = dict(
    line.split("=", 1)
    for line in (ROOT / ".env").read_text().splitlines()
    if line and not line.startswith("#")
)


def interpolate(value: str) -> str:
    """`${NAME:-default}` with nothing set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def seconds(duration: str) -> int:
    assert duration.endswith("s")
    return int(duration[:-1])


def test_it_is_valid_by_the_compose_specification():
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    validator(schema).validate(COMPOSE)
    with pytest.raises(jsonschema.ValidationError):
        validator(schema).validate({"services": {"x": {"image": "x", "helthcheck": {}}}})


def test_extensions_are_the_only_other_keys_at_the_top():
    assert {key for key in COMPOSE if not key.startswith("x-")} == {
        "name", "services", "configs", "secrets", "volumes", "networks",
    }  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_a_container_refers_to_is_declared(name):
    container = CONTAINERS[name]
    assert set(container["networks"]) <= set(COMPOSE["networks"])
    assert set(container.get("depends_on", ())) <= set(CONTAINERS)
    assert {config["source"] for config in container.get("configs", ())} <= set(COMPOSE["configs"])
    for volume in container.get("volumes", ()):
        assert volume.split(":")[0] in COMPOSE["volumes"]
    if "build" in container:
        assert (ROOT / container["build"]["context"] / container["build"]["dockerfile"]).is_file()
    else:
        assert re.search(r":v?\d", container["image"]), "an image from elsewhere has a version"


@pytest.mark.parametrize("name", COMPOSE["configs"])
def test_config_files_are_there(name):
    assert (ROOT / interpolate(COMPOSE["configs"][name]["file"])).is_file()


def test_the_config_that_is_mounted_is_one():
    file = ROOT / interpolate(COMPOSE["configs"]["triptych"]["file"])
    load_config(file=file, env={})
    for name in TIER:
        (mounted,) = CONTAINERS[name]["configs"]
        assert CONTAINERS[name]["environment"]["TRIPTYCH_CONFIG"] == mounted["target"]


@pytest.mark.parametrize("name", TIER)
def test_variables_are_options_with_values_in_range(name):
    env = {key: interpolate(value) for key, value in CONTAINERS[name]["environment"].items()}
    assert_env_is_known(env)
    load_config(env={key: value for key, value in env.items() if key in OPTION_BY_ENV})


@pytest.mark.parametrize(("name", "service"), TIER.items())
def test_a_tier_is_healthy_when_its_service_is_ready(name, service):
    assert CONTAINERS[name]["build"]["dockerfile"] == f"services/{service}/Dockerfile"
    probe = CONTAINERS[name]["healthcheck"]["test"]
    assert probe[:3] == ["CMD", "bash", "-c"]
    assert probe[4] == str(ports(service)["metrics"])


async def test_the_probe_tells_ready_from_not_ready_and_from_nobody():
    is_ready = False
    server = MetricsServer(is_live=lambda: True, is_ready=lambda: is_ready)
    port = server.bind("127.0.0.1", 0, option="x")
    script = CONTAINERS["worker"]["healthcheck"]["test"][3].replace("$$", "$")

    async def probe() -> int:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", script, str(port), stderr=asyncio.subprocess.DEVNULL
        )
        return await process.wait()

    await server.start()
    assert await probe() != 0
    is_ready = True
    assert await probe() == 0
    await server.stop()
    assert await probe() != 0


@pytest.mark.parametrize("name", TIER)
def test_a_container_has_time_to_drain(name):
    drain_s = max(default(f"{leaf}.drain_s") for leaf in ("frontend", "engine"))
    assert seconds(CONTAINERS[name]["stop_grace_period"]) > drain_s


@pytest.mark.parametrize("name", [*TIER, "model", "gateway"])
def test_containers_may_do_next_to_nothing(name):
    container = CONTAINERS[name]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in container["tmpfs"]
    assert "user" not in container  # the image's own, which is not root


def test_the_doors_and_nothing_else_are_published_on_loopback():
    published = {name: container["ports"] for name, container in CONTAINERS.items() if "ports" in container}
    doors = [ports("frontend")["grpc"], ports("frontend")["http"]]
    assert published == {
        "gateway": [f"127.0.0.1:{port}:{port}" for port in doors],
        "prometheus": ["127.0.0.1:9090:9090"],
    }


def test_operators_are_served_inside_the_frontend_only():
    assert default("frontend.admin_host") == "127.0.0.1"
    for container in CONTAINERS.values():
        assert "TRIPTYCH_FRONTEND_ADMIN_HOST" not in container.get("environment", {})
        assert not any(
            str(default("frontend.admin_port")) in str(port) for port in container.get("ports", [])
        )


def test_tiers_behind_the_frontend_have_no_way_out():
    assert COMPOSE["networks"]["tiers"] == {"internal": True}
    for name, service in TIER.items():
        assert ("outside" in CONTAINERS[name]["networks"]) == (service == "frontend")


def test_each_tier_waits_for_the_one_behind_it():
    assert CONTAINERS["frontend"]["depends_on"]["enginecore"] == {"condition": "service_healthy"}
    assert CONTAINERS["enginecore"]["depends_on"] == {
        name: {"condition": "service_healthy", "required": False} for name in ("worker", "worker-gpu")
    }
    for name in ("frontend", "worker", "worker-gpu"):
        assert CONTAINERS[name]["depends_on"]["model"] == {"condition": "service_completed_successfully"}


def test_tiers_find_each_other():
    engines = CONTAINERS["frontend"]["environment"]["TRIPTYCH_FRONTEND_ENGINE_ADDRESSES"]
    assert engines == f"dns:enginecore:{ports('enginecore')['grpc']}"
    workers = CONTAINERS["enginecore"]["environment"]["TRIPTYCH_ENGINE_WORKER_ADDRESS"]
    assert workers == f"dns:the-worker:{ports('worker')['grpc']}"
    for name in ("worker", "worker-gpu"):
        assert CONTAINERS[name]["networks"]["tiers"]["aliases"] == ["the-worker"]


def test_nothing_keeps_a_tier_from_being_scaled():
    for name in TIER:
        assert not {"ports", "container_name", "hostname"} & CONTAINERS[name].keys()
        assert "TRIPTYCH_ENGINE_ENGINE_ID" not in CONTAINERS[name]["environment"]


GATEWAY = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()


def test_the_gateway_finds_every_frontend_at_its_ports():
    door = ports("frontend")
    assert re.findall(r"bind :(\d+)", GATEWAY) == [str(door["http"]), str(door["grpc"])]
    templates = re.findall(r"server-template frontend 32 (\S+)(.*)", GATEWAY)
    assert templates == [
        (f"frontend:{door['http']}", ""),
        (f"frontend:{door['grpc']}", f" proto h2 port {door['http']} check-proto h1"),
    ]
    assert "frontend" in CONTAINERS
    assert CONTAINERS["gateway"]["configs"] == [
        {"source": "haproxy", "target": "/usr/local/etc/haproxy/haproxy.cfg"}
    ]


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_the_gateway_understands_its_file():
    checked = subprocess.run(
        ["haproxy", "-c", "-f", "deploy/haproxy/haproxy.cfg"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_cpu_is_the_default_and_the_gpu_a_profile():
    profiles = {
        name: container["profiles"] for name, container in CONTAINERS.items() if "profiles" in container
    }
    assert profiles == {"worker": ["cpu"], "worker-gpu": ["gpu"], "prometheus": ["observe"]}
    assert DOT_ENV == {"COMPOSE_PROFILES": "cpu"}
    (device,) = CONTAINERS["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert CONTAINERS["worker-gpu"]["environment"]["TRIPTYCH_WORKER_DEVICE"] == "cuda"
    assert CONTAINERS["worker"]["environment"]["TRIPTYCH_WORKER_DEVICE"] == "cpu"
    assert CONTAINERS["worker"]["image"] != CONTAINERS["worker-gpu"]["image"]


@pytest.mark.parametrize("name", [name for name, container in CONTAINERS.items() if "build" in container])
def test_an_image_is_built_with_arguments_that_its_dockerfile_has(name):
    build = CONTAINERS[name]["build"]
    dockerfile = (ROOT / build["dockerfile"]).read_text()
    for argument in build["args"]:
        assert re.search(rf"^ARG {argument}=", dockerfile, re.MULTILINE)
    base = interpolate(build["args"]["PYTHON_IMAGE"])
    assert f"ARG PYTHON_IMAGE={base}\n" in dockerfile, "both have one default"


def test_the_gpu_image_has_the_build_of_torch_for_gpus():
    assert CONTAINERS["worker-gpu"]["build"]["args"]["TORCH"] == "cuda"
    assert "TORCH" not in CONTAINERS["worker"]["build"]["args"]


def test_the_model_is_fetched_by_the_hub_into_the_volume_that_the_tiers_read():
    model = CONTAINERS["model"]
    assert model["entrypoint"] == ["python", "-m", "triptych.hub"]
    assert module_exists("triptych.hub.__main__")
    assert model["volumes"] == ["models:/var/cache/triptych"]
    assert "outside" in model["networks"]
    for name, service in TIER.items():
        if service != "enginecore":
            machine = ["machine:/var/cache/machine"] if service == "worker" else []
            kernels = ["kernels:/var/cache/triton"] if name == "worker-gpu" else []
            assert CONTAINERS[name]["volumes"] == ["models:/var/cache/triptych:ro", *machine, *kernels]
            assert CONTAINERS[name]["environment"]["TRIPTYCH_MODEL_MODEL"] == model["command"][0]


def test_prometheus_scrapes_the_metrics_port_of_every_tier():
    scrapes = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = [
        (name, lookup["port"])
        for job in scrapes
        for lookup in job["dns_sd_configs"]
        for name in lookup["names"]
        if lookup["type"] == "A"
    ]
    names = ["frontend", "enginecore", CONTAINERS["worker"]["networks"]["tiers"]["aliases"][0]]
    assert targets == [
        (name, ports(service)["metrics"]) for name, service in zip(names, SERVICES, strict=True)
    ]
