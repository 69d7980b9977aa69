"""/docs: the API as one HTML page made from its OpenAPI description, with no script and nothing to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; } code { background: #8882; padding: 0 .25em; border-radius: 3px; }
table { border-collapse: collapse; width: 100%; } :root { color-scheme: light dark; }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884; }
"""


def render_page(openapi: Mapping[str, Any]) -> str:
    """All routes, then all objects.

    Args:
        openapi: an OpenAPI 3.1 document as FastAPI makes it.
    """
    info, schemas = openapi["info"], openapi.get("components", {}).get("schemas", {})
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
        "<p>For programs: <a href=openapi.json>openapi.json</a>.</p><h2>Routes</h2>",
        "<table><tr><th>Route<th>What it does<th>Takes<th>Gives</tr>",
        *_route_rows(openapi["paths"]),
        "</table>",
    ]
    for name, schema in sorted(schemas.items()):
        parts += [
            f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{_text(schema)}</p>',
            "<table><tr><th>Field<th>Type<th>Meaning</tr>",
            *_field_rows(schema),
            "</table>",
        ]
    return "\n".join(parts) + "</html>"


def _route_rows(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            takes = [_type(_json_schema(operation.get("requestBody", {})))]
            takes += [
                f"<code>{escape(parameter['name'])}</code>" for parameter in operation.get("parameters", ())
            ]
            gives = _type(_json_schema(operation["responses"].get("200", {})))
            yield (
                f"<tr><td><code>{method.upper()} {escape(path)}</code><td>{_text(operation)}"
                f"<td>{' '.join(filter(None, takes))}<td>{gives}</tr>"
            )


def _field_rows(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        mark = " (required)" if name in required else ""
        yield f"<tr><td><code>{escape(name)}</code>{mark}<td>{_type(field)}<td>{_text(field)}</tr>"


def _json_schema(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = holder.get("content", {}).get("application/json", {}).get("schema", {})
    return schema


def _type(schema: Mapping[str, Any]) -> str:
    """A type in words; objects are links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " | ".join(_type(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    if "enum" in schema:
        return " | ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {})) or 'anything'}"
    return escape(str(schema.get("type", "")))


def _text(schema: Mapping[str, Any]) -> str:
    return escape(schema.get("description", ""))
