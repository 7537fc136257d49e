"""A client's request: a JSON object that is changed field by field and otherwise stays as it was written."""

from __future__ import annotations

import json
import sys
from typing import Any

from ajet_proxy.core.identity.headers import MAX_LABEL, is_text
from ajet_proxy.core.protocol.json_edits import Spanned, TooMany, scan, with_fields
from ajet_proxy.core.protocol.request_size import EACH, Counts, check_text, too_large
from ajet_sdk.errors import BadRequest


class Request:
    """A client's JSON body, decoded, with the place of each field."""

    __slots__ = ("_found", "_text", "made_of")

    def __init__(self, body: bytes, most: int | None = None) -> None:
        """Raises `BadRequest` unless `body` is a JSON object in UTF-8, -16 or -32, which is what the engine reads, and
        `TooLarge` if it is made of more than a request may be that may have `most` messages. What begins as an object
        and has too many signs is `TooLarge` before it is known whether it is JSON."""
        try:
            self._text = body.decode(json.detect_encoding(body), "surrogatepass")
        except UnicodeDecodeError as error:
            raise BadRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}", code="not_utf8") from None
        self.made_of: Counts | None = None
        if most is not None and self._text.lstrip(" \t\n\r").startswith("{"):
            self.made_of = check_text(self._text, most)
        fields = sys.maxsize if most is None else EACH * most
        try:
            self._found: Spanned = scan(self._text, most=fields)
        except TooMany:
            raise too_large(f"the body has more than {fields} fields") from None
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not a JSON object: {error}", code="not_json") from None

    @property
    def text(self) -> str:
        """The body as it was written."""
        return self._text

    @property
    def fields(self) -> dict[str, Any]:
        return self._found.values

    @property
    def model(self) -> str:
        """The model asked for; empty when none is named, or nothing that can name one."""
        model = self._found.values.get("model")
        return model if isinstance(model, str) and len(model) <= MAX_LABEL and is_text(model) else ""

    def naming(self, model: str | None) -> dict[str, str]:
        """The field, as JSON text, that makes this a request for `model`; none if it is one, or for None."""
        return {} if model is None or model == self.model else {"model": json.dumps(model)}

    def with_fields(self, fields: dict[str, str]) -> bytes:
        """The body, in UTF-8, with `fields` (name to JSON text) set and all else as it was written."""
        return with_fields(self._text, self._found, fields).encode("utf-8", "surrogatepass")
