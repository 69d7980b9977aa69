"""The place of a worker among its ranks as Kubernetes sets it: defaults of `parallel` and `worker.rank`.

A LeaderWorkerSet names group and pod in the environment. A StatefulSet numbers its pods, `NAME-0` being the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from triptych.errors import ConfigError

LWS_VARIABLES = ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS")
"""Environment of the pods of a LeaderWorkerSet: pods of the group, this pod's number, and the first pod's name."""
RENDEZVOUS_PORT = 29500

_SIZES = ("parallel.tensor_parallel_size", "parallel.pipeline_parallel_size")
_ORDINAL = re.compile(r".+-(\d+)")


def place_in_group(env: Mapping[str, str], values: Mapping[str, object]) -> dict[str, object]:
    """Return key -> value of the options that say where this worker is among the ranks, and that are not set otherwise.

    Args:
        env: The environment.
        values: Key -> value of the options that a file, the environment or flags set.

    Raises:
        ConfigError: The ranks cannot be spread over the pods; names both.
    """
    if all(name in env for name in LWS_VARIABLES):
        found = _place_in_leader_worker_set(env, values)
    elif "KUBERNETES_SERVICE_HOST" in env and any(key in values for key in _SIZES):
        match = _ORDINAL.fullmatch(env.get("HOSTNAME", ""))
        found = {} if match is None else {"worker.rank": int(match[1])}
    else:
        found = {}
    return {key: value for key, value in found.items() if key not in values}


def _place_in_leader_worker_set(env: Mapping[str, str], values: Mapping[str, object]) -> dict[str, object]:
    num_pods, index = (_number(env, name) for name in LWS_VARIABLES[:2])
    if num_pods < 2:
        return {}
    found: dict[str, object] = {
        "parallel.rendezvous_address": f"{env['LWS_LEADER_ADDRESS']}:{RENDEZVOUS_PORT}"
    }
    if not any(key in values for key in _SIZES):
        found[_SIZES[0]] = num_pods
    tensor_parallel, pipeline_parallel = (int(str(values.get(key, found.get(key, 1)))) for key in _SIZES)
    num_ranks = tensor_parallel * pipeline_parallel
    if num_ranks % num_pods:
        raise ConfigError(
            f"{' * '.join(_SIZES)}: {num_ranks} ranks cannot be spread over LWS_GROUP_SIZE = {num_pods} pods "
            "(environment); set a multiple of it"
        )
    found["worker.rank"] = index * (num_ranks // num_pods) + int(str(values.get("worker.local_rank", 0)))
    return found


def _number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdecimal():
        raise ConfigError(f"{name}: {env[name]!r} is no number (environment)")
    return int(env[name])
