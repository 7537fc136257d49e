"""An event as one MessagePack record of the journal, and back.

A record is ``[event name, {field: value}]``. Token ids are little-endian int32, logprobs little-endian float64, so that
what is read equals what was written, bit for bit. Metadata is JSON within the record, because MessagePack does not tell
lists from tuples. Unknown fields are ignored and missing ones take their default: an older journal stays readable.

A prompt mostly repeats what its episode said before. So a call names the earlier call whose text it begins like, how
many tokens of it, and only then its own: an episode costs its distinct tokens and not turns times context. Reading
needs the episodes as they were when the record was written, which is what a replay has at that point.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from array import array
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

import msgpack

from ajet_proxy.core import events as ev
from ajet_proxy.core.episode import Episode
from ajet_proxy.core.history import Mark
from ajet_proxy.core.tokens import pack_tokens, unpack_tokens
from ajet_sdk.frame import pack_ints, unpack_ints
from ajet_sdk.sample import Call

NONE: Mapping[str, Episode] = MappingProxyType({})
_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(ev.Event)}
_FIELDS: Mapping[Any, tuple[str, ...]] = MappingProxyType(
    {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in _EVENTS.values()}
)


class UnknownRecord(Exception):
    """A record that this version of the proxy cannot read."""


def encode(event: ev.Event, episodes: Mapping[str, Episode] = NONE) -> bytes:
    """The record of `event`, which has not yet been applied to `episodes`."""
    fields = {name: getattr(event, name) for name in _FIELDS[type(event)]}
    if isinstance(event, ev.CallFinished):
        fields["call"] = _pack_call(event.call, episodes.get(event.call.episode))
    elif isinstance(event, ev.EpisodeOpened):
        fields["metadata"] = json.dumps(event.metadata)
    record = [type(event).__name__, fields]
    return bytes(msgpack.packb(record, use_bin_type=True, unicode_errors="surrogatepass"))


def decode(record: bytes, episodes: Mapping[str, Episode] = NONE) -> ev.Event:
    """The event in `record`, or `UnknownRecord`; `episodes` are as the events before it have made them."""
    try:
        name, fields = msgpack.unpackb(record, raw=False, use_list=False, unicode_errors="surrogatepass")
        kind = _EVENTS[name]
        if kind is ev.CallFinished:
            fields["call"] = _unpack_call(fields["call"], episodes)
        elif kind is ev.EpisodeOpened:
            fields["metadata"] = json.loads(fields["metadata"])
        if "marks" in fields:
            fields["marks"] = tuple(Mark(*mark) for mark in fields["marks"])
        event: ev.Event = _build(kind, fields)
    except KeyError as error:
        raise UnknownRecord(f"this version of ajet knows no record, or no history, {error.args[0]!r}") from error
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise UnknownRecord(f"a record cannot be read: {error}") from error
    return event


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a record by name, without those that follow from others or get their default in reading anyway."""
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init)
    return {field.name: item for field, item in fields if item is not field.default}


def _build(kind: Any, fields: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in fields.items() if name in known})


def _pack_call(call: Call, episode: Episode | None) -> dict[str, Any]:
    fields = fields_of(call)
    shared = 0
    if episode is not None:
        before, shared = episode.texts.nearest(pack_tokens(call.prompt_token_ids))
    if shared:
        fields["history"] = (before, shared)
    fields["prompt_token_ids"] = pack_ints(call.prompt_token_ids[shared:])
    fields["token_ids"] = pack_ints(call.token_ids)
    fields["logprobs"] = _little(array("d", call.logprobs)).tobytes()
    return fields


def _unpack_call(fields: dict[str, Any], episodes: Mapping[str, Episode]) -> Call:
    logprobs = array("d")
    logprobs.frombytes(fields["logprobs"])
    fields["logprobs"] = tuple(_little(logprobs))
    for name in ("prompt_token_ids", "token_ids"):
        fields[name] = unpack_ints(fields[name], name)
    if (history := fields.get("history")) is not None:
        before, shared = history
        text = episodes[fields["episode"]].beginning(before, shared)
        fields["prompt_token_ids"] = (*unpack_tokens(text), *fields["prompt_token_ids"])
    call: Call = _build(Call, fields)
    return call


def _little(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
