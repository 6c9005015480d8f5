"""TOML config and command-line overrides -> one validated, frozen `RunConfig`.

Types and plain ranges are declared on the fields (pydantic, strict, unknown keys forbidden); what `Geometry` validates
is left to it, so that each rule exists once. Every refusal is a `ConfigError`: one line with the key as the TOML file
spells it (`section.key`), the value given and what is allowed; the sentence is made from the field's own declaration.

The defaults are `configs/smoke.toml`, value by value (a test compares them): a config names only what differs.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import annotated_types
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError
from pydantic.fields import FieldInfo

from dcp_decode.errors import ConfigError
from dcp_decode.geometry import HEAD_TILE, KIMI_SOFTMAX_SCALE, MAX_CONTEXT, MAX_TOPK, PAGE_TOKENS, Geometry
from dcp_decode.inputs import read_input

# The repository's own small trace: what a run reads when its config names neither a trace nor a synthetic workload.
SAMPLE_TRACE = Path(__file__).resolve().parent.parent / "configs" / "sample_trace.jsonl"

MAX_DEADLINE_SECONDS = 86_400.0
LARGEST_CONFIG_BYTES = 1 << 20

Whole = Annotated[int, Strict()]
Real = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Deadline = Annotated[Real, Field(gt=0, le=MAX_DEADLINE_SECONDS)]


class Section(BaseModel):
    """A table of the config: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(Section):
    """The model whose sparse MLA layers are verified."""

    name: Text = "smoke"
    heads: Whole = 96
    layers: Whole = Field(default=2, ge=1, le=256)
    topk: Whole = 256
    softmax_scale: Real = KIMI_SOFTMAX_SCALE


class ParallelSection(Section):
    """How many ranks, where they run and how they exchange partial results.

    kernels: the folder of an ahead-of-time build for runs on a GPU; None: compiled when first needed. chain: whether
    the stages from the query push to the merge are one launch on a GPU: for every batch of which that is possible on
    all ranks ("auto"), the same but at least for one, else the run is refused ("fused"), or never ("staged").
    """

    dcp: Whole = 8
    interleave: Whole = 1
    fabric: Literal["auto", "shm", "loopback", "nvshmem", "symm_mem"] = "auto"
    route: Literal["push", "local"] = "push"
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    kernels: Path | None = None
    execution: Literal["graph", "eager"] = "graph"
    chain: Literal["auto", "fused", "staged"] = "auto"


class MailboxSection(Section):
    """Mailbox extents, and the deadlines of waits in seconds; padded_heads None means model.heads."""

    capacity: Whole = 20
    padded_heads: Whole | None = None
    generations: Whole = 2
    deadline_seconds: Deadline = 2.0
    control_deadline_seconds: Deadline = 120.0


class CacheSection(Section):
    """The flat FP8 cache of every rank: its size in 64-token pages, its row stride and the per-tensor scales."""

    pages: Whole = Field(default=512, ge=1, le=1 << 20)
    page_stride_rows: Whole = PAGE_TOKENS
    q_scale: Real = 1 / 16
    k_scale: Real = 1 / 16


class ServiceSection(Section):
    """The decode service: drafted tokens a request and step, their acceptance probability, the virtual clock.

    max_running: requests that may run at once; None: as many as have pages.
    """

    draft_tokens: Whole = Field(default=4, ge=0, le=63)
    acceptance: Real = Field(default=0.7, ge=0, le=1)
    step_milliseconds: Real = Field(default=50.0, gt=0, le=1e6)
    max_steps: Whole = Field(default=25, ge=1, le=10_000_000)
    max_running: Whole | None = Field(default=None, ge=1, le=1_000_000)


class SyntheticWorkload(Section):
    """Equal requests at a fixed interval instead of a trace; lengths in tokens."""

    requests: Whole = Field(ge=1, le=1_000_000)
    input_length: Whole = Field(ge=1, le=MAX_CONTEXT)
    output_length: Whole = Field(ge=1, le=MAX_CONTEXT)
    interval_milliseconds: Whole = Field(default=0, ge=0, le=1_000_000_000)


class WorkloadSection(Section):
    """Where requests come from: `trace` or `synthetic` (never both), the first `requests` of them at most."""

    seed: Whole = Field(default=1, ge=0, le=(1 << 63) - 1)
    trace: Path | None = None
    synthetic: SyntheticWorkload | None = None
    requests: Whole = Field(default=8, ge=1, le=1_000_000)


