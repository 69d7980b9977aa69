"""Writes the codec of a dataclass and its message from the annotations of the dataclass.

Every field of the dataclass is the field of the same name in the message. Their two types decide how it travels:

    annotation               in the message
    int, float, str, …       the same
    U32, U64, F32            bytes: a little-endian column
    tuple[int, ...]          bytes: a column of u32; or repeated numbers
    tuple[int | None, ...]   bytes: a column of u32, each plus one, 0 for None
    tuple[U32, ...]          repeated bytes: a column each
    bytes with a `Width`     bytes of this length; tuple[…, ...] of them: one after the other in one field
    an enum                  an enum of the same names; a number that is not known is the first member
    another dataclass        a message; or, where no field has the name, fields of this message
    tuple[dataclass, ...]    repeated messages
    any of them | None       absent for None

A codec is two functions, compiled at import as `dataclasses` compiles `__init__`: they do what one would write by hand,
and take as long. A field that fits no rule is an error at import that names the class and the field.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from triptych.types.kv_transfer import Width
from triptych.types.step import F32, U32, U64
from triptych.wire import columns

T = TypeVar("T")
M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=Enum)

_COLUMNS = {U32: "u32", U64: "u64", F32: "f32"}
_SCALARS = {
    int: (
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    ),
    float: (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT),
    bool: (FieldDescriptor.CPPTYPE_BOOL,),
    str: (FieldDescriptor.CPPTYPE_STRING,),
    bytes: (FieldDescriptor.CPPTYPE_STRING,),
}


@dataclasses.dataclass(frozen=True)
class Codec(Generic[T, M]):
    """The two directions between a class and its message."""

    cls: type[T]
    message: type[M]
    encode: Callable[..., M]
    """Return an object as a message. Keywords are the values of message fields that the object has no field for."""
    decode: Callable[..., T]
    """Read a message. Keywords are the values of fields that the message has no field for."""
    has_keywords: bool = False
    """Whether either of them takes keywords."""


CODECS: dict[tuple[type, str], Codec[Any, Any]] = {}
"""Class and full name of the message -> codec, of all that were made."""


def codec(
    cls: type[T],
    message: type[M],
    *,
    names: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
    apart: tuple[str, ...] = (),
    left_out: tuple[str, ...] = (),
    start: Callable[[M], None] | None = None,
    finish: Callable[[T, M], T] | None = None,
) -> Codec[T, M]:
    """Return the codec of a class. Classes inside it get theirs with it, unless they have one.

    Args:
        names: Field of the class -> field of the message, where they differ.
        fixed: Field of the message alone -> its value, or a function that returns it for an object.
        apart: Fields of either side that callers pass to `encode` and `decode`, as keywords.
        left_out: Fields of either side that no codec writes or reads. Those of the class keep their defaults.
        start: Checks a message before it is read.
        finish: Checks or changes an object that was read from a message.

    Raises:
        TypeError: A field fits no rule, or the class has got a codec without these options before.
    """
    key = cls, message.DESCRIPTOR.full_name
    if key in CODECS:
        if names or fixed or apart or left_out or start or finish:
            raise TypeError(f"{cls.__name__} has a codec: import the module that makes it before its users")
        return CODECS[key]
    CODECS[key] = _Source(cls, message, names or {}, fixed or {}, apart, left_out).compile(start, finish)
    return CODECS[key]


def register(made: Codec[Any, Any]) -> None:
    """Add a codec that is not made from annotations, for classes that hold its class."""
    CODECS[made.cls, made.message.DESCRIPTOR.full_name] = made


def enum_numbers(members: type[E], descriptor: EnumDescriptor) -> tuple[dict[E, int], dict[int, E]]:
    """Return member -> number and number -> member, by their names.

    Raises:
        TypeError: A member has no number. Only the first may have none: it is 0, `_UNSPECIFIED`.
    """
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    numbers = {value.name.removeprefix(prefix): value.number for value in descriptor.values}
    for member in list(members)[1:]:
        if member.name not in numbers:
            raise TypeError(f"{members.__name__}.{member.name} has no number in {descriptor.name}")
    to_number = {member: numbers.get(member.name, 0) for member in members}
    return to_number, {number: member for member, number in reversed(to_number.items())}


def fields_of(cls: type) -> dict[str, Any]:
    """Return field -> annotation of a dataclass or a named tuple, in the order of its constructor."""
    hints = get_type_hints(cls, include_extras=True)
    if dataclasses.is_dataclass(cls):
        return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
    return {name: hints[name] for name in cls._fields}  # type: ignore[attr-defined]


def message_class(field: Any) -> type[Message]:
    """Return the class of the messages of a field, which is given by its descriptor."""
    return GetMessageClass(field.message_type)


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """Return an annotation without `| None`, and whether it had that."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    (inner,) = (each for each in get_args(annotation) if each is not type(None))
    return inner, True


