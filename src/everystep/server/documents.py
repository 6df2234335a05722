"""The table of routes as documents: OpenAPI for programs, and the reference for people."""

from __future__ import annotations

from everystep._version import __version__
from everystep.server.fields import Json, WireField
from everystep.server.routes import COMPLETIONS, MANAGED, READ_ONLY, ROUTES, RouteTable


def openapi() -> dict[str, Json]:
    """Return the OpenAPI document of every route."""
    paths: dict[str, Json] = {one.path: {"post": _operation(one)} for one in (*ROUTES, *MANAGED)}
    answers = {"200": {"description": "the answer"}}
    paths |= {
        path: {"get": {"summary": line, "responses": answers}} for path, line in READ_ONLY.items()
    }
    about = {"title": "everystep", "version": __version__}
    return {"openapi": "3.1.0", "info": about, "paths": paths}


def _operation(route: RouteTable) -> dict[str, Json]:
    fields = {
        one.name: {**one.kind.schema, "description": one.line} for one in route.fields.values()
    }
    fields |= {name: {"description": f"Ignored: {why}."} for name, why in route.ignored.items()}
    schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": fields,
        "required": [one.name for one in route.fields.values() if one.required],
    }
    kind = "application/json"
    if route.is_form:
        kind = "multipart/form-data"
        fields["file"] = {"type": "string", "contentMediaType": "application/octet-stream"}
    return {
        "summary": route.line,
        "requestBody": {"required": True, "content": {kind: {"schema": schema}}},
        "responses": {
            "200": {"description": "the answer"},
            "400": {"description": "a field is unknown, of another kind, or in conflict"},
            "429": {"description": "too many requests wait"},
            "503": {"description": "the engine is not there"},
        },
    }


def reference() -> str:
    """Return the reference of the wire, as it stands in docs/reference/wire.md."""
    parts = [_HEAD]
    for route in (*ROUTES, *MANAGED):
        parts.append(f"## POST {route.path}\n\n{route.line}\n")
        known = [one for one in route.fields.values() if not (route.also and _is_common(one))]
        if known:
            parts.append("| field | values | default | meaning |\n| --- | --- | --- | --- |")
            parts[-1] += "\n" + "\n".join(map(_row, known)) + "\n"
        if route.also:
            parts.append(route.also + "\n")
            continue
        for said, names in (("Ignored", route.ignored), ("Refused", route.refused)):
            if names:
                lines = "\n".join(f"- `{name}`: {why}" for name, why in names.items())
                parts.append(f"{said}:\n\n{lines}\n")
    rows = [f"| `{path}` | {line} |" for path, line in READ_ONLY.items()]
    parts.append("## Without a body\n\n| GET | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


_HEAD = """# The wire

This page lists every field that [the server](../guide/serving.md) takes. It is written by
`python -m everystep.server.documents` from the table that also checks requests. A field that is not
here is refused with status 400 and the nearest name; `null` is the same as leaving a field out. A
field without a default is as in `generate`: the model's generation config says it, or the defaults
of a conversation do.
"""


def _is_common(one: WireField) -> bool:
    """Return whether the table of completions lists the field."""
    return COMPLETIONS.fields.get(one.name) == one


def _row(one: WireField) -> str:
    name = f"`{one.name}`" + (" (required)" if one.required else "")
    cells = [name, one.kind.wanted, one.default, one.line]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def main(path: str) -> None:
    """Write the reference into a file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(reference())


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
