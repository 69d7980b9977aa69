"""Decides whether a model can serve what a request asks for: tokens, or vectors of its prompt."""

from __future__ import annotations

from triptych.errors import FeatureDisabled, InvalidRequest
from triptych.types.facts import ModelFacts, WorkerFacts
from triptych.types.pooling import GENERATION, PoolingParams, Task
from triptych.types.submit import SubmitRequest

MAX_VECTOR_BYTES = 16 << 20
"""Bytes of one request's vectors: a message of 64 MiB holds those of several that end with the same step."""
_F32_BYTES = 4


def vector_bytes(num_vectors: int, num_columns: int) -> int:
    """Return the bytes of vectors in a message."""
    return num_vectors * num_columns * _F32_BYTES


def check_task(pooling: PoolingParams | None, model: ModelFacts) -> None:
    """Refuse a task that the model does not have.

    Raises:
        FeatureDisabled: It does not; names those that it has.
    """
    task = GENERATION if pooling is None else pooling.task.label
    if task not in model.tasks:
        raise FeatureDisabled("task", f"{task} is not served; {model.name} serves {', '.join(model.tasks)}")


def check_submit(submit: SubmitRequest, facts: WorkerFacts) -> None:
    """Refuse what this worker cannot compute. Lengths of prompts that generate are checked at their admission.

    Raises:
        FeatureDisabled: The model does not have the task, or the worker serves no adapters.
        InvalidRequest: A pooled request asks for what only tokens have, or for vectors that the model does not make.
    """
    if submit.adapter and not facts.max_adapters:
        raise FeatureDisabled("adapter", f"{submit.adapter!r}: worker.max_adapters is 0, so none is served")
    check_task(submit.pooling, facts.model)
    if submit.pooling is not None:
        _check_pooled(submit, submit.pooling, facts)


def _check_pooled(submit: SubmitRequest, pooling: PoolingParams, facts: WorkerFacts) -> None:
    size, task = facts.model.embedding_size, pooling.task
    if submit.num_choices != 1:
        raise InvalidRequest("n", f"{submit.num_choices} choices: a request for vectors has one")
    if any(len(emitted) for emitted in submit.emitted):
        raise InvalidRequest("emitted_token_ids", "a request for vectors has a prompt only")
    if submit.sampling.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "a request for vectors has no log-probabilities")
    if pooling.dimensions < 0 or (pooling.dimensions and task is Task.CLASSIFY):
        raise InvalidRequest("dimensions", f"{pooling.dimensions} are none that {task.label} can have")
    if pooling.dimensions > size and task is Task.EMBED:
        raise InvalidRequest("dimensions", f"{pooling.dimensions} are more than the {size} of a whole vector")
    num_bytes = vector_bytes(len(submit.prompt_token_ids), pooling.dimensions or size)
    if task is Task.TOKEN_EMBED and num_bytes > MAX_VECTOR_BYTES:
        raise InvalidRequest(
            "prompt",
            f"{len(submit.prompt_token_ids)} tokens have vectors of {num_bytes} bytes, "
            f"above the limit {MAX_VECTOR_BYTES}",
        )
    budget = facts.max_num_batched_tokens
    if facts.model.is_encoder and len(submit.prompt_token_ids) > budget:
        raise InvalidRequest(
            "prompt", f"{len(submit.prompt_token_ids)} tokens are above the {budget} that a step computes"
        )