class VerifySection(Section):
    """Which steps are checked against the oracle: every one, each period-th, or none."""

    mode: Literal["every", "sample", "off"] = "every"
    period: Whole = Field(default=10, ge=1, le=1_000_000)


class CheckpointSection(Section):
    """What `checkpoint` measures beside the model's own point, and how often.

    The own point: service.draft_tokens + 1 rows, model.heads heads, model.topk / parallel.dcp keys a row. batches,
    keys and heads each vary one of these; compared_* name those of them at which peers are measured too.
    sweep: time every kernel variant at the compared points. fused_chain: time the chain of one launch too, beside that
    of three.
    """

    mode: Literal["solo", "loopback", "group"] = "solo"
    samples: Whole = Field(default=101, ge=3, le=100_000)
    batches: tuple[Annotated[Whole, Field(ge=1, le=512)], ...] = ()
    keys: tuple[Annotated[Whole, Field(ge=1, le=MAX_TOPK)], ...] = ()
    heads: tuple[Annotated[Whole, Field(ge=HEAD_TILE, le=1024)], ...] = ()
    compared_batches: tuple[Annotated[Whole, Field(ge=1, le=512)], ...] = ()
    compared_keys: tuple[Annotated[Whole, Field(ge=1, le=MAX_TOPK)], ...] = ()
    sweep: Flag = False
    fused_chain: Flag = True


class RunConfig(Section):
    """Everything a run is determined by. Build it with `load_config`, which also checks the rules across keys."""

    model: ModelSection = ModelSection()
    parallel: ParallelSection = ParallelSection()
    mailbox: MailboxSection = MailboxSection()
    cache: CacheSection = CacheSection()
    service: ServiceSection = ServiceSection()
    workload: WorkloadSection = WorkloadSection(trace=SAMPLE_TRACE)
    verify: VerifySection = VerifySection()
    checkpoint: CheckpointSection = CheckpointSection()

    def geometry(self) -> Geometry:
        """The shapes and scales that all ranks agree on. Raises ConfigError."""
        padded = self.mailbox.padded_heads
        return Geometry(
            heads=self.model.heads,
            dcp=self.parallel.dcp,
            interleave=self.parallel.interleave,
            capacity=self.mailbox.capacity,
            padded_heads=self.model.heads if padded is None else padded,
            topk=self.model.topk,
            page_stride_rows=self.cache.page_stride_rows,
            softmax_scale=self.model.softmax_scale,
            q_scale=self.cache.q_scale,
            k_scale=self.cache.k_scale,
            generations=self.mailbox.generations,
        )


def load_config(path: Path | None = None, overrides: Mapping[str, object] | None = None) -> RunConfig:
    """Read and validate a config file (None: the embedded default), with overrides by dotted key ("model.layers").

    A relative path in the file is resolved against the file's folder, one of an override against the working
    directory. Raises ConfigError, also for a missing file or a TOML syntax error.
    """
    document = {} if path is None else _read_toml(path)
    for key, value in (overrides or {}).items():
        section, name = key.split(".")
        table = document.setdefault(section, {})
        if isinstance(table, dict):
            table[name] = value
            if key == "workload.trace":  # a trace named on the command line replaces the file's synthetic requests
                table.pop("synthetic", None)
    workload = document.setdefault("workload", {})
    if isinstance(workload, dict) and "trace" not in workload and "synthetic" not in workload:
        workload["trace"] = SAMPLE_TRACE
    config = _validate(document)
    _check_cross_rules(config)
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = read_input(path, LARGEST_CONFIG_BYTES).decode("utf-8-sig")  # with a byte order mark or without
    except OSError as error:
        raise ConfigError("config", str(path), f"must be a readable TOML file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            "config", str(path), f"must be TOML in UTF-8 ({error.reason} at byte {error.start})"
        ) from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config", str(path), f"must be valid TOML: {' '.join(str(error).split())}") from None
    except (ValueError, RecursionError) as error:  # an integer of more digits, or deeper tables, than Python reads
        raise ConfigError(
            "config", str(path), f"must be TOML of a usual size ({str(error).partition(';')[0]})"
        ) from None
    for section, name in (("workload", "trace"), ("parallel", "kernels")):
        table = document.get(section)
        if isinstance(table, dict) and isinstance(table.get(name), str):
            if "\0" in table[name]:
                raise ConfigError(f"{section}.{name}", table[name], "must be a path without null bytes")
            table[name] = os.path.realpath(path.parent / table[name])
    return document


