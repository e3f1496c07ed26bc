"""/docs: the OpenAPI description as one page of HTML, without scripts and without files from elsewhere."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

STYLE = """
body { font-family: sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: .2em 1em .2em 0 }
pre { background: #f4f4f4; padding: .8em; overflow-x: auto } h2 { border-top: 1px solid #ccc; padding-top: 1em }
"""


def render(description: Mapping[str, Any], url: str) -> str:
    """Returns an OpenAPI description as a page.

    Args:
        description: From ``openapi.describe``.
        url: Where the server is, for the commands to try.
    """
    info = description["info"]
    posts = {path: methods["post"] for path, methods in description["paths"].items() if "post" in methods}
    gets = {path: methods["get"]["summary"] for path, methods in description["paths"].items() if "get" in methods}
    parts = [part for path, operation in posts.items() for part in _operation(path, operation, url)]
    rows = "".join(
        f'<tr><td><a href="{escape(path)}">GET {escape(path)}</a></td><td>{escape(about)}</td></tr>'
        for path, about in gets.items()
    )
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(info['title'])}</h1><p>{escape(info['description'])}; jaxpar "
        f"{escape(info['version'])}</p>{''.join(parts)}<h2>Others</h2><table>{rows}</table></body></html>"
    )


def _operation(path: str, operation: Mapping[str, Any], url: str) -> Iterator[str]:
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    responses = operation["responses"]
    example = json.dumps(schema["examples"][0]).replace("'", "'\\''")  # as a shell reads it
    yield f"<h2>POST {escape(path)}</h2><p>{escape(operation['summary'])}</p>"
    yield f"<pre>{escape(f'''curl {url}{path} -H 'Content-Type: application/json' -d '{example}' ''').strip()}</pre>"
    yield f"<pre>{escape(json.dumps(responses['200']['content']['application/json']['example'], indent=2))}</pre>"
    yield "<h3>Body</h3><table><tr><th>field</th><th>value</th><th></th></tr>"
    for name, part, is_needed in fields(schema):
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(rule(part))}</td><td>{'required' * is_needed}</td></tr>"
    yield "</table><h3>Errors</h3><table>"
    for code, response in responses.items():
        if code != "200":
            yield f"<tr><td>{code}</td><td>{escape(response['description'])}</td></tr>"
    yield "</table>"


def fields(schema: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yields the fields of an object, with those inside: the path, the schema, and whether the field must be there."""
    for name, part in schema.get("properties", {}).items():
        path = f"{above}{name}"
        yield path, part, name in schema.get("required", ())
        yield from fields(part.get("items", {}), f"{path}[].")
        yield from fields(part, f"{path}.")


def rule(schema: Mapping[str, Any]) -> str:
    """Returns what a value must be, as text."""
    kinds = schema.get("type", [])
    words = [schema["description"]] if "description" in schema else []
    if kinds and "anyOf" not in schema:
        words.append(kinds if isinstance(kinds, str) else " or ".join(kinds))
    if "enum" in schema:
        words.append(" or ".join(json.dumps(value) for value in schema["enum"]))
    names = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "minItems": "items >=", "maxItems": "items <="}
    words += [f"{sign} {schema[name]:g}" for name, sign in names.items() if name in schema]
    return ", ".join(words)
