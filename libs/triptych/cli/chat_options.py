"""Options of a conversation, for the commands that hold one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from triptych.cli.access import read_text
from triptych.client.conversation import ChatOptions, Message
from triptych.errors import ConfigError


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--system`, `--tools` and `--chat-template-kwargs`."""
    parser.add_argument("--system", default="", metavar="TEXT", help="system message to begin with")
    parser.add_argument(
        "--tools",
        type=Path,
        metavar="FILE",
        help="JSON list of functions that the model may call, in OpenAI's form; calls are shown, not made",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="""more variables for the chat template: '{"enable_thinking": false}'""",
    )


def chat_options_of(arguments: argparse.Namespace) -> ChatOptions:
    """Return what the arguments say.

    Raises:
        ConfigError: A value is no JSON of the form that is needed; names the option.
    """
    tools: Any = []
    if arguments.tools is not None:
        tools = parse_json(read_text(arguments.tools, "--tools"), list, f"--tools {arguments.tools}")
    kwargs = arguments.chat_template_kwargs
    variables = {} if kwargs is None else parse_json(kwargs, dict, "--chat-template-kwargs")
    return ChatOptions(tools=tools, template_kwargs=variables)


def opening_of(arguments: argparse.Namespace) -> list[Message]:
    """Return the turns that every conversation begins with."""
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def parse_json(text: str, kind: type, option: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ConfigError: It is no JSON, or no list or object as `kind` wants it.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: is no JSON: {error}") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{option}: expected {'a list' if kind is list else 'an object'}, not {text:.60}")
    return value