def width_of(annotation: Any) -> Width | None:
    """Return the length that an annotation gives to bytes, if it does."""
    found = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((each for each in found if isinstance(each, Width)), None)


def is_record(annotation: Any) -> bool:
    """Whether an annotation is a dataclass or a named tuple: its fields travel one by one."""
    return dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields")


class _Source:
    """The source text of one codec: the arguments of the message that it writes, and of the object that it reads."""

    def __init__(
        self,
        cls: type,
        message: type[Message],
        names: Mapping[str, str],
        fixed: Mapping[str, Any],
        apart: tuple[str, ...],
        left_out: tuple[str, ...],
    ) -> None:
        self._cls = cls
        self._message = message
        self._names = names
        self._fields: dict[str, Any] = {field.name: field for field in message.DESCRIPTOR.fields}
        self._globals: dict[str, Any] = {"Message": message, "np": np, **_functions()}
        self._locals: list[str] = []
        """Statements of `encode` before its return."""
        self._encoded: list[str] = []
        self._decoded_apart: list[str] = []
        self._apart = apart
        self._left_out = left_out
        self._root = self._read(cls, "value")
        self._encoded_apart = [name for name in self._fields if name in apart]
        self._encoded += [f"{name}={name}" for name in self._encoded_apart]
        for name, given in fixed.items():
            self._globals[f"fixed_{name}"] = given
            self._encoded.append(f"{name}=fixed_{name}{'(value)' if callable(given) else ''}")
            self._fields.pop(name, None)
        known = {*fields_of(cls), *(field.name for field in message.DESCRIPTOR.fields)}
        for name in (*names, *fixed, *apart, *left_out):
            if name not in known:
                self._fail(name, f"is neither in the class nor in {message.DESCRIPTOR.name}")
        if unread := [name for name in self._fields if name not in (*self._encoded_apart, *left_out)]:
            self._fail(unread[0], f"is in {message.DESCRIPTOR.name} and not in the class")

    def compile(self, start: Callable[..., Any] | None, finish: Callable[..., Any] | None) -> Codec[Any, Any]:
        name = self._cls.__name__
        encode_keywords = "".join(f", {name}" for name in self._encoded_apart)
        decode_keywords = "".join(f", {name}" for name in self._decoded_apart)
        result = self._root if finish is None else f"finish({self._root}, message)"
        text = "\n".join(
            [
                f"def encode_{name}(value{encode_keywords and ', *' + encode_keywords}):",
                *(f"    {statement}" for statement in self._locals),
                f"    return Message({', '.join(self._encoded)})",
                f"def decode_{name}(message{decode_keywords and ', *' + decode_keywords}):",
                *(["    start(message)"] if start is not None else []),
                f"    return {result}",
            ]
        )
        self._globals |= {"start": start, "finish": finish}
        exec(compile(text, f"<codec of {name}>", "exec"), self._globals)
        encode, decode = self._globals[f"encode_{name}"], self._globals[f"decode_{name}"]
        return Codec(self._cls, self._message, encode, decode, bool(encode_keywords or decode_keywords))

    def _read(self, cls: type, value: str) -> str:
        """Add the fields of a class, and return the expression that builds it from a message."""
        create = "create" if value == "value" else f"create_{value}"
        self._globals[create] = cls
        arguments = []
        for name, annotation in fields_of(cls).items():
            if name in self._left_out:
                continue
            if name in self._apart:
                self._decoded_apart.append(name)
                arguments.append(f"{name}={name}")
                continue
            in_message = self._names.get(name, name)
            field = self._fields.pop(in_message, None)
            if field is not None:
                encoded, decoded = self._convert(name, annotation, field, f"{value}.{name}")
                self._encoded.append(f"{in_message}={encoded}")
            elif is_record(annotation):
                self._locals.append(f"inner_{name} = {value}.{name}")
                decoded = self._read(annotation, f"inner_{name}")
            else:
                self._fail(name, f"is not in {self._message.DESCRIPTOR.name}")
            arguments.append(f"{name}={decoded}")
        return f"{create}({', '.join(arguments)})"

    def _convert(self, name: str, annotation: Any, field: FieldDescriptor, value: str) -> tuple[str, str]:
        """Return the expressions that encode a field and decode it."""
        source = f"message.{field.name}"
        inner, is_optional = split_optional(annotation)
        if is_optional:
            if not field.has_presence:
                self._fail(name, "may be None, and its field in the message is not optional")
            encoded, decoded = self._convert(name, inner, field, value)
            if encoded != value:
                encoded = f"None if {value} is None else {encoded}"
            return encoded, f"{decoded} if message.HasField({field.name!r}) else None"
        if get_origin(inner) is tuple:
            return self._convert_tuple(name, get_args(inner)[0], field, value)
        if field.is_repeated:
            self._fail(name, f"is one {inner}, and its field in the message is repeated")
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        if is_bytes and (kind := _COLUMNS.get(inner)):
            return (
                f"{value}.astype({kind}, copy=False).tobytes() if len({value}) else b''",
                f"column_from_bytes(data, {kind}) if (data := {source}) else empty_{kind}",
            )
        if is_bytes and (width := width_of(inner)) is not None:
            empty = f" if {source} else b''" if width.may_be_empty else ""
            return value, f"check_width({name!r}, {source}, {width.num_bytes}){empty}"
        if field.cpp_type in _SCALARS.get(inner, ()) and is_bytes == (inner is bytes):
            return value, source
        if isinstance(inner, type) and issubclass(inner, Enum) and field.enum_type is not None:
            to_number, to_member = enum_numbers(inner, field.enum_type)
            self._globals |= {f"{name}_to_number": to_number, f"{name}_to_member": to_member}
            self._globals[f"{name}_unknown"] = next(iter(inner))
            return f"{name}_to_number[{value}]", f"{name}_to_member.get({source}, {name}_unknown)"
        if is_record(inner) and field.message_type is not None:
            encode, decode = self._nested(name, inner, field)
            return f"{encode}({value})", f"{decode}({source})"
        return self._fail(name, f"is {inner}, which does not fit its field in the message")

    def _convert_tuple(self, name: str, entry: Any, field: FieldDescriptor, value: str) -> tuple[str, str]:
        source = f"message.{field.name}"
        entry, has_none = split_optional(entry)
        if field.is_repeated and is_record(entry) and field.message_type is not None:
            encode, decode = self._nested(name, entry, field)
            read_all = f"tuple([{decode}(each) for each in entries]) if (entries := {source}) else ()"
            return f"[{encode}(each) for each in {value}]", read_all
        if field.is_repeated and field.type == FieldDescriptor.TYPE_BYTES and entry == U32:
            return (
                f"[u32_to_bytes(each) for each in {value}]",
                f"tuple([u32_from_bytes(each) for each in {source}])",
            )
        if field.is_repeated and field.cpp_type in _SCALARS.get(entry, ()):
            return value, f"tuple({source})"
        if field.type == FieldDescriptor.TYPE_BYTES and not field.is_repeated:
            if entry is int and has_none:
                return f"optional_u32_to_bytes({value})", f"optional_u32_from_bytes({source})"
            if entry is int:
                return (
                    f"u32_to_bytes(np.array({value}, np.uint32)) if {value} else b''",
                    f"tuple(u32_from_bytes({source}).tolist())",
                )
            if (width := width_of(entry)) is not None:
                return f"b''.join({value})", f"split_bytes({field.name!r}, {source}, {width.num_bytes})"
        return self._fail(name, f"has entries of {entry}, which do not fit its field in the message")

    def _nested(self, name: str, cls: type, field: FieldDescriptor) -> tuple[str, str]:
        """Return the names of the functions for a class inside this one; its codec is made here if there is none."""
        nested: Codec[Any, Any] = codec(cls, message_class(field))
        if nested.has_keywords:
            self._fail(
                name, f"is a {cls.__name__}, which callers encode and decode themselves: name it in `apart`"
            )
        self._globals |= {f"encode_{name}": nested.encode, f"decode_{name}": nested.decode}
        return f"encode_{name}", f"decode_{name}"

    def _fail(self, name: str, why: str) -> Any:
        raise TypeError(f"{self._cls.__name__}.{name} {why}")


def _functions() -> dict[str, Any]:
    """Return the names that generated functions use, beside their own."""
    functions = (
        columns.column_from_bytes,
        columns.u32_to_bytes,
        columns.u32_from_bytes,
        columns.optional_u32_to_bytes,
        columns.optional_u32_from_bytes,
        columns.check_width,
        columns.split_bytes,
    )
    empty = {f"empty_{kind}": columns.column_from_bytes(b"", dtype) for kind, dtype in columns.DTYPES.items()}
    return {function.__name__: function for function in functions} | columns.DTYPES | empty
