"""Chat messages -> one prompt, by the Jinja template that a model brings along."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triptych.errors import InvalidRequest, ModelError

# Placed behind a content that is continued; the space shows whether the template trims contents.
_CONTINUED = "\x02continued\x03 "

_DEFAULT = "default"
_WITH_TOOLS = "tool_use"

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else the template reads (`tool_calls`, `name`)."""


class TemplateSource(Protocol):
    """A template and the tokens that it may write: a `Tokenizer`, or a copy of what is needed of one."""

    chat_template: str | None
    other_templates: dict[str, str]

    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token(self) -> str | None: ...
    @property
    def unk_token(self) -> str | None: ...
    @property
    def pad_token(self) -> str | None: ...


class ChatTemplate:
    """A model's templates, compiled; immutable and safe to use from several threads.

    Templates come with models and are not trusted: they run in Jinja's sandbox and cannot change what
    they are given, and one operation makes no value larger than 16 MiB. How long all of them take is for the caller to
    bound. The environment is that of transformers' `apply_chat_template`, so the same prompt comes out.
    """

    def __init__(self, tokenizer: TemplateSource) -> None:
        """Compile the tokenizer's templates, if it has any.

        Raises:
            ModelError: A template is not valid Jinja.
        """
        self._variables = {
            name: value
            for name, value in (
                ("bos_token", tokenizer.bos_token),
                ("eos_token", tokenizer.eos_token),
                ("unk_token", tokenizer.unk_token),
                ("pad_token", tokenizer.pad_token),
            )
            if value is not None
        }
        sources = dict(tokenizer.other_templates)
        if tokenizer.chat_template is not None:
            sources[_DEFAULT] = tokenizer.chat_template
        self._templates: dict[str, jinja2.Template] = {}
        self.knows_tools = False
        """Whether a template has a place for tools."""
        environment = _environment() if sources else None
        for name, source in sources.items():
            assert environment is not None
            try:
                self._templates[name] = environment.from_string(source)
                parsed = environment.parse(source)
                self.knows_tools |= "tools" in jinja2.meta.find_undeclared_variables(parsed)
            except jinja2.TemplateSyntaxError as error:
                which = "" if name == _DEFAULT else f" {name!r}"
                raise ModelError(f"chat_template{which}: line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str = "",
        **variables: Any,
    ) -> str:
        """The prompt, special tokens spelled out: encode it with `add_special_tokens=False`.

        Args:
            messages: oldest first; left unchanged.
            add_generation_prompt: end with the header of the assistant's answer.
            continue_final_message: end with the content of the last message, so that the model goes on with it.
            tools: JSON schemas of functions that the model may call.
            documents: texts that the answer may draw on.
            chat_template: name of one of the model's templates; empty: `tool_use` for tools if there is one, else
                `default`.
            variables: passed to the template as they are (`enable_thinking=False`).
        Raises:
            InvalidRequest: on `messages`: the model has no such template, or its template refuses them.
        """
        template = self._choose(chat_template, has_tools=tools is not None)
        if continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": f"{last.get('content') or ''}{_CONTINUED}"}]
        try:
            prompt = template.render(
                **self._variables | variables,
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise InvalidRequest(
                "messages", "the model's chat template needs too much memory for them"
            ) from None
        except Exception as error:
            # A template is a program that came with the model: given messages of an odd form it fails in
            # ways of its own (TypeError, KeyError, recursion), and none of our code runs inside it.
            raise InvalidRequest("messages", f"the model's chat template refused them: {error}") from error
        return _cut_behind_content(prompt) if continue_final_message else prompt

    def _choose(self, name: str, *, has_tools: bool) -> jinja2.Template:
        if not isinstance(name, str):  # a client's variable
            raise InvalidRequest(
                "messages", "chat_template: must be the name of one of the model's templates"
            )
        if not name:
            name = _WITH_TOOLS if has_tools and _WITH_TOOLS in self._templates else _DEFAULT
        template = self._templates.get(name)
        if template is not None:
            return template
        others = ", ".join(sorted(self._templates))
        if others:
            raise InvalidRequest("messages", f"this model has no chat template {name[:100]!r}, only {others}")
        raise InvalidRequest(
            "messages",
            "this model has no chat template; send a plain prompt instead, or "
            "add `chat_template` to its tokenizer_config.json",
        )


def _cut_behind_content(prompt: str) -> str:
    """Return the prompt up to the mark, which is behind the content of the last message."""
    before, mark, behind = prompt.rpartition(_CONTINUED.rstrip())
    if not mark:
        why = "the model's chat template does not show the content of the last message, so it cannot be continued"
        raise InvalidRequest("messages", why)
    # a template that trims contents has trimmed the mark, and would have trimmed what is before it
    return before if behind.startswith(" ") else before.rstrip()


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it only passes."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which one operation cannot take all memory, or compute for ever inside of the interpreter."""

    intercepted_binops = frozenset({"*", "**", "%", "<<"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Carry out an operator with a result that may be much larger than its operands."""
        match operator:
            case "*":
                for one, other in ((left, right), (right, left)):
                    if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                        _check_size(len(one) * other)
                if isinstance(left, int) and isinstance(right, int):
                    _check_size((left.bit_length() + right.bit_length()) // 8)
            case "**" if isinstance(left, int) and isinstance(right, int):
                _check_size(left.bit_length() * abs(right) // 8)
            case "%" if isinstance(left, str):
                _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(
        __self,
        __context: jinja2.runtime.Context,
        __function: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call what a template calls. Methods of texts are given no sizes beyond the limit."""
        text = getattr(__function, "__self__", None)
        if isinstance(text, str):
            _check_method(text, __function.__name__, args)
        return super().call(__context, __function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what a template gets for `text.format`; None if the value is none."""
        wrapper = super().wrap_str_format(value)
        if wrapper is not None:
            _check_format(value.__self__)
        return wrapper


_MAX_SIZE = 16 << 20  # characters or entries of one value: as long as the longest message
_SIZED_FILTERS = ("batch", "center", "indent", "slice", "truncate", "wordwrap")
_SIZED_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")
_WIDE_FORMAT = re.compile(r"%[-+ #0]*[0-9.]*[0-9]{7}|:[^{}]{0,8}[0-9]{7}[^{}]{0,20}\}")


def _check_size(size: int) -> None:
    if size > _MAX_SIZE:
        raise jinja2.TemplateError(f"a value of {size} characters or entries is above the limit {_MAX_SIZE}")


def _check_sizes(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, int):
            _check_size(value)


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise jinja2.TemplateError("a format with a width of 7 digits is refused")


def _check_method(text: str, name: str, arguments: Sequence[Any]) -> None:
    """Refuse a method of a text with a result that would be much larger than all that it is given."""
    match name, arguments:
        case "replace", (str() as old, str() as new, *_):
            _check_size(text.count(old) * len(new))
        case "join", (list() | tuple() as parts, *_):
            _check_size(len(parts) * len(text))
        case _ if name in _SIZED_METHODS:
            _check_sizes(arguments)


def _bounded(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that is given no sizes beyond the limit."""

    @functools.wraps(filter_)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_sizes((*args, *kwargs.values()))
        return filter_(*args, **kwargs)

    return checked


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    for name in _SIZED_FILTERS:
        environment.filters[name] = _bounded(environment.filters[name])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
