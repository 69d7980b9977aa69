"""`triptych chat`: commands, several lines, Ctrl-C, what a terminal is shown."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from tests.helpers.command import exit_code, on_terminal, wait_until
from triptych.cli.chat.line_reader import create_session
from triptych.cli.streaming import AnswerPrinter
from triptych.errors import EngineFailure
from triptych.types.events import AdmittedEvent, DeltaEvent, FinishedEvent
from triptych.types.outputs import StageTimings, ToolCallDelta, Usage


@pytest.fixture
def chat(frontend, monkeypatch, capsys):
    """Runs a chat over these lines; returns what it printed."""

    def run(*lines: str, options: tuple[str, ...] = ()) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert exit_code("chat", "--address", frontend.address, *options) == 0
        return capsys.readouterr().out

    return run


def turns(frontend):
    """Role and text of the messages of each request."""
    return [[(m.role, m.parts[0].text) for m in r.generation.chat.messages] for r in frontend.requests]


def questions(frontend):
    return [request[-1][1] for request in turns(frontend)]


def test_chat_remembers_the_conversation_and_leaves_at_the_end_of_input(chat, frontend):
    out = chat("one", "", "two", "/clear", "three", options=("--system", "be brief", "--temperature", "0"))
    assert " one\n" in out
    system = ("system", "be brief")
    assert turns(frontend) == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", " one"), ("user", "two")],
        [system, ("user", "three")],
    ]


def test_undo_and_retry_go_back_to_the_last_question(chat, frontend):
    chat("/retry", "/undo", "one", "two", "/undo", "/retry", "three", "/quit", "never")
    assert turns(frontend)[2:] == [
        [("user", "one")],
        [("user", "one"), ("assistant", " one"), ("user", "three")],
    ]


def test_a_failed_answer_leaves_all_as_it_was(chat, frontend, capsys):
    frontend.errors = [EngineFailure("broken")]
    chat("one", "two")
    assert turns(frontend)[1] == [("user", "two")]
    frontend.requests.clear()

    def fail(request):
        frontend.errors = [EngineFailure("broken")] if len(frontend.requests) == 1 else []

    frontend.on_request = fail
    chat("one", "/retry", "two")
    assert turns(frontend)[2] == [("user", "one"), ("assistant", " one"), ("user", "two")]


def test_system_and_sampling_can_be_changed_on_the_way(chat, frontend):
    out = chat(
        "/system be kind",
        "/set top-p 0.5",
        "/set stop END",
        "/set temperature warm",
        "/set n 2",
        "/set bogus 1",
        "one",
        "/system -",
        "/set top_p",
        "/set",
        "two",
        options=("--seed", "7", "--no-skip-special-tokens"),
    )
    first, second = (request.generation for request in frontend.requests)
    assert [m.role for m in first.chat.messages] == ["system", "user"]
    assert (first.sampling.top_p, first.sampling.seed, list(first.length.stop)) == (0.5, 7, ["END"])
    assert first.response.HasField("skip_special_tokens")
    assert not first.response.skip_special_tokens
    assert not second.sampling.HasField("top_p")
    assert [m.role for m in second.chat.messages] == ["user", "assistant", "user"]
    for told in (
        "temperature: 'warm' is no value of the form X",
        "n: no such field; there are",
        "bogus: no such field; there are",
        "[sampling: seed 7, skip_special_tokens False, stop ['END']]",
    ):
        assert told in out


def test_a_saved_chat_goes_on_in_another(chat, frontend, tmp_path):
    file = tmp_path / "chat.json"
    assert "[3 messages saved]" in chat("one", f"/save {file}", options=("--system", "s"))
    assert json.loads(file.read_text()) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": " one"},
    ]
    assert "[3 messages loaded]" in chat(f"/load {file}", "two")
    assert turns(frontend)[-1] == [("system", "s"), ("user", "one"), ("assistant", " one"), ("user", "two")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no", "[/load: Expecting value"),
        ("{}", "[/load: expected a JSON list of messages]"),
        ('[{"role": "user"}]', "[/load: messages[0]: expected role, content"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_chat_changes_nothing(chat, frontend, tmp_path, text, told):
    file = tmp_path / "chat.json"
    if text is not None:
        file.write_text(text)
    assert told in chat("one", f"/load {file}", "/save", "two", f"/save {tmp_path}/no/such")
    assert len(turns(frontend)[-1]) == 3


def test_help_lists_every_command_and_a_wrong_one_says_so(chat):
    out = chat("/help", "/bogus", "/stats", "one")
    for name in ("/system [TEXT]", "/retry", "/undo", "/clear", "/save FILE", "/load FILE", "/set", "/quit"):
        assert name in out
    assert "[/bogus: no such command; /help lists them]" in out


def test_stats_come_on_request(chat, frontend, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two\n/stats\nthree\n"))
    assert exit_code("chat", "--address", frontend.address, "--stats") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[2 tokens in; TTFT ")
    assert line.endswith(" 2 tokens]")


def test_a_backslash_goes_on_in_the_next_line(chat, frontend):
    chat("one\\", "two")
    assert questions(frontend) == ["one\ntwo"]


def test_tools_and_template_variables_are_sent(chat, frontend, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]')
    chat("one", options=("--tools", str(tools), "--chat-template-kwargs", '{"enable_thinking": false}'))
    [request] = frontend.requests
    assert [tool.name for tool in request.generation.chat.tools] == ["f"]
    assert json.loads(request.generation.chat.template_kwargs_json) == {"enable_thinking": False}


@pytest.mark.parametrize(
    "options", [("--tools", "/no/such"), ("--chat-template-kwargs", "[1]"), ("--chat-template-kwargs", "{")]
)
def test_options_that_are_no_json_are_one_line(frontend, options, capsys):
    assert exit_code("chat", "--address", frontend.address, *options) == 2
    assert capsys.readouterr().err.startswith(f"triptych chat: {options[0]}")


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(frontend):
    words = [sys.executable, "-m", "triptych.cli", "chat", "--address", frontend.address]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        child.stdin.write("hang\n")
        child.stdin.flush()
        wait_until(lambda: frontend.num_running == 1)
        os.kill(child.pid, signal.SIGINT)
        wait_until(lambda: frontend.num_cancelled == 1)
        out, err = child.communicate("again\n", timeout=60)
        assert (child.returncode, err) == (0, "")
        assert "[stopped]" in out
        assert " again\n" in out
    assert questions(frontend)[-1] == "again"


# On a terminal


def test_a_terminal_has_lines_history_and_ctrl_c(frontend, tmp_path):
    with on_terminal("chat", "--address", frontend.address, TRIPTYCH_HOME=str(tmp_path)) as terminal:
        terminal.wait_for_prompt(1)
        terminal.type("hang\r")
        wait_until(lambda: frontend.num_running == 1)
        terminal.type("\x03")  # stops the answer
        terminal.wait_for("[stopped]")
        terminal.wait_for_prompt(2)
        terminal.type("dropped\x03")  # drops the line
        terminal.wait_for_prompt(3)
        terminal.type("one\x1b\rtwo\\\rthree\r")  # Alt-Enter, a backslash
        wait_until(lambda: len(frontend.requests) == 2)
        terminal.wait_for_prompt(4)
        terminal.type("\x1b[200~pasted\rlines\x1b[201~\r")
        wait_until(lambda: len(frontend.requests) == 3)
        terminal.wait_for_prompt(5)
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
    assert questions(frontend) == ["hang", "one\ntwo\nthree", "pasted\nlines"]
    history = tmp_path / "chat_history"
    assert "+two" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    with on_terminal("chat", "--address", frontend.address, TRIPTYCH_HOME=str(tmp_path)) as terminal:
        terminal.wait_for_prompt(1)
        terminal.type("\x1b[A\r")  # up
        terminal.wait_for_prompt(2)
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
    assert questions(frontend)[-1] == "pasted\nlines"


def test_a_terminal_is_shown_escapes_of_the_model_as_pictures(frontend):
    with on_terminal("complete", "a\x1b[2J", "--address", frontend.address) as terminal:
        assert terminal.wait_for_end() == 0
    assert "a␛[2J" in terminal.shown
    assert "\x1b[2J" not in terminal.shown


@pytest.mark.parametrize(
    ("typed", "completions"),
    [("/sy", ["/system"]), ("/set top", ["/set top_p", "/set top_k"]), ("/set n", []), ("why /s", [])],
)
def test_commands_and_fields_are_completed(tmp_path, typed, completions):
    with create_pipe_input() as keys:
        session = create_session(tmp_path / "history", input=keys, output=DummyOutput())
    found = session.completer.get_completions(Document(typed), CompleteEvent())
    assert [completion.text for completion in found] == completions


def test_reasoning_is_dimmed_on_a_terminal_and_left_out_of_a_pipe(capsys, monkeypatch):
    async def events():
        yield AdmittedEvent("r", "m", 1, [])
        yield DeltaEvent(0, "", [1], reasoning="hm\x1b[0m")
        yield DeltaEvent(0, "", [2], reasoning="m")
        yield DeltaEvent(0, "Yes.", [3])
        yield DeltaEvent(0, "", [4], tool_calls=(ToolCallDelta(0, "id", "look", '{"at": 1}'),))
        yield FinishedEvent(Usage(1, 4), StageTimings())

    printer = AnswerPrinter()
    asyncio.run(printer.print(events()))
    assert capsys.readouterr().out == 'Yes.\nlook({"at": 1})'
    assert (printer.answer.reasoning, printer.usage) == ("hm\x1b[0mm", Usage(1, 4))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    asyncio.run(AnswerPrinter().print(events()))
    assert capsys.readouterr().out == '\x1b[2mhm␛[0mm\x1b[22m\n\nYes.\nlook({"at": 1})'


def test_a_long_history_is_cut_and_one_that_cannot_be_written_is_not_kept(tmp_path, capsys):
    file = tmp_path / "history"
    file.write_bytes(b"".join(b"\n# then\n+line %d\n" % number for number in range(100_000)))
    with create_pipe_input() as keys:
        session = create_session(file, input=keys, output=DummyOutput())
        keys.send_text("\x1b[A\r")
        assert session.prompt() == "line 99999"
        assert file.stat().st_size < 1 << 20
        keys.send_text("still here\r")
        assert create_session(tmp_path / "history" / "x", input=keys, output=DummyOutput()).prompt()
    assert "[no history: " in capsys.readouterr().err
