"""Start a stack on free ports, answer one question at temperature 0 token by token, stop.

  triptych demo --prompt "What is the capital of France?"
  triptych demo --prompt "Hello" --model.model /path/of/a/model

The answer goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from triptych.cli.access import Frontend
from triptych.cli.stack import stack_to_use
from triptych.cli.streaming import AnswerPrinter, write_now
from triptych.config.loader import add_config_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the user's turn of a chat")
    parser.add_argument("--max-tokens", type=int, default=256, help="end the answer there (default: 256)")
    parser.usage = f"{parser.prog} --prompt TEXT [--max-tokens N] [--SECTION.OPTION VALUE ...]"
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    # The embedded model is nearly undecided about its first token (0.08 between the two best logits, to "What
    # is the capital of France?"); bfloat16 rounds by more than that, so only float32 says the same everywhere.
    with stack_to_use(arguments, {"model.dtype": "float32"}) as frontend:
        stats = asyncio.run(_answer(frontend, arguments.prompt, arguments.max_tokens))
    print(stats, file=sys.stderr)
    return 0


async def _answer(frontend: Frontend, text: str, max_tokens: int) -> object:
    printer = AnswerPrinter()
    async with frontend.open_client() as client:
        messages = [{"role": "user", "content": text}]
        await printer.print(client.generate(messages, {"temperature": 0.0, "max_tokens": max_tokens}))
    write_now("\n")
    return printer.stats
