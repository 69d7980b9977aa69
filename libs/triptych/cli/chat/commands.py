"""The commands that a user of the chat may type besides questions: one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triptych.cli.chat.conversation import CHAT_FIELDS, Conversation
from triptych.cli.sampling_flags import parse_field

Todo = Literal["answer", "quit"] | None
"""The chat's next act after a command: answer the last question, leave, or (None) read the next line."""


@dataclass(frozen=True, slots=True)
class _Command:
    argument: str
    """The form of the text after the name, for help."""
    help: str
    run: Callable[[Conversation, str], Todo]
    """Takes the conversation and the text after the name. An OSError or a ValueError is shown."""


def obey(line: str, conversation: Conversation) -> Todo:
    """Run the command of a line and print what it says; wrong ones say what is wrong, and do nothing."""
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        print(f"[{name}: no such command; /help lists them]")
        return None
    try:
        return command.run(conversation, rest.strip())
    except OSError as error:
        print(f"[{name} {rest.strip()}: {error.strerror or error}]")
    except ValueError as error:
        print(f"[{name}: {error}]")
    return None


def _help(conversation: Conversation, text: str) -> Todo:
    for name, command in COMMANDS.items():
        print(f"{name + ' ' + command.argument:<20} {command.help}")
    return None


def _system(conversation: Conversation, text: str) -> Todo:
    if text:
        conversation.system = "" if text == "-" else text
    print(f"[system: {conversation.system or 'none'}]")
    return None


def _retry(conversation: Conversation, text: str) -> Todo:
    conversation.ask_again()
    return "answer"


def _undo(conversation: Conversation, text: str) -> Todo:
    question = conversation.undo()
    print(f"[forgotten: {question.splitlines()[0]:.60}]")
    return None


def _clear(conversation: Conversation, text: str) -> Todo:
    conversation.clear()
    return None


def _save(conversation: Conversation, text: str) -> Todo:
    print(f"[{conversation.save(_file(text))} messages saved]")
    return None


def _load(conversation: Conversation, text: str) -> Todo:
    print(f"[{conversation.load(_file(text))} messages loaded]")
    return None


def _file(text: str) -> Path:
    if not text:
        raise ValueError("name a file")
    return Path(text).expanduser()


def _set(conversation: Conversation, text: str) -> Todo:
    name, _, value = text.partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if value and name not in CHAT_FIELDS:
        raise ValueError(f"{name}: no such field; there are {', '.join(CHAT_FIELDS)}")
    if value:
        conversation.sampling[name] = parse_field(name, value)
    else:
        conversation.sampling.pop(name, None)
    said = ", ".join(f"{field} {value}" for field, value in conversation.sampling.items())
    print(f"[sampling: {said or 'as the model and the server have it'}]")
    return None


def _stats(conversation: Conversation, text: str) -> Todo:
    conversation.shows_stats = not conversation.shows_stats
    print(f"[stats {'on' if conversation.shows_stats else 'off'}]")
    return None


def _quit(conversation: Conversation, text: str) -> Todo:
    return "quit"


COMMANDS = {
    "/help": _Command("", "list the commands", _help),
    "/system": _Command("[TEXT]", "show or set the system message; - is none", _system),
    "/retry": _Command("", "ask the last question again", _retry),
    "/undo": _Command("", "forget the last question and its answer", _undo),
    "/clear": _Command("", "forget all but the system message", _clear),
    "/save": _Command("FILE", "write the messages as JSON", _save),
    "/load": _Command("FILE", "go on with the messages of such a file", _load),
    "/set": _Command(
        "[FIELD [VALUE]]", "show the sampling; set a field, or leave it to the server again", _set
    ),
    "/stats": _Command("", "show tokens and times after each answer, or no more", _stats),
    "/quit": _Command("", "leave, as Ctrl-D does", _quit),
}
