"""Chat messages -> one prompt, by the Jinja template that a model brings along."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triptych.errors import InvalidRequest, ModelError
from triptych.text.tokenizer import Tokenizer

# Stands behind a content that is continued; the space tells whether the template trims contents.
_CONTINUED = "\x02continued\x03 "

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else the template reads (`tool_calls`, `name`)."""


class ChatTemplate:
    """A compiled template; immutable and safe to use from several threads.

    Templates come with models and are not trusted: they run in Jinja's sandbox and cannot change what
    they are given. The environment is that of transformers' `apply_chat_template`, so the same prompt
    comes out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Compile the tokenizer's template, if it has one.

        Raises:
            ModelError: the template is not valid Jinja.
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
        self._template: jinja2.Template | None = None
        self.knows_tools = False
        """Whether the template has a place for tools."""
        if tokenizer.chat_template is not None:
            environment = _environment()
            try:
                self._template = environment.from_string(tokenizer.chat_template)
                parsed = environment.parse(tokenizer.chat_template)
                self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(parsed)
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(f"chat_template: line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt, special tokens spelled out: encode it with `add_special_tokens=False`.

        Args:
            messages: oldest first; left unchanged.
            add_generation_prompt: end with the header of the assistant's answer.
            continue_final_message: end with the content of the last message, so that the model goes on with it.
            tools: JSON schemas of functions that the model may call.
            documents: texts that the answer may draw on.
            variables: passed to the template as they are (`enable_thinking=False`).
        Raises:
            InvalidRequest: on `messages`: the model has no template, or its template refuses them.
        """
        if self._template is None:
            raise InvalidRequest(
                "messages",
                "this model has no chat template; send a plain prompt instead, or "
                "add `chat_template` to its tokenizer_config.json",
            )
        if continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": f"{last.get('content') or ''}{_CONTINUED}"}]
        try:
            prompt = self._template.render(
                **self._variables | variables,
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:
            # A template is a program that came with the model: given messages of an odd form it fails in
            # ways of its own (TypeError, KeyError, recursion), and none of our code runs inside it.
            raise InvalidRequest("messages", f"the model's chat template refused them: {error}") from error
        return _cut_behind_content(prompt) if continue_final_message else prompt


def _cut_behind_content(prompt: str) -> str:
    """Return the prompt up to the mark, which stands behind the content of the last message."""
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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
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
