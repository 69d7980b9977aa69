"""deploy/kubernetes/base: strictly valid, and every name and number in it is one of the code's."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.version import Version

from tests.deploy.facts import (
    LEAF,
    OPTION_BY_ENV,
    PROJECT,
    READY_NAME,
    ROOT,
    SERVICES,
    UID,
    assert_env_is_known,
    default,
    ports,
)
from triptych.config.loader import load_config

BASE = ROOT / "deploy/kubernetes/base"
FILES = {service: BASE / f"{service}.yaml" for service in SERVICES}
KUSTOMIZATION = yaml.safe_load((BASE / "kustomization.yaml").read_text())
VERSIONS = [v for v in kubernetes_validate.utils.all_versions() if Version(v) >= Version("1.32")]
"""From the first one in which a pod-index label and preStop.sleep need no switch."""


def documents(service: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(FILES[service].read_text()))


def of_kind(service: str, *kinds: str) -> dict[str, Any]:
    (document,) = [document for document in documents(service) if document["kind"] in kinds]
    return document


def workload(service: str) -> dict[str, Any]:
    return of_kind(service, "Deployment", "StatefulSet")


def pod(service: str) -> dict[str, Any]:
    return workload(service)["spec"]["template"]["spec"]


def container(service: str) -> dict[str, Any]:
    (only,) = pod(service)["containers"]
    return only


def env(service: str) -> dict[str, str | None]:
    return {entry["name"]: entry.get("value") for entry in container(service)["env"]}


def test_every_supported_version_of_kubernetes_is_checked():
    assert len(VERSIONS) >= 3


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("service", SERVICES)
def test_manifests_are_strictly_valid(service, version):
    for document in documents(service):
        kubernetes_validate.validate(document, version, strict=True)


def test_strict_means_that_a_misspelt_key_is_refused():
    document = workload("worker")
    document["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_the_kustomization_lists_every_file_there_is():
    assert set(KUSTOMIZATION) == {
        "apiVersion", "kind", "labels", "resources", "configMapGenerator", "images",
    }  # fmt: skip
    listed = {
        *KUSTOMIZATION["resources"],
        *KUSTOMIZATION["configMapGenerator"][0]["files"],
        "kustomization.yaml",
    }
    assert listed == {path.name for path in BASE.iterdir()}


def test_images_carry_the_version_of_the_project():
    assert KUSTOMIZATION["images"] == [
        {"name": container(service)["image"], "newTag": PROJECT["version"]} for service in SERVICES
    ]


def test_the_config_file_is_one():
    config = load_config(file=BASE / "triptych.yaml", env={})
    assert config.log.format == "json"


@pytest.mark.parametrize("service", SERVICES)
def test_the_config_is_mounted_where_the_loader_looks(service):
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    volumes = {volume["name"]: volume for volume in pod(service)["volumes"]}
    (mount,) = [m for m in container(service)["volumeMounts"] if m["name"] == "config"]
    assert volumes["config"]["configMap"] == {"name": generated["name"]}
    assert env(service)["TRIPTYCH_CONFIG"] == f"{mount['mountPath']}/{generated['files'][0]}"


@pytest.mark.parametrize("service", SERVICES)
def test_variables_are_options_with_values_in_range(service):
    assert_env_is_known(env(service).keys())
    plain = {
        name: value for name, value in env(service).items() if name in OPTION_BY_ENV and value is not None
    }
    load_config(env=plain)


@pytest.mark.parametrize("service", SERVICES)
def test_container_ports_are_those_of_the_config(service):
    named = {port["name"]: port["containerPort"] for port in container(service)["ports"]}
    assert named == ports(service)


@pytest.mark.parametrize("service", SERVICES)
def test_the_service_reaches_the_pods_on_their_ports(service):
    spec = of_kind(service, "Service")["spec"]
    labels = workload(service)["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"] == labels == workload(service)["spec"]["selector"]["matchLabels"]
    for port in spec["ports"]:
        assert port["targetPort"] == port["name"]
        assert port["port"] == ports(service)[port["name"]]


@pytest.mark.parametrize("service", SERVICES)
def test_probes_ask_health_for_life_and_readiness(service):
    grpc_port = ports(service)["grpc"]
    probes = container(service)
    assert probes["startupProbe"]["grpc"] == {"port": grpc_port}
    assert probes["livenessProbe"]["grpc"] == {"port": grpc_port}
    assert probes["readinessProbe"]["grpc"] == {"port": grpc_port, "service": READY_NAME[service]}


@pytest.mark.parametrize("service", SERVICES)
def test_service_links_are_off(service):
    """They would set TRIPTYCH_<LEAF>_PORT to tcp://…, which the loader refuses."""
    assert pod(service)["enableServiceLinks"] is False


@pytest.mark.parametrize("service", SERVICES)
def test_pods_may_do_next_to_nothing(service):
    security = pod(service)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["runAsGroup"] == UID
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod(service)["automountServiceAccountToken"] is False
    assert container(service)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_written_to_is_a_volume(service):
    volumes = {volume["name"]: volume for volume in pod(service)["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container(service)["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    writable = {"/tmp"} if service == "enginecore" else {"/tmp", "/var/cache/triptych"}
    if service == "worker":
        writable |= {"/var/cache/triton", "/var/cache/machine"}
    assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == writable
    for path in writable:
        assert "emptyDir" in volumes[mounts[path]["name"]]


@pytest.mark.parametrize("service", SERVICES)
def test_resources_are_requested_and_memory_is_bounded(service):
    resources = container(service)["resources"]
    assert set(resources["requests"]) == {"cpu", "memory"}
    assert set(resources["limits"]) == {"memory"}


@pytest.mark.parametrize("service", ["frontend", "enginecore"])
def test_a_pod_has_time_to_drain(service):
    pre_stop = container(service).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod(service)["terminationGracePeriodSeconds"] > pre_stop + default(f"{LEAF[service]}.drain_s")


def every_address_of(service: str) -> str:
    """Return what stands for all pods of a tier, ready or not, in a list of addresses."""
    headless = of_kind(service, "Service")
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["publishNotReadyAddresses"] is True
    return f"dns:{headless['metadata']['name']}:{ports(service)['grpc']}"


def test_one_number_scales_each_tier():
    assert env("enginecore")["TRIPTYCH_ENGINE_WORKER_ADDRESS"] == every_address_of("worker")
    assert env("frontend")["TRIPTYCH_FRONTEND_ENGINE_ADDRESSES"] == every_address_of("enginecore")
