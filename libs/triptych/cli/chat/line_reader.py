"""Reads what the user types: with prompt_toolkit on a terminal, else by `input`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.cli.chat.commands import COMMANDS
from triptych.cli.chat.conversation import CHAT_FIELDS
from triptych.hub import cache_home

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = "> "
_MORE = "… "
_HISTORY_FILE = "chat_history"
_MAX_HISTORY_BYTES = 1 << 20

ReadLine = Callable[[], str]
"""Returns what the user sends, of one line or more. Raises KeyboardInterrupt at Ctrl-C, EOFError at the end."""


def create_line_reader() -> ReadLine:
    """Return the best reader for this terminal and installation."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _read_plain
    try:
        import prompt_toolkit  # noqa: F401
    except ModuleNotFoundError:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() line editing
        return _read_plain
    session = create_session(cache_home() / _HISTORY_FILE)
    return lambda: session.prompt(PROMPT, prompt_continuation=_MORE)


def create_session(history_file: Path, **session: Any) -> PromptSession[str]:
    """Return a prompt with several lines, the history of earlier chats and completion of commands.

    Args:
        session: More arguments of `PromptSession`.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    fields = [f"/set {name}" for name in CHAT_FIELDS]
    return PromptSession(
        multiline=True,
        key_bindings=_key_bindings(),
        history=FileHistory(history_file) if _prepare(history_file) else InMemoryHistory(),
        completer=WordCompleter([*COMMANDS, *fields], sentence=True),
        complete_while_typing=False,
        enable_open_in_editor=False,
        **session,
    )


def _read_plain() -> str:
    try:
        line = input(PROMPT)
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{input(_MORE)}"
        return line
    except (KeyboardInterrupt, EOFError):
        print()
        raise


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


def _prepare(file: Path) -> bool:
    """Make the history's file, readable by its owner only and of a bounded size; return whether it can be used."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        content = file.read_bytes()
        if len(content) > _MAX_HISTORY_BYTES:  # entries begin with an empty line
            _, _, kept = content[-_MAX_HISTORY_BYTES // 2 :].partition(b"\n\n")
            file.write_bytes(b"\n" + kept)
        with file.open("ab"):
            return True
    except OSError as error:
        print(f"[no history: {file}: {error.strerror or error}]", file=sys.stderr)
        return False
