"""Requests as a client wrote them, unchecked and the same from every API."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

from triptych.errors import DeadlineExceeded, FieldViolation
from triptych.types.pooling import PoolingParams
from triptych.types.sampling import OutputKind
from triptych.types.structured import StructuredOutputs
from triptych.types.submit import RequestHead

MAX_MESSAGES = 16384  # of one conversation
MAX_DOCUMENTS = 1024  # of one conversation
MAX_ABORTS = 4096  # ids in one call
TOOL_CHOICES = ("auto", "none", "required")
"""Words of `tool_choice`; any other is the name of a tool."""
_MESSAGE_CHARS = 60  # an empty message costs as much as so many characters and those of its role
_LONG_VARIABLE = 1 << 13  # counts as the size of a list or an object, which is not looked into


@dataclass(frozen=True, slots=True, eq=False)
class WrittenMessages:
    """The messages of a long conversation, which a child process has read and checked.

    No objects are made of them in this process: the chat template is rendered in a child process as well.
    """

    json: bytes
    """The messages as JSON."""
    count: int
    num_chars: int
    """As of `num_chars_of`."""
    faults: tuple[tuple[str, str], ...]
    """Everything that is wrong with them: the place behind the path of the messages, `[2].role`, and the reason."""

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True, eq=False)
class WrittenVariable:
    """A list or an object that a long conversation gives to its template: as `WrittenMessages`, it stays JSON."""

    json: bytes
    count: int
    """Entries of it."""

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class RawChat:
    """A conversation as the client wrote it."""

    messages: Sequence[Mapping[str, Any]] | WrittenMessages
    """Each with `role` and `content` (text) at least."""
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the chat template; each may be a `WrittenVariable`."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model may call: `{"type": "function", "function": {"name": …, "parameters": …}}` each."""
    tool_choice: str = "auto"
    """auto, none, required, or the name of the tool that is called."""
    parallel_tool_calls: bool = True
    """The answer may hold several calls."""
    includes_reasoning: bool = True
    """The reasoning is sent."""
    continue_final_message: bool = False
    """The model goes on with the last message; no turn is opened."""
    documents: Sequence[Mapping[str, Any]] | WrittenVariable = ()
    """Texts that the answer may draw on, for templates that read them."""
    size: int = field(init=False)
    """The amount of work to check and to render it, in characters of a message."""

    def __post_init__(self) -> None:
        num_chars = num_chars_of(self.messages)
        variables = sum(_size_of_variable(value) for value in self.template_kwargs.values())
        variables += _LONG_VARIABLE * (len(self.tools) + len(self.documents))
        object.__setattr__(self, "size", num_chars + variables + len(self.messages) * _MESSAGE_CHARS)

    @property
    def demands_calls(self) -> bool:
        """Whether the answer has to call a tool."""
        return self.tool_choice not in ("auto", "none")

    @property
    def names_tool(self) -> bool:
        """Whether the answer has to call a certain tool."""
        return self.tool_choice not in TOOL_CHOICES

    @property
    def template_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools that the model is shown; None if there are none."""
        return self.tools if self.tools and self.tool_choice != "none" else None


@dataclass(frozen=True, slots=True)
class RawPair:
    """Two texts that a classifier compares, as the client wrote them."""

    first: str
    """The query."""
    second: str
    """The document."""
    second_path: str = ""
    """Path of the second text in the client's words; that of the first is the prompt's."""

    def __len__(self) -> int:
        return len(self.first) + len(self.second)


RawPrompt = str | Sequence[int] | RawChat | RawPair | None
"""A prompt as the client wrote it; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """One request, unchecked. The same from every API."""

    api: str
    """grpc or http; for logs and metrics."""
    prompt: RawPrompt
    """The prompt; None if the client gave none."""
    head: RequestHead = field(default_factory=RequestHead)
    """Without a request id, one is drawn."""
    client_names: tuple[str, ...] = ()
    """Other names that its client knows it by, and may abort it by. Requests may share them."""
    model: str = ""
    """Empty: the one served."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the client gave, by name; absent or None is unset."""
    takes_rest_of_context: bool = False
    """An output without `max_tokens` may be as long as the context leaves, as it always may for a chat."""
    output_kind: OutputKind = OutputKind.DELTA
    min_interval_tokens: int = 0
    """New tokens of a choice to gather before they are sent. 0 sends them as they come."""
    emitted: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Choices to go on with, by index, and their output tokens so far. Empty: all, from their beginning."""
    add_special_tokens: bool | None = None
    """Whether to add special tokens around a text. None means yes."""
    truncate_prompt_tokens: int | None = None
    """Tokens of the prompt to keep; -1: as many as leave room for the output. None: all."""
    keeps_beginning: bool = False
    """Whether a prompt that is truncated loses its end. Otherwise it loses its beginning."""
    pooling: PoolingParams | None = None
    """How its text becomes vectors. None: it generates. A pooled request has no sampling fields."""
    prompt_name: str = ""
    """The checkpoint's name of a text, such as query, that precedes that of a pooled request. Empty: its default."""
    adapter: str = ""
    """Name of an adapter that is given beside the model's. Empty: none is."""
    echo: bool = False
    deadline_s: float | None = None
    """Time left for all of it."""
    answer: Mapping[str, Any] | None = None
    """The part that its API has to know to go on with the answer at another frontend, as JSON has it. None: it is not
    kept for that."""
    resumes: bool = False
    """Whether the client goes on elsewhere with a stream that breaks, so that a frontend that stops may end it."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Field here -> its path in the client's words, where they differ: {"prompt": "messages",
    "logprobs": "top_logprobs"}."""
    violations: tuple[FieldViolation, ...] = ()
    """Violations that the API found by itself; reported together with the rest."""
    unsupported: tuple[str, ...] = ()
    """Paths of fields that the client set and this version does not support; refused by name."""

    @property
    def has_schema(self) -> bool:
        """Whether the answer may be held to a schema."""
        has_tools = isinstance(self.prompt, RawChat) and bool(self.prompt.tools)
        return has_tools or self.sampling.get("structured_outputs") is not None

    @property
    def size(self) -> int:
        """The amount of work to check it: characters, token ids, entries of lists."""
        size = sum(map(_size_of_field, self.sampling.values()))
        size += sum(map(len, self.emitted.values()))
        if isinstance(self.prompt, RawChat):
            return size + self.prompt.size
        return size if self.prompt is None else size + len(self.prompt)

    def path(self, name: str) -> str:
        """Return the path of a field of this class, or of `SamplingParams`, as the client wrote it."""
        return self.paths.get(name, name)


