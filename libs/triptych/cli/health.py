"""Ask a gRPC service for its health (grpc.health.v1). Exit code 0 if it is SERVING, else 1.

triptych health 127.0.0.1:50051                                     is the process alive?
triptych health 127.0.0.1:50051 triptych.v1.GenerationService       can the frontend take requests?
triptych health 127.0.0.1:50052 triptych.internal.v1.EngineCoreService
triptych health 127.0.0.1:50053 triptych.internal.v1.WorkerService
triptych health 127.0.0.1:50053 --tls-ca ca.pem --tls-certificate client.pem --tls-key client.key
"""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.cli.tls import add_tls_arguments, tls_of
from triptych.rpc.channel import credentials_of, open_blocking_channel
from triptych.rpc.tls import create_client_tls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDR", help="host:port")
    parser.add_argument("service", metavar="SERVICE", nargs="?", default="", help="none: the process itself")
    add_tls_arguments(parser)
    parser.add_argument("--timeout-s", type=float, default=2.0, metavar="S", help="(default: 2)")


def run(arguments: argparse.Namespace) -> int:
    request = health_pb2.HealthCheckRequest(service=arguments.service)
    credentials = credentials_of(create_client_tls(tls_of(arguments)))
    with open_blocking_channel(arguments.address, credentials) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=arguments.timeout_s)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
    return 0 if response.status == health_pb2.HealthCheckResponse.SERVING else 1
