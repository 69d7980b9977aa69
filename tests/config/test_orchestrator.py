"""A worker's place among the ranks, as a LeaderWorkerSet or a StatefulSet tells it."""

from __future__ import annotations

import pytest

from triptych.config.loader import load_config
from triptych.errors import ConfigError

LWS = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "triptych-0.triptych.default",
}
STATEFUL_SET = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "worker-3"}
TP, PP = "parallel.tensor_parallel_size", "parallel.pipeline_parallel_size"


def worker(env: dict[str, str], **flags: str):
    return load_config(
        env=env, flags={key.replace("__", "."): text for key, text in flags.items()}, is_worker=True
    )


def test_a_leader_worker_set_gives_each_pod_its_rank() -> None:
    config = worker(LWS)
    assert (config.parallel.num_ranks, config.worker.rank) == (2, 1)
    assert config.parallel.rendezvous_address == "triptych-0.triptych.default:29500"


def test_pods_of_several_ranks_number_them_by_accelerator() -> None:
    config = load_config(env=LWS, flags={TP: "2", PP: "2", "worker.local_rank": "1"}, is_worker=True)
    assert (config.parallel.tensor_parallel_size, config.worker.rank) == (2, 3)


def test_what_an_operator_sets_wins() -> None:
    env = LWS | {"TRIPTYCH_PARALLEL_RENDEZVOUS_ADDRESS": "here:1"}
    config = load_config(env=env, flags={"worker.rank": "0"}, is_worker=True)
    assert (config.worker.rank, config.parallel.rendezvous_address) == (0, "here:1")


def test_a_group_of_one_pod_is_none() -> None:
    config = worker(LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"})
    assert config == load_config(env={})


def test_ranks_that_do_not_fit_the_pods_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"3 ranks cannot be spread over LWS_GROUP_SIZE = 2 pods"):
        load_config(env=LWS, flags={TP: "3"}, is_worker=True)
    with pytest.raises(ConfigError, match=r"LWS_WORKER_INDEX: 'x' is no number"):
        worker(LWS | {"LWS_WORKER_INDEX": "x"})


def test_a_pod_of_a_stateful_set_has_the_rank_of_its_number() -> None:
    assert load_config(env=STATEFUL_SET, flags={TP: "4"}, is_worker=True).worker.rank == 3
    assert worker(STATEFUL_SET).worker.rank == 0, "a single rank in a pod of any name"
    assert load_config(env={"HOSTNAME": "node-3"}, flags={TP: "4"}, is_worker=True).worker.rank == 0


def test_only_workers_have_a_rank() -> None:
    assert load_config(env=LWS) == load_config(env={})
