"""What the page holds inline: style sheet, script, plotly, and the figures as JSON."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any


def asset(name: str) -> str:
    """A file of the page: its template `page.html`, its style sheet `page.css`, or its script `page.js`."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


@lru_cache(maxsize=1)
def plotly_js() -> str:
    """The library, which is about 5 MB, as it may stand inside a script element."""
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    # A browser reads every end of line as \\n, and the hash in the policy is of what it reads.
    return source.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


@lru_cache(maxsize=2)
def fingerprint(script: str) -> str:
    """The script as a Content-Security-Policy names it: only scripts named there run, whatever else stands in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
