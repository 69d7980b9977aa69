"""v1/sampling.proto: the forms of structured outputs between clients and frontends."""

from __future__ import annotations

from triptych.types.structured import FORM_NAMES, GrammarSyntax, StructuredOutputs
from triptych.v1 import sampling_pb2

_SYNTAX_TO_PROTO = {
    GrammarSyntax.ANY: sampling_pb2.GRAMMAR_SYNTAX_UNSPECIFIED,
    GrammarSyntax.GBNF: sampling_pb2.GRAMMAR_SYNTAX_GBNF,
    GrammarSyntax.LARK: sampling_pb2.GRAMMAR_SYNTAX_LARK,
}
_PROTO_TO_SYNTAX = {number: syntax for syntax, number in _SYNTAX_TO_PROTO.items()}
_ANY_OBJECT = '{"type": "object"}'


def structured_to_proto(form: StructuredOutputs) -> sampling_pb2.StructuredOutputs:
    """Return a form as a message.

    Raises:
        TypeError, ValueError: It has no form or several, or a value does not fit.
    """
    if len(form.given) != 1:
        names = " and ".join(form.given) or "none"
        raise ValueError(f"has {names}; set exactly one of {', '.join(FORM_NAMES)}")
    message = sampling_pb2.StructuredOutputs()
    has_whitespace = form.any_whitespace or form.whitespace_pattern is not None
    if form.json is not None or (form.json_object and has_whitespace):
        message.json_schema.schema = _ANY_OBJECT if form.json is None else form.json  # type: ignore[assignment]
        message.json_schema.any_whitespace = form.any_whitespace
        message.json_schema.whitespace_pattern = form.whitespace_pattern or ""
        if not form.strict:
            message.json_schema.strict = False
    elif form.json_object:
        message.json_object.SetInParent()
    elif form.regex is not None:
        message.regex = form.regex
    elif form.choice is not None:
        message.choice.SetInParent()
        message.choice.values.extend(form.choice)
    elif form.structural_tag is not None:
        message.structural_tag_json = form.structural_tag  # type: ignore[assignment]
    elif form.grammar is not None:
        if form.syntax not in _SYNTAX_TO_PROTO:
            raise ValueError(f"syntax {form.syntax} is not for users")
        message.grammar.text = form.grammar
        message.grammar.syntax = _SYNTAX_TO_PROTO[form.syntax]
    return message


def structured_from_proto(message: sampling_pb2.StructuredOutputs) -> StructuredOutputs:
    """Return the form of a message; unchecked, and perhaps none."""
    match message.WhichOneof("form"):
        case "json_schema":
            schema = message.json_schema
            return StructuredOutputs(
                json=schema.schema,
                any_whitespace=schema.any_whitespace,
                whitespace_pattern=schema.whitespace_pattern or None,
                strict=schema.strict or not schema.HasField("strict"),
            )
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "regex":
            return StructuredOutputs(regex=message.regex)
        case "choice":
            return StructuredOutputs(choice=tuple(message.choice.values))
        case "structural_tag_json":
            return StructuredOutputs(structural_tag=message.structural_tag_json)
        case "grammar":
            syntax = _PROTO_TO_SYNTAX.get(message.grammar.syntax, GrammarSyntax.ANY)
            return StructuredOutputs(grammar=message.grammar.text, syntax=syntax)
        case _:
            return StructuredOutputs()
