"""Asks for an error of ours by what a client tells it from: its code, and the field that it is about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ajet_sdk.errors import AjetError


@contextmanager
def refused(
    kind: type[AjetError], code: str | None = None, *, param: str | None = None, match: str | None = None
) -> Iterator[None]:
    """Expects that what is in it raises an error of `kind`, with this code and field where they are given, and these
    words."""
    with pytest.raises(kind, match=match) as caught:
        yield
    assert (code or caught.value.code, param or caught.value.param) == (caught.value.code, caught.value.param)
