"""Regular expressions of what vLLM writes, as bytes: each matches JSON in that form and nothing else.

They backtrack nowhere (possessive quantifiers), so a hostile text costs no more than its length.
"""

from __future__ import annotations

STRING = rb'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
NUMBER = rb"-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][+-]?\d++)?"
WHOLE = rb"(?:0|[1-9]\d*+)"
INDEX = rb"(?:0|[1-9]\d{0,5})"
ID = rb"(?:0|[1-9]\d{0,9})"
IDS = rb"\[" + ID + rb"(?:," + ID + rb")*+\]"
ROW = (
    rb'\{"token":' + STRING + rb',"logprob":(' + NUMBER + rb'),"bytes":(?:' + IDS + rb'|\[\]|null)'
    rb',"top_logprobs":\[\]\}'
)
"""What a chat answer tells of one token; its group is the logprob."""


def is_utf8(raw: bytes) -> bool:
    """Whether `raw` is UTF-8, which no pattern of bytes can tell."""
    if raw.isascii():
        return True
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
