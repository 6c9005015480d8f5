"""Request traces: the Mooncake format from a file, or equal requests at a fixed interval.

One JSON object a line, arrivals in order (kvcache-ai/Mooncake, FAST'25 release):

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
     ms, >= 0        tokens, >= 1          tokens, >= 1          optional, prefix-cache blocks

A request is a row of integers here; `service.py` gives it pages, tokens and a state. `hash_ids` are checked and then
dropped: the harness shares no pages between requests. Other keys are ignored, so that richer traces can be read, and
so are blank lines. Everything else that departs from the format stops the run with a ConfigError that names file, line,
key, value and what is allowed: a silently skipped request would make every later count wrong.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dcp_decode.errors import ConfigError
from dcp_decode.geometry import MAX_CONTEXT

MAX_LINE_BYTES = 1 << 20  # a prompt of the largest context has 2,048 hash_ids: far below; a device file is far above
MAX_TIMESTAMP = 1 << 53  # milliseconds that the virtual clock, a double, holds exactly
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class TraceRequest:
    """index: order in the trace, from 0. Times in milliseconds from the start of the trace, lengths in tokens."""

    index: int
    arrival_milliseconds: int
    input_length: int
    output_length: int

    @property
    def name(self) -> str:
        return f"request {self.index}"


def read_trace(path: str | Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """The first `limit` requests (None: all) of a Mooncake trace file, read as they are asked for.

    Raises ConfigError for a file that can't be read, a bad line, a file without requests, or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError("requests", limit, "must be at least 1")
    count = 0
    earliest = 0
    try:
        with open(path, "rb") as file:
            line_number = 0
            while (limit is None or count < limit) and (line := file.readline(MAX_LINE_BYTES + 1)):
                line_number += 1
                if line_number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                request = _parse(line, f"{path}:{line_number}", count, earliest)
                earliest = request.arrival_milliseconds
                count += 1
                yield request
    except OSError as error:
        raise ConfigError("trace", str(path), f"can't be read: {error.strerror}") from error
    if not count:
        raise ConfigError("trace", str(path), "must hold at least one request")


def synthetic_requests(
    requests: int, input_length: int, output_length: int, interval_milliseconds: int
) -> list[TraceRequest]:
    """Equal requests at a fixed interval: a load whose steady state is known. Lengths in tokens, at least 1."""
    for key, value, low in (
        ("requests", requests, 1),
        ("input_length", input_length, 1),
        ("output_length", output_length, 1),
        ("interval_milliseconds", interval_milliseconds, 0),
    ):
        if value < low:
            raise ConfigError(f"synthetic.{key}", value, f"must be at least {low}")
    _check_context(input_length, output_length, "synthetic.input_length + output_length")
    return [
        TraceRequest(index, index * interval_milliseconds, input_length, output_length) for index in range(requests)
    ]


def _parse(line: bytes, place: str, index: int, earliest: int) -> TraceRequest:
    """One line as a request; `place` is file:line, `earliest` the arrival of the request before."""
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(place, _shown(line), f"a line must be at most {MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(line.decode(), object_pairs_hook=_without_duplicates)
    except _DuplicateKey as error:
        raise ConfigError(f"{place}: {error.args[0]}", _shown(line), "a key must occur once") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(place, _shown(line), "must be a JSON object in UTF-8") from error
    if not isinstance(fields, dict):
        raise ConfigError(place, _shown(line), "must be a JSON object")
    arrival = _integer(fields, "timestamp", place, 0, MAX_TIMESTAMP)
    if arrival < earliest:
        raise ConfigError(f"{place}: timestamp", arrival, f"must not be before the request above, at {earliest} ms")
    input_length = _integer(fields, "input_length", place, 1, MAX_CONTEXT)
    output_length = _integer(fields, "output_length", place, 1, MAX_CONTEXT)
    _check_context(input_length, output_length, f"{place}: input_length + output_length")
    _check_hash_ids(fields.get("hash_ids", []), place)
    return TraceRequest(index, arrival, input_length, output_length)


def _integer(fields: dict[str, object], key: str, place: str, low: int, high: int) -> int:
    if key not in fields:
        raise ConfigError(f"{place}: {key}", None, "is missing")
    value = fields[key]
    # bool is an int in Python; true is no length.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{place}: {key}", _shown(value), f"must be an integer in {low} .. {high}")
    return value


def _check_context(input_length: int, output_length: int, key: str) -> None:
    if input_length + output_length > MAX_CONTEXT:
        raise ConfigError(key, input_length + output_length, f"must be at most {MAX_CONTEXT} tokens")


def _check_hash_ids(hash_ids: object, place: str) -> None:
    if not isinstance(hash_ids, list):
        raise ConfigError(f"{place}: hash_ids", _shown(hash_ids), "must be a list of integers >= 0")
    for value in hash_ids:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{place}: hash_ids", _shown(value), "must be a list of integers >= 0")


class _DuplicateKey(Exception):
    """A JSON object names a key twice: json would silently keep the last."""


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for key, value in pairs:
        if key in fields:
            raise _DuplicateKey(key)
        fields[key] = value
    return fields


def _shown(value: object) -> object:
    """`value`, or as much of its text as an error of one line can show."""
    text = value.decode("utf-8", "replace").strip() if isinstance(value, bytes) else value
    if isinstance(text, int | float | None):
        return text if not isinstance(text, int) or abs(text) < 1 << 64 else "an integer beyond 64 bits"
    rendered = text if isinstance(text, str) else json.dumps(text)
    return rendered if len(rendered) <= SHOWN_CHARACTERS else rendered[:SHOWN_CHARACTERS] + "..."
