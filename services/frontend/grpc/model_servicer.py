"""`triptych.v1.ModelService`: what this frontend serves, and itself."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import grpc.aio

from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES
from triptych.types.pooling import GENERATION
from triptych.types.sampling import MAX_CHOICES, MAX_LOGPROBS, SAMPLING_FIELDS
from triptych.v1 import model_pb2, model_pb2_grpc, sampling_pb2
from triptych_services.frontend.generate import Generator, ServedModel
from triptych_services.frontend.grpc.batch import items_in_flight
from triptych_services.frontend.grpc.pages import read_page_size
from triptych_services.frontend.requests.raw import MAX_MESSAGES

MODEL_SERVICE = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name

_LIMITS = model_pb2.ServerLimits(
    max_message_bytes=PUBLIC_MESSAGE_BYTES,
    max_choices=MAX_CHOICES,
    max_logprobs=MAX_LOGPROBS,
    max_stop_strings=SAMPLING_FIELDS["stop"].max_items,
    max_chat_messages=MAX_MESSAGES,
)


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Serves `triptych.v1.ModelService`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> model_pb2.ListModelsResponse:
        page_size = read_page_size(request.page_size)
        # A page begins after the name that its token is: models may come and go between two pages.
        models = sorted(m for m in self._generator.models() if m.name > request.page_token)
        page = models[:page_size]
        return model_pb2.ListModelsResponse(
            models=map(_to_proto, page), next_page_token=page[-1].name if len(models) > page_size else ""
        )

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=_to_proto(self._generator.find_model(request.name)))

    async def GetServerInfo(
        self, request: model_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> model_pb2.GetServerInfoResponse:
        limits = model_pb2.ServerLimits(max_batch_in_flight=items_in_flight(self._generator.max_running()))
        limits.MergeFrom(_LIMITS)
        return model_pb2.GetServerInfoResponse(
            version=importlib.metadata.version("triptych"),
            ready=self._generator.is_ready,
            why_not_ready=self._generator.why_not_ready,
            limits=limits,
            num_engines=self._generator.num_ready_engines,
            why_waiting=self._generator.why_waiting(),
        )


def _to_proto(served: ServedModel) -> model_pb2.Model:
    capabilities: list[model_pb2.Capability] = []
    generates = GENERATION in served.tasks
    if generates:
        capabilities += [model_pb2.CAPABILITY_GENERATE, model_pb2.CAPABILITY_STRUCTURED_OUTPUTS]
    if generates and served.has_chat_template:
        capabilities.append(model_pb2.CAPABILITY_CHAT)
    if set(served.tasks) - {GENERATION}:
        capabilities.append(model_pb2.CAPABILITY_EMBED)
    if generates and served.has_tools:
        capabilities.append(model_pb2.CAPABILITY_TOOLS)
    model = model_pb2.Model(
        name=served.name,
        aliases=served.aliases,
        base_model=served.base_model,
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
        eos_token_ids=served.eos_token_ids,
        capabilities=capabilities,
        fingerprint=served.fingerprint,
        max_running_choices=served.max_running,
        default_sampling=sampling_pb2.SamplingParams(**dict[str, Any](served.default_sampling)),
    )
    model.create_time.FromSeconds(served.created_unix_s)
    return model
