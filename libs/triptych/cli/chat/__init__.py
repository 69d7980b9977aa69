"""Talk to a served model. Answers stream; the conversation is remembered.

Enter sends. Alt-Enter, or a backslash at the end of a line, begins a new line; pasted lines stay together.
Ctrl-C   stops an answer (what came of it is kept)
Ctrl-D   leaves
/help    lists the commands: /system, /retry, /undo, /clear, /save, /load, /set, /stats, /quit
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from triptych.cli.access import add_address_argument, frontend_of
from triptych.cli.chat.commands import obey
from triptych.cli.chat.conversation import CHAT_FIELDS, Conversation
from triptych.cli.chat.line_reader import create_line_reader
from triptych.cli.chat_options import add_chat_arguments, chat_options_of
from triptych.cli.sampling_flags import add_form_arguments, add_sampling_arguments, sampling_of
from triptych.cli.streaming import AnswerPrinter, visible
from triptych.cli.wait_notice import WaitNotice
from triptych.client.conversation import Message
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions
from triptych.errors import TriptychError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address_argument(parser)
    parser.add_argument(
        "--model", default="", help="which of the models served there (default: the only one)"
    )
    add_chat_arguments(parser)
    parser.add_argument("--stats", action="store_true", help="show tokens and times after each answer")
    add_form_arguments(parser)
    add_sampling_arguments(parser, CHAT_FIELDS)


def run(arguments: argparse.Namespace) -> int:
    conversation = Conversation(arguments.system, sampling_of(arguments), shows_stats=arguments.stats)
    options = RequestOptions(model=arguments.model, chat=chat_options_of(arguments))
    with asyncio.Runner() as runner:  # one loop for all turns; Ctrl-C cancels the turn that runs
        client = runner.run(_open_client(arguments))
        try:
            models = runner.run(client.list_models())
            name = arguments.model or ", ".join(model.name for model in models)
            print(f"{name} at {arguments.address}. Ctrl-C stops an answer, Ctrl-D leaves, /help helps.")
            _converse(_Turns(runner, client, conversation, options))
        finally:
            runner.run(client.close())
    return 0


class _Turns:
    """Sends the conversation and prints the answers, one at a time."""

    def __init__(
        self,
        runner: asyncio.Runner,
        client: GenerationClient,
        conversation: Conversation,
        options: RequestOptions,
    ) -> None:
        self.conversation = conversation
        self._runner = runner
        self._client = client
        self._options = options

    def answer(self) -> None:
        """Print an answer to the last question and keep it; Ctrl-C and errors end it early.

        If nothing came, all is as before the question.
        """
        conversation, printer = self.conversation, AnswerPrinter()

        async def stream() -> None:
            messages: list[Message] = conversation.to_send
            events = self._client.generate(messages, conversation.sampling, self._options)
            await printer.print(WaitNotice(self._client).watch(events))

        try:
            self._runner.run(stream())
            print()
            if conversation.shows_stats:
                usage = printer.usage
                cached = f", {usage.num_cached_tokens} of them cached" if usage.num_cached_tokens else ""
                print(f"[{usage.num_prompt_tokens} tokens in{cached}; {printer.stats}]", file=sys.stderr)
        except KeyboardInterrupt:
            print(" [stopped]")
        except TriptychError as error:
            begun = "\n" if printer.answer.text else ""
            print(f"{begun}[{visible(str(error))}]", file=sys.stderr)
        conversation.add_answer(_to_message(printer))


def _to_message(printer: AnswerPrinter) -> dict[str, Any] | None:
    """Return the assistant's turn in OpenAI's form, None if nothing came."""
    answer = printer.answer
    if not (answer.text or answer.reasoning or answer.tool_calls):
        return None
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message


def _converse(turns: _Turns) -> None:
    read_line = create_line_reader()
    while True:
        try:
            text = read_line().strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if text.startswith("/"):
            todo = obey(text, turns.conversation)
            if todo == "quit":
                return
            if todo == "answer":
                turns.answer()
        elif text:
            turns.conversation.ask(text)
            turns.answer()


async def _open_client(arguments: argparse.Namespace) -> GenerationClient:
    return frontend_of(arguments).open_client()  # a channel belongs to the loop that it is made on
