"""JSON schemas as clients' libraries write them: pydantic, zod, generators of OpenAPI, servers of MCP tools."""

from __future__ import annotations

from typing import Any


def record(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


S: Any = {"type": "string"}
SCHEMAS: dict[str, Any] = {
    "pydantic set[str] (uniqueItems)": record(a={"type": "array", "items": S, "uniqueItems": True}),
    "OpenAPI int32": record(a={"type": "integer", "format": "int32"}),
    "OpenAPI int64": record(a={"type": "integer", "format": "int64"}),
    "OpenAPI double": record(a={"type": "number", "format": "double"}),
    "pydantic SecretStr (password)": record(a={"type": "string", "format": "password", "writeOnly": True}),
    "pydantic Path": record(a={"type": "string", "format": "path"}),
    "pydantic bytes (binary)": record(a={"type": "string", "format": "binary"}),
    "pydantic AnyUrl": record(a={"type": "string", "format": "uri", "minLength": 1}),
    "pydantic HttpUrl": record(a={"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}),
    "pydantic datetime": record(a={"type": "string", "format": "date-time"}),
    "pydantic timedelta": record(a={"type": "string", "format": "duration"}),
    "pydantic EmailStr": record(a={"type": "string", "format": "email"}),
    "pydantic IPvAnyAddress": record(a={"type": "string", "format": "ipvanyaddress"}),
    "pydantic IPv4": record(a={"type": "string", "format": "ipv4"}),
    "pydantic UUID": record(a={"type": "string", "format": "uuid"}),
    "pydantic UUID4": record(a={"type": "string", "format": "uuid4"}),
    "pydantic Decimal": record(
        a={"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]}
    ),
    "pydantic Json": record(
        a={"type": "string", "contentMediaType": "application/json", "contentSchema": {}}
    ),
    "pydantic Union smart (anyOf)": record(
        a={"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}
    ),
    "pydantic discriminated": {
        "$defs": {
            "Cat": {
                "type": "object",
                "properties": {"kind": {"const": "cat", "type": "string"}, "n": {"type": "integer"}},
                "required": ["kind", "n"],
            },
            "Dog": {
                "type": "object",
                "properties": {"kind": {"const": "dog", "type": "string"}, "m": S},
                "required": ["kind", "m"],
            },
        },
        "type": "object",
        "properties": {
            "pet": {
                "discriminator": {
                    "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                    "propertyName": "kind",
                },
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            }
        },
        "required": ["pet"],
    },
    "oneOf int or number": record(a={"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    "oneOf string or null": record(a={"oneOf": [{"type": "string"}, {"type": "null"}]}),
    "oneOf enum titles (zod-like)": record(
        a={"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]}
    ),
    "recursive": {
        "$defs": {
            "N": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
            }
        },
        "$ref": "#/$defs/N",
    },
    "$ref with siblings": {
        "$defs": {"C": {"enum": ["a", "b"], "type": "string"}},
        "type": "object",
        "properties": {"c": {"$ref": "#/$defs/C", "description": "d", "default": "a"}},
        "required": ["c"],
    },
    "dict[str, int] (additionalProperties)": {"type": "object", "additionalProperties": {"type": "integer"}},
    "dict with pattern keys": {
        "type": "object",
        "patternProperties": {"^[a-z]+$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "propertyNames (pydantic dict[Literal,..])": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "integer"},
    },
    "propertyNames pattern": {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
    "tuple prefixItems": record(
        a={"type": "array", "prefixItems": [S, {"type": "integer"}], "minItems": 2, "maxItems": 2}
    ),
    "draft-4 exclusiveMinimum bool": record(a={"type": "integer", "minimum": 0, "exclusiveMinimum": True}),
    "draft-7 items array": record(
        a={"type": "array", "items": [S, {"type": "integer"}], "additionalItems": False}
    ),
    "nullable (OpenAPI 3.0)": record(a={"type": "string", "nullable": True}),
    "type list": record(a={"type": ["string", "null"]}),
    "examples, deprecated, readOnly, $comment": record(
        a={"type": "string", "examples": ["x"], "deprecated": True, "readOnly": True, "$comment": "c"}
    ),
    "$schema and $id": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/x",
        **record(a=S),
    },
    "zod $schema 2020": {"$schema": "https://json-schema.org/draft/2020-12/schema", **record(a=S)},
    "zod .strict passthrough": {**record(a=S), "additionalProperties": {}},
    "x-extension keyword": record(a={"type": "string", "x-order": 1}),
    "unknown keyword": record(a={"type": "string", "inputType": "textarea"}),
    "if/then": {
        "type": "object",
        "properties": {"a": S, "b": S},
        "if": {"properties": {"a": {"const": "x"}}},
        "then": {"required": ["b"]},
    },
    "not": record(a={"type": "string", "not": {"const": "x"}}),
    "allOf [$ref]": {
        "$defs": {"C": record(x=S)},
        "type": "object",
        "properties": {"c": {"allOf": [{"$ref": "#/$defs/C"}], "description": "d"}},
        "required": ["c"],
    },
    "dependentRequired": {
        "type": "object",
        "properties": {"a": S, "b": S},
        "dependentRequired": {"a": ["b"]},
    },
    "minProperties": {"type": "object", "additionalProperties": S, "minProperties": 1},
    "contains": record(a={"type": "array", "items": S, "contains": {"const": "x"}}),
    "unevaluatedProperties false": {**record(a=S), "unevaluatedProperties": False},
    "pattern lookahead": record(a={"type": "string", "pattern": "^(?=.*[A-Z]).{8,}$"}),
    "pattern backreference": record(a={"type": "string", "pattern": "^(a|b)\\1$"}),
    "pattern \\p{L}": record(a={"type": "string", "pattern": "^\\p{L}+$"}),
    "pattern unanchored": record(a={"type": "string", "pattern": "[0-9]{3}"}),
    "pattern word boundary": record(a={"type": "string", "pattern": "\\bfoo\\b"}),
    "multipleOf 0.01": record(a={"type": "number", "multipleOf": 0.01}),
    "big enum 2000": record(a={"enum": [f"value {i}" for i in range(2000)]}),
    "maxLength 100000": record(a={"type": "string", "maxLength": 100000}),
    "maxItems 10000": record(a={"type": "array", "items": S, "maxItems": 10000}),
    "empty schema": {},
    "true schema in prop": {"type": "object", "properties": {"a": True}, "required": ["a"]},
    "false schema in prop": {"type": "object", "properties": {"a": False}},
    "$ref remote": record(a={"$ref": "https://json-schema.org/draft/2020-12/schema"}),
    "$ref to root": {
        "type": "object",
        "properties": {"v": S, "kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["v"],
    },
    "$dynamicRef": {"$dynamicAnchor": "n", "type": "object", "properties": {"k": {"$dynamicRef": "#n"}}},
    "$anchor": {"$defs": {"x": {"$anchor": "xx", "type": "string"}}, **record(a={"$ref": "#xx"})},
    "definitions path ref": {"definitions": {"x": S}, **record(a={"$ref": "#/definitions/x"})},
    "ref into properties": {
        "type": "object",
        "properties": {"a": S, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"],
    },
    "integer min > max": record(a={"type": "integer", "minimum": 5, "maximum": 1}),
    "enum empty": record(a={"enum": []}),
    "required not in properties": {"type": "object", "properties": {"a": S}, "required": ["a", "zz"]},
    "required absent, additional false": {
        "type": "object",
        "properties": {"a": S},
        "required": ["zz"],
        "additionalProperties": False,
    },
    "enum mixed": record(a={"enum": ["a", 1, None, True, {"x": 1}, [1]]}),
    "const object": record(a={"const": {"k": [1, 2]}}),
    "MCP filesystem tool": {
        "type": "object",
        "properties": {
            "path": S,
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"oldText": {"type": "string", "description": "x"}, "newText": S},
                    "required": ["oldText", "newText"],
                    "additionalProperties": False,
                },
            },
            "dryRun": {"type": "boolean", "default": False},
        },
        "required": ["path", "edits"],
        "additionalProperties": False,
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    "playwright MCP union": record(a={"anyOf": [{"type": "string", "const": "x"}, {"not": {}}]}),
}
"""Name of the library or the keyword -> a schema of it."""

LOST: dict[str, tuple[str, ...]] = {
    "pydantic set[str] (uniqueItems)": ("properties.a.uniqueItems",),
    "pydantic Decimal": ("properties.a.anyOf[1].pattern",),
    "oneOf int or number": ("oneOf",),
    "if/then": ("if", "then"),
    "not": ("properties.a.not",),
    "dependentRequired": ("dependentRequired",),
    "contains": ("properties.a.contains",),
    "pattern lookahead": ("properties.a.pattern",),
    "pattern backreference": ("properties.a.pattern",),
    "pattern word boundary": ("properties.a.pattern",),
    "$ref remote": ("properties.a.$ref",),
}
"""Schemas that are refused where they are strict -> what they lose where they are not."""

IMPOSSIBLE = ("integer min > max", "enum empty", "required absent, additional false")
"""Schemas that no value fits: they are always refused."""
