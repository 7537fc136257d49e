"""The owner's page: one HTML document that holds its style, its script and, where it is a file, its episodes.

The daemon serves it at ``/ajet/``, where it asks that daemon alone; the quick start writes it with episodes in it. Both
show tokens with the same script.

Invariant: whatever an agent wrote reaches the page as text. The script makes nodes and never markup, and the data block
cannot be left from within. The page's own security policy allows no script but ours, and no request except to the
origin that served it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SCRIPTS = ("tokens.js", "board.js", "main.js")


def live_page() -> tuple[str, str]:
    """The page that asks its daemon, and its security policy."""
    policy = policy_of("'self'")
    return _document("ajet", None, policy), policy


def still_page(title: str, intro: str, sections: Any, texts: Mapping[int, str]) -> str:
    """A page of `sections` (``{"heading", "episodes": [records with ``tokens=timelines``]}``) that asks nobody.
    `texts` are the texts of their tokens."""
    data = {"title": title, "intro": intro, "sections": sections, "texts": {str(id): texts[id] for id in texts}}
    return _document(title, data, policy_of("'none'"))


def _document(title: str, data: Any, policy: str) -> str:
    values = {
        "policy": policy, "title": html.escape(title), "style": _read("page.css"), "script": _script(),
        "data": json.dumps(data).replace("<", "\\u003c"),  # no "</script>" and no "<!--" inside
    }
    return re.sub(r"{{(\w+)}}", lambda place: values[place[1]], _read("page.html"))


def policy_of(connect: str) -> str:
    return (
        f"default-src 'none'; script-src {_hash(_script())}; style-src {_hash(_read('page.css'))}; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _script() -> str:
    return "\n".join(map(_read, SCRIPTS))


@cache
def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
