"""Send one prompt to a served model and print the answer as it comes.

triptych complete "Once upon a time" --max-tokens 64
triptych complete --chat "What is the capital of France?" --temperature 0 --stats
git diff | triptych complete --chat -
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from triptych.cli.streaming import add_address_argument, frontend_of, print_answer, write_now
from triptych.client.request import Prompt, RequestOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    add_address_argument(parser)
    parser.add_argument(
        "--model", default="", help="which of the models served there (default: the only one)"
    )
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn, not plain text")
    parser.add_argument("--max-tokens", type=int, help="default: 16, with --chat the rest of the context")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own)")
    parser.add_argument("--seed", type=int, help="the same seed draws the same tokens")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument("--stats", action="store_true", help="print TTFT and tokens/s to stderr")


def run(arguments: argparse.Namespace) -> int:
    return asyncio.run(_complete(arguments))


async def _complete(arguments: argparse.Namespace) -> int:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    prompt: Prompt = [{"role": "user", "content": text}] if arguments.chat else text
    wanted: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed", "stop")
    }
    async with frontend_of(arguments).open_client() as client:
        stats = await print_answer(client, prompt, wanted, RequestOptions(model=arguments.model))
    write_now("\n")
    if arguments.stats:
        print(stats, file=sys.stderr)
    return 0