def _validate(document: Mapping[str, object]) -> RunConfig:
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    value = first["input"]
    section, field = _locate(tuple(map(str, first["loc"])))
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        close = difflib.get_close_matches(name, section.model_fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(key, value, f"unknown key, allowed are {', '.join(section.model_fields)}{hint}")
    allowed = _allowed(field) if field is not None else str(first["msg"])
    if first["type"] == "missing":
        raise ConfigError(key, None, f"is required, {allowed}")
    raise ConfigError(key, value, allowed)


def _locate(location: tuple[str, ...]) -> tuple[type[Section], FieldInfo | None]:
    """The section that holds the last key of a location, and the declaration of that key if there is one."""
    section: type[Section] = RunConfig
    field = None
    for depth, name in enumerate(location):
        field = section.model_fields.get(name)
        nested = None if field is None else _nested_section(field)
        if nested is None or depth == len(location) - 1:
            break
        section = nested
    return section, field


def _nested_section(field: FieldInfo) -> type[Section] | None:
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _allowed(field: FieldInfo) -> str:
    """What a field allows, as a sentence made from its declaration."""
    nested = _nested_section(field)
    if nested is not None:
        return f"must be a table with the keys {', '.join(nested.model_fields)}"
    annotation = field.annotation
    if typing.get_origin(annotation) is tuple:
        entry = FieldInfo.from_annotation(typing.get_args(annotation)[0])
        return f"must be a list; every entry {_allowed(entry)}"
    if typing.get_origin(annotation) is Literal:
        return f"must be one of {', '.join(map(str, typing.get_args(annotation)))}"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    nouns = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false", Path: "a path"}
    noun = nouns.get(typing.cast(type, annotation), "valid")
    low = high = above = None
    for rule in field.metadata:
        low = rule.ge if isinstance(rule, annotated_types.Ge) else low
        above = rule.gt if isinstance(rule, annotated_types.Gt) else above
        high = rule.le if isinstance(rule, annotated_types.Le) else high
    if low is not None:
        return f"must be {noun} in {low} .. {high}"
    if above is not None:
        return f"must be {noun} greater than {above} and at most {high:g}"
    return f"must be {noun}"


def _check_cross_rules(config: RunConfig) -> None:
    """Rules between keys; the geometry's own first."""
    config.geometry()
    service, mailbox, parallel, workload = config.service, config.mailbox, config.parallel, config.workload
    if service.draft_tokens + 1 > mailbox.capacity:
        raise ConfigError(
            "service.draft_tokens",
            service.draft_tokens,
            f"draft_tokens + 1 verify rows of a request must fit mailbox.capacity = {mailbox.capacity}",
        )
    if mailbox.control_deadline_seconds < mailbox.deadline_seconds:
        raise ConfigError(
            "mailbox.control_deadline_seconds",
            mailbox.control_deadline_seconds,
            f"must be at least mailbox.deadline_seconds = {mailbox.deadline_seconds:g}",
        )
    checkpoint = config.checkpoint
    for number in checkpoint.heads:
        if number % HEAD_TILE:  # hence also one of parallel.dcp, which divides it
            raise ConfigError("checkpoint.heads", number, f"every entry must be a multiple of {HEAD_TILE}")
    for key in ("keys", "compared_keys"):
        most = max(getattr(checkpoint, key), default=0)
        if most > config.model.topk:
            raise ConfigError(f"checkpoint.{key}", most, f"must be at most model.topk = {config.model.topk}")
    devices = {"shm": "cpu", "nvshmem": "cuda", "symm_mem": "cuda"}
    needed = devices.get(parallel.fabric)
    if needed is not None and parallel.device not in ("auto", needed):
        raise ConfigError(
            "parallel.device", parallel.device, f"must be {needed} or auto with parallel.fabric = {parallel.fabric}"
        )
    if parallel.chain == "fused" and (parallel.route == "local" or parallel.device == "cpu"):
        raise ConfigError("parallel.chain", parallel.chain, "needs parallel.route = push and a GPU: use auto or staged")
    if workload.trace is not None and workload.synthetic is not None:
        raise ConfigError("workload.trace", str(workload.trace), "give either trace or [workload.synthetic], not both")
    if workload.trace is not None and not os.path.isfile(workload.trace):  # False also for a name that is too long
        raise ConfigError("workload.trace", str(workload.trace), "must be an existing file")
    if workload.synthetic is not None:
        longest = workload.synthetic.input_length + workload.synthetic.output_length + service.draft_tokens
        if longest > MAX_CONTEXT:
            raise ConfigError(
                "workload.synthetic.input_length",
                workload.synthetic.input_length,
                f"input_length + output_length + service.draft_tokens must be at most {MAX_CONTEXT}",
            )
