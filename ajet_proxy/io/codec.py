"""An event as one MessagePack record of the journal, and back.

A record is ``[event name, {field: value}]``. Token ids are little-endian int32, logprobs little-endian float64, so that
what is read equals what was written, bit for bit. Metadata is JSON within the record, because MessagePack does not tell
lists from tuples. Unknown fields are ignored and missing ones take their default: an older journal stays readable.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from array import array
from typing import Any, get_args

import msgpack

from ajet_proxy.core import events as ev
from ajet_sdk.frame import pack_ints, unpack_ints
from ajet_sdk.sample import Call

_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(ev.Event)}


class UnknownRecord(Exception):
    """A record that this version of the proxy cannot read."""


def encode(event: ev.Event) -> bytes:
    """The record of `event`."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if isinstance(event, ev.CallFinished):
        fields["call"] = _pack_call(event.call)
    elif isinstance(event, ev.EpisodeOpened):
        fields["metadata"] = json.dumps(event.metadata)
    record = [type(event).__name__, fields]
    return bytes(msgpack.packb(record, use_bin_type=True, unicode_errors="surrogatepass"))


def decode(record: bytes) -> ev.Event:
    """The event in `record`, or `UnknownRecord`."""
    try:
        name, fields = msgpack.unpackb(record, raw=False, use_list=False, unicode_errors="surrogatepass")
        kind = _EVENTS[name]
        if kind is ev.CallFinished:
            fields["call"] = _unpack_call(fields["call"])
        elif kind is ev.EpisodeOpened:
            fields["metadata"] = json.loads(fields["metadata"])
        event: ev.Event = _build(kind, fields)
    except KeyError as error:
        raise UnknownRecord(f"this version of ajet knows no record {error.args[0]!r}") from error
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise UnknownRecord(f"a record cannot be read: {error}") from error
    return event


def _build(kind: Any, fields: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in fields.items() if name in known})


def _pack_call(call: Call) -> dict[str, Any]:
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    fields["prompt_token_ids"] = pack_ints(call.prompt_token_ids)
    fields["token_ids"] = pack_ints(call.token_ids)
    fields["logprobs"] = _little(array("d", call.logprobs)).tobytes()
    return fields


def _unpack_call(fields: dict[str, Any]) -> Call:
    logprobs = array("d")
    logprobs.frombytes(fields["logprobs"])
    fields["logprobs"] = tuple(_little(logprobs))
    for name in ("prompt_token_ids", "token_ids"):
        fields[name] = unpack_ints(fields[name], name)
    call: Call = _build(Call, fields)
    return call


def _little(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
