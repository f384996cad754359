"""HTML and SVG elements from text, and JSON for a script element: hostile data stays data."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from typing import Any


def escape(value: Any) -> str:
    """Text for an element or for an attribute in quotes.

    >>> escape('<b onclick="x">')
    '&lt;b onclick=&quot;x&quot;&gt;'
    """
    return html.escape(str(value), quote=True)


def tag(name: str, inside: str = "", /, **attributes: Any) -> str:
    """An element; `inside` is HTML already, attributes are escaped. None leaves an attribute out, `_` becomes `-`.

    >>> tag("td", "240", data_value=240.0, class_="number")
    '<td data-value="240.0" class="number">240</td>'
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{said}>{inside}</{name}>"


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in; JSON knows no NaN, so what is not finite becomes null.

    >>> script_json({"name": "</script>", "loss": float("nan")})
    '{"name":"\\\\u003c/script\\\\u003e","loss":null}'
    """
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(script: str) -> str:
    """The content policy of a page with one script: nothing is fetched, and no other script runs.

    That holds even if some text is not escaped.

    >>> policy("")[:18]
    "default-src 'none'"
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