def with_remaining_time(raw: RawRequest, arrived: float) -> RawRequest:
    """Return a request with the part of its time that is left. Arguments and errors are those of `remaining_time`."""
    remaining_s = remaining_time(raw.deadline_s, arrived)
    return raw if remaining_s == raw.deadline_s else replace(raw, deadline_s=remaining_s)


def remaining_time(deadline_s: float | None, arrived: float) -> float | None:
    """Return the seconds that are left of a time. One that is refused for its value stays as it is.

    Args:
        deadline_s: The time. None: any.
        arrived: When it began, by `time.monotonic`.

    Raises:
        DeadlineExceeded: Nothing is left.
    """
    if deadline_s is None or not deadline_s > 0:
        return deadline_s
    remaining_s = deadline_s - (time.monotonic() - arrived)
    if remaining_s <= 0:
        raise DeadlineExceeded(f"the deadline of {deadline_s:g} s has passed")
    return remaining_s


def why_too_many_messages(num_messages: int) -> str | None:
    """Return what is wrong with the length of a conversation, or None if nothing is."""
    if num_messages <= MAX_MESSAGES:
        return None
    return f"{num_messages} messages are above the limit {MAX_MESSAGES}"


def num_chars_of(messages: Sequence[Mapping[str, Any]] | WrittenMessages) -> int:
    """Return the characters of all texts in messages."""
    return messages.num_chars if isinstance(messages, WrittenMessages) else sum(map(_num_chars, messages))


def _num_chars(message: Mapping[str, Any]) -> int:
    """Return the characters of all texts in a message: templates read its calls and its reasoning, too."""
    num_chars, parts = 0, [*message.values()]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            num_chars += len(part)
        elif isinstance(part, Mapping):
            parts += [*part, *part.values()]
        elif isinstance(part, (list, tuple)):
            num_chars += len(part)  # entries that are no text cost something, too
            parts += part
    return num_chars


def _size_of_field(value: Any) -> int:
    if isinstance(value, StructuredOutputs):
        return sum(map(len, value.texts)) + len(value.choice or ())
    if isinstance(value, (list, tuple)):
        return len(value) + sum(len(entry) for entry in value if isinstance(entry, str))
    return len(value) if isinstance(value, Sized) else 0


def _size_of_variable(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return 1 if value is None or isinstance(value, (bool, int, float)) else _LONG_VARIABLE
