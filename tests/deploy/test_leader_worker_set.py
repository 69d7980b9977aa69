"""deploy/kubernetes/lws: the base with a worker of several pods, whose pods are those of the base."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.facts import PROJECT, ROOT, default
from triptych.config.loader import load_config
from triptych.config.orchestrator import RENDEZVOUS_PORT

OVERLAY = ROOT / "deploy/kubernetes/lws"
SET = yaml.safe_load((OVERLAY / "worker.yaml").read_text())
TEMPLATE = SET["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def base_pod() -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/base/worker.yaml").read_text())
    (workload,) = [document for document in documents if document["kind"] == "StatefulSet"]
    pod: dict[str, Any] = workload["spec"]["template"]
    return pod


def test_a_pod_is_that_of_the_base_with_a_port_for_the_ranks() -> None:
    (own,), (base,) = TEMPLATE["spec"]["containers"], base_pod()["spec"]["containers"]
    extra = [port for port in own["ports"] if port not in base["ports"]]
    assert extra == [{"name": "ranks", "containerPort": RENDEZVOUS_PORT}]
    assert str(default("parallel.rendezvous_address")).endswith(f":{RENDEZVOUS_PORT}")
    assert own | {"ports": base["ports"]} == base
    assert TEMPLATE["spec"] | {"containers": []} == base_pod()["spec"] | {"containers": []}
    assert TEMPLATE["metadata"] == base_pod()["metadata"]
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": TEMPLATE["spec"]},
        "1.32",
        strict=True,
    )


def test_its_pods_are_the_ranks_of_one_worker() -> None:
    size = SET["spec"]["leaderWorkerTemplate"]["size"]
    assert SET["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    ranks = [
        load_config(
            env={"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "leader"},
            is_worker=True,
        )
        for index in range(size)
    ]
    assert [config.worker.rank for config in ranks] == list(range(size))
    assert {config.parallel.num_ranks for config in ranks} == {size}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here")
def test_the_overlay_replaces_the_worker_of_the_base() -> None:
    command = ["kubectl", "kustomize", str(OVERLAY)]
    written = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    documents = list(yaml.safe_load_all(written))
    workers = [item for item in documents if item["metadata"]["name"] == "triptych-worker"]
    assert [item["kind"] for item in workers] == ["LeaderWorkerSet"]
    pod = workers[0]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    config_maps = {item["metadata"]["name"] for item in documents if item["kind"] == "ConfigMap"}
    assert pod["volumes"][0]["configMap"]["name"] in config_maps
    assert pod["containers"][0]["image"] == f"triptych-worker:{PROJECT['version']}"
