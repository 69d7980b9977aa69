"""Talk to a served model. Answers stream; the conversation is remembered.

Ctrl-C   stops an answer (what came of it is kept)
Ctrl-D   leaves
/clear   forgets the conversation, but not --system
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import sys

from triptych.cli.streaming import add_address_argument, frontend_of, write_now
from triptych.client.conversation import Message
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions
from triptych.errors import TriptychError
from triptych.types.events import DeltaEvent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address_argument(parser)
    parser.add_argument(
        "--model", default="", help="which of the models served there (default: the only one)"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system message to begin with")
    parser.add_argument("--max-tokens", type=int, help="per answer (default: the rest of the context)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own)")


def run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives input() line editing and history
    with asyncio.Runner() as runner:  # one loop for all turns, whose Ctrl-C cancels the turn that runs
        client = runner.run(_open_client(arguments))
        try:
            models = runner.run(client.list_models())
            name = arguments.model or ", ".join(model.name for model in models)
            print(f"{name} at {arguments.address}. Ctrl-C stops an answer, Ctrl-D leaves.")
            _converse(runner, client, arguments)
        finally:
            runner.run(client.close())
    return 0


def _converse(runner: asyncio.Runner, client: GenerationClient, arguments: argparse.Namespace) -> None:
    opening: list[Message] = []
    if arguments.system:
        opening.append({"role": "system", "content": arguments.system})
    messages = list(opening)
    while True:
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if text == "/clear":
            messages = list(opening)
        elif text:
            turn: Message = {"role": "user", "content": text}
            answer = _answer(runner, client, [*messages, turn], arguments)
            if answer:
                messages += [turn, {"role": "assistant", "content": answer}]


def _answer(
    runner: asyncio.Runner, client: GenerationClient, messages: list[Message], arguments: argparse.Namespace
) -> str:
    """Print one answer and return what came of it; Ctrl-C and errors end it early."""
    parts: list[str] = []

    async def stream() -> None:
        wanted = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
        async for event in client.generate(messages, wanted, RequestOptions(model=arguments.model)):
            if isinstance(event, DeltaEvent):
                parts.append(event.text)
                write_now(event.text)

    try:
        runner.run(stream())
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except TriptychError as error:
        print(f"\n[{error}]" if parts else f"[{error}]", file=sys.stderr)
    return "".join(parts)


async def _open_client(arguments: argparse.Namespace) -> GenerationClient:
    return frontend_of(arguments).open_client()  # a channel belongs to the loop that it is made on
