"""The part of grpcurl that docs/cookbook.md uses: it knows of a server only what reflection tells."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

DEADLINE_S = 30.0
_DETAILS = error_details_pb2.DESCRIPTOR  # registers the types of an error's details


def run(command: str, addresses: dict[str, str]) -> str:
    """Run a command line and return what it prints.

    Args:
        addresses: Address as written -> where to connect.
    """
    parser = argparse.ArgumentParser(prog="grpcurl", allow_abbrev=False)
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", dest="data", default="")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-max-time", dest="max_time", type=float, default=DEADLINE_S)
    parser.add_argument("words", nargs="+")
    options = parser.parse_args(shlex.split(command)[1:])
    address, *words = options.words
    with grpc.insecure_channel(addresses[address], options=(("grpc.enable_http_proxy", 0),)) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = descriptor_pool.DescriptorPool(database)
        match words:
            case ["list"]:
                return "\n".join(sorted(database.get_services()))
            case ["list", service]:
                return "\n".join(f"{service}.{m.name}" for m in pool.FindServiceByName(service).methods)
            case ["describe", name]:
                return _describe(pool, name)
            case [method]:
                service, _, name = method.rpartition("/")
                found = pool.FindServiceByName(service).FindMethodByName(name)
                return "\n".join(_call(channel, pool, found, options))
    raise ValueError(f"not understood: {command}")


def _describe(pool: descriptor_pool.DescriptorPool, name: str) -> str:
    try:
        return _describe_service(pool.FindServiceByName(name))
    except KeyError:
        return _describe_message(pool.FindMessageTypeByName(name))


def _describe_service(service: ServiceDescriptor) -> str:
    def side(message: Descriptor, is_streaming: bool) -> str:
        return f"( {'stream ' if is_streaming else ''}.{message.full_name} )"

    lines = [
        f"  rpc {m.name} {side(m.input_type, m.client_streaming)} returns {side(m.output_type, m.server_streaming)};"
        for m in sorted(service.methods, key=lambda method: method.name)
    ]
    return "\n".join((f"{service.full_name} is a service:", f"service {service.name} {{", *lines, "}"))


def _describe_message(message: Descriptor) -> str:
    fields = [f"  {field.name} = {field.number};" for field in message.fields]
    return "\n".join((f"{message.full_name} is a message:", f"message {message.name} {{", *fields, "}"))


def _call(
    channel: grpc.Channel, pool: descriptor_pool.DescriptorPool, method: MethodDescriptor, options: Any
) -> Iterator[str]:
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    request_class = message_factory.GetMessageClass(method.input_type)
    call = kinds[method.client_streaming, method.server_streaming](
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=request_class.SerializeToString,
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    requests = [json_format.ParseDict(value, request_class()) for value in json_values(options.data or "{}")]
    metadata = [(key.strip(), value.strip()) for key, _, value in (h.partition(":") for h in options.headers)]
    try:
        answer = call(
            iter(requests) if method.client_streaming else requests[0],
            metadata=metadata,
            timeout=options.max_time,
        )
        for message in answer if method.server_streaming else [answer]:
            yield json_format.MessageToJson(message)
    except grpc.RpcError as error:
        yield f"ERROR:\n  Code: {_camel(error.code().name)}\n  Message: {error.details()}"
        details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
        if details is not None:
            yield "  Details:"
            for number, detail in enumerate(status_pb2.Status.FromString(details).details, start=1):
                yield f"  {number})\t{json_format.MessageToJson(detail)}"


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def json_values(text: str) -> list[Any]:
    """Return the JSON values that stand in a text one after the other."""
    decoder, values, place = json.JSONDecoder(), [], 0
    while place < len(text.rstrip()):
        value, place = decoder.raw_decode(text, place + len(text[place:]) - len(text[place:].lstrip()))
        values.append(value)
    return values
