"""The trace reader: what it reads, that it streams, and one exact message for every way a line can be bad."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from dcp_decode.errors import BAD_INPUT, ConfigError
from dcp_decode.trace import MAX_LINE_BYTES, TraceRequest, read_trace, synthetic_requests

DATA = Path(__file__).parent / "data" / "trace.jsonl"
SAMPLE = Path(__file__).parent.parent / "configs" / "sample_trace.jsonl"
GOOD = '{"timestamp": 5, "input_length": 3, "output_length": 2}'


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "t.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def line(**changes: str) -> str:
    """A good line at 5 ms with some values replaced by JSON text (empty: the key is left out)."""
    fields = {"timestamp": "5", "input_length": "3", "output_length": "2", "hash_ids": "[1]"} | changes
    return "{" + ", ".join(f'"{key}": {text}' for key, text in fields.items() if text) + "}"


def test_reads_every_request_in_order():
    assert list(read_trace(DATA)) == [
        TraceRequest(0, 0, 70, 5),
        TraceRequest(1, 12, 900, 1),
        TraceRequest(2, 12, 1, 40),
        TraceRequest(3, 86_400_000, 1_048_575, 1),
    ]


def test_request_name():
    assert TraceRequest(17, 0, 1, 1).name == "request 17"


def test_limit_stops_before_later_lines_are_read(tmp_path):
    path = write(tmp_path, GOOD, GOOD, "not JSON")
    assert len(list(read_trace(path, limit=2))) == 2
    with pytest.raises(ConfigError):  # negative control: the bad line is there
        list(read_trace(path, limit=3))


def test_streams(tmp_path):
    requests = read_trace(write(tmp_path, GOOD, "not JSON"))
    assert next(requests) == TraceRequest(0, 5, 3, 2)
    with pytest.raises(ConfigError):
        next(requests)


def test_last_line_without_newline(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD)
    assert list(read_trace(path)) == [TraceRequest(0, 5, 3, 2)]


CONTEXT = 1_048_576
BAD_LINES = {
    "not JSON": ("{timestamp: 5}", "", "'{timestamp: 5}'", "must be a JSON object in UTF-8"),
    "cut off": ('{"timestamp": 5,', "", "'{\"timestamp\": 5,'", "must be a JSON object in UTF-8"),
    "not UTF-8": (b"\xff\xfe{}", "", "'\ufffd\ufffd{}'", "must be a JSON object in UTF-8"),
    "too deep": ("[" * 100_000, "", repr("[" * 60 + "..."), "must be a JSON object in UTF-8"),
    "too many digits": (line(timestamp="1" * 5000), "", repr('{"timestamp": ' + "1" * 46 + "..."),
                        "must be a JSON object in UTF-8"),
    "two objects": ("{} {}", "", "'{} {}'", "must be a JSON object in UTF-8"),
    "a list": ("[5, 3, 2]", "", "'[5, 3, 2]'", "must be a JSON object"),
    "a number": ("5", "", "'5'", "must be a JSON object"),
    "null": ("null", "", "'null'", "must be a JSON object"),
    "key twice": ('{"timestamp": 5, "timestamp": 6}', "timestamp", "'{\"timestamp\": 5, \"timestamp\": 6}'",
                  "a key must occur once"),
    "no timestamp": (line(timestamp=""), "timestamp", "None", "is missing"),
    "no input": (line(input_length=""), "input_length", "None", "is missing"),
    "no output": (line(output_length=""), "output_length", "None", "is missing"),
    "negative timestamp": (line(timestamp="-1"), "timestamp", "-1", f"must be an integer in 0 .. {1 << 53}"),
    "huge timestamp": (line(timestamp="1" + "0" * 30), "timestamp", "'an integer beyond 64 bits'",
                       f"must be an integer in 0 .. {1 << 53}"),
    "timestamp NaN": (line(timestamp="NaN"), "timestamp", "nan", f"must be an integer in 0 .. {1 << 53}"),
    "backwards": (line(timestamp="4"), "timestamp", "4", "must not be before the request above, at 5 ms"),
    "negative input": (line(input_length="-3"), "input_length", "-3", f"must be an integer in 1 .. {CONTEXT}"),
    "zero input": (line(input_length="0"), "input_length", "0", f"must be an integer in 1 .. {CONTEXT}"),
    "fraction": (line(input_length="3.5"), "input_length", "3.5", f"must be an integer in 1 .. {CONTEXT}"),
    "whole float": (line(input_length="3.0"), "input_length", "3.0", f"must be an integer in 1 .. {CONTEXT}"),
    "text": (line(input_length='"3"'), "input_length", "'3'", f"must be an integer in 1 .. {CONTEXT}"),
    "null input": (line(input_length="null"), "input_length", "None", f"must be an integer in 1 .. {CONTEXT}"),
    "bool input": (line(input_length="true"), "input_length", "True", f"must be an integer in 1 .. {CONTEXT}"),
    "list input": (line(input_length="[3]"), "input_length", "'[3]'", f"must be an integer in 1 .. {CONTEXT}"),
    "zero output": (line(output_length="0"), "output_length", "0", f"must be an integer in 1 .. {CONTEXT}"),
    "bool output": (line(output_length="false"), "output_length", "False", f"must be an integer in 1 .. {CONTEXT}"),
    "context": (line(input_length="1048576"), "input_length + output_length", "1048578",
                f"must be at most {CONTEXT} tokens"),
    "hash_ids null": (line(hash_ids="null"), "hash_ids", "None", "must be a list of integers >= 0"),
    "hash_ids text": (line(hash_ids='[1, "2"]'), "hash_ids", "'2'", "must be a list of integers >= 0"),
    "hash_ids negative": (line(hash_ids="[-1]"), "hash_ids", "-1", "must be a list of integers >= 0"),
    "hash_ids bool": (line(hash_ids="[true]"), "hash_ids", "True", "must be a list of integers >= 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_names_place_key_value_and_what_is_allowed(tmp_path, name):
    bad, key, value, allowed = BAD_LINES[name]
    path = write(tmp_path, GOOD, "", bad)
    requests = read_trace(path)
    next(requests)
    with pytest.raises(ConfigError) as refusal:
        next(requests)
    assert str(refusal.value) == f"{path}:3{': ' if key else ''}{key} = {value}: {allowed}"
    assert refusal.value.exit_code == BAD_INPUT
    assert "\n" not in str(refusal.value)


def test_the_line_that_the_bad_ones_are_made_from_is_good(tmp_path):
    assert list(read_trace(write(tmp_path, line()))) == [TraceRequest(0, 5, 3, 2)]


def test_a_line_without_end_is_refused_before_it_fills_memory(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b" " * (MAX_LINE_BYTES - 1) + b"\n" + b"x" * (MAX_LINE_BYTES + 5))
    with pytest.raises(ConfigError, match=rf"t.jsonl:2 = 'x{{60}}...': a line must be at most {MAX_LINE_BYTES} bytes"):
        list(read_trace(path))


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_file_without_requests(tmp_path, content):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace = '.*': must hold at least one request"):
        list(read_trace(path))


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"trace = '.*none': can't be read: No such file or directory"):
        list(read_trace(tmp_path / "none"))
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        list(read_trace(tmp_path))


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one(limit):
    with pytest.raises(ConfigError, match=rf"requests = {limit}: must be at least 1"):
        list(read_trace(DATA, limit=limit))


def test_synthetic_requests():
    assert synthetic_requests(3, 100, 7, 40) == [
        TraceRequest(0, 0, 100, 7),
        TraceRequest(1, 40, 100, 7),
        TraceRequest(2, 80, 100, 7),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1, 0), "synthetic.requests = 0: must be at least 1"),
        ((1, 0, 1, 0), "synthetic.input_length = 0: must be at least 1"),
        ((1, 1, -2, 0), "synthetic.output_length = -2: must be at least 1"),
        ((1, 1, 1, -1), "synthetic.interval_milliseconds = -1: must be at least 0"),
        ((1, CONTEXT, 1, 0), f"synthetic.input_length + output_length = {CONTEXT + 1}: must be at most {CONTEXT} "
                             "tokens"),
    ],
)  # fmt: skip
def test_bad_synthetic_requests(arguments, message):
    with pytest.raises(ConfigError) as refusal:
        synthetic_requests(*arguments)
    assert str(refusal.value) == message


def test_sample_trace_has_what_a_first_run_should_show():
    requests = list(read_trace(SAMPLE))
    assert len(requests) == 12
    assert all(200 <= request.input_length <= 3000 and 8 <= request.output_length <= 40 for request in requests)
    arrivals = [request.arrival_milliseconds for request in requests]
    assert len(set(arrivals)) < len(arrivals), "some requests arrive together"
    assert max(later - earlier for earlier, later in pairwise(arrivals)) > 5000, "a quiet time"
