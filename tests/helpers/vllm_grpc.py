"""A client of vLLM's gRPC service made from the protos that SMG publishes, not from ours.

Both define the same names, so that one process cannot register both: those of SMG live in a pool of their own.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_DUMP = """
import sys
from google.protobuf import descriptor_pb2
from smg_grpc_proto import vllm_engine_pb2
files = descriptor_pb2.FileDescriptorSet()
for file in (*vllm_engine_pb2.DESCRIPTOR.dependencies, vllm_engine_pb2.DESCRIPTOR):
    file.CopyToProto(files.file.add())
sys.stdout.buffer.write(files.SerializeToString())
"""


def published_files() -> list[descriptor_pb2.FileDescriptorProto]:
    """Return the files of the installed smg-grpc-proto, in the order of their imports."""
    done = subprocess.run([sys.executable, "-c", _DUMP], capture_output=True, check=True)
    return list(descriptor_pb2.FileDescriptorSet.FromString(done.stdout).file)


class PublishedVllm:
    """SMG's messages and calls: `api.GenerateRequest(...)`, `api.stub(channel).Generate(request)`."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in published_files():
            self._pool.Add(file)
        self.service = self._pool.FindServiceByName("vllm.grpc.engine.VllmEngine")

    def __getattr__(self, name: str) -> Any:
        """Return a message class by its name."""
        for package in ("vllm.grpc.engine", "smg.grpc.common"):
            try:
                found = self._pool.FindMessageTypeByName(f"{package}.{name}")
            except KeyError:
                continue
            return message_factory.GetMessageClass(found)
        raise AttributeError(name)

    def stub(self, channel: grpc.aio.Channel) -> Any:
        """Return an object with a call for each method."""
        calls = {}
        for method in self.service.methods:
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            calls[method.name] = kind(
                f"/{self.service.full_name}/{method.name}",
                request_serializer=message_factory.GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
            )
        return type("VllmEngineStub", (), calls)
