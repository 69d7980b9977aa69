"""Measure a server: latencies under a load that you describe, or the throughput of a stack.

triptych bench serve --request-rate 4            requests come at random, 4 per second
triptych bench serve --max-concurrency 16        16 users, each sends the next when the last is answered
triptych bench serve --sweep                     latencies at 20, 50, 80, 95 and 120% of the capacity
triptych bench serve --backend openai --base-url http://HOST:8000 --model NAME   any OpenAI server
triptych bench throughput                        64 prompts of 128 tokens, 128 new, all at once
triptych bench latency --input-len 1024          one stream at a time
triptych bench throughput --address HOST:PORT    the server there (default: $TRIPTYCH_ADDRESS, else the one at
                                                 127.0.0.1:50051 if one answers, else a stack of its own)
triptych bench throughput --model.dtype float32  a stack of its own, with these options
triptych bench routing                           ways to choose among several engines
"""

from __future__ import annotations

import argparse

from triptych.cli.bench import rounds, routing, serve

_WHAT_TO_MODULE = {
    "serve": (serve, "latencies under load, open or closed loop, over gRPC or HTTP"),
    "throughput": (rounds, "rounds of many requests at once"),
    "latency": (rounds, "rounds of one request"),
    "routing": (routing, "ways to choose among several engines, simulated, and beside other routers"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for what, (module, text) in _WHAT_TO_MODULE.items():
        subparser = kinds.add_parser(
            what,
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(subparser)


def run(arguments: argparse.Namespace) -> int:
    module, _ = _WHAT_TO_MODULE[arguments.what]
    return module.run(arguments)
