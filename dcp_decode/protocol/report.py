"""Checks the variants and reports: readable lines for people, one JSON document for the record."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dcp_decode.protocol.model import Model
from dcp_decode.protocol.rules import Counter, Rules, Size
from dcp_decode.protocol.search import Choice, replay, search, shorten
from dcp_decode.protocol.state import PROPERTIES
from dcp_decode.protocol.steps import LOCAL
from dcp_decode.protocol.variants import (
    CONTRACT,
    CONTRACT_SIZES,
    COUNTEREXAMPLE_SIZES,
    FULL_SIZES,
    FUSED,
    SMALL_SIZES,
    Variant,
)


@dataclass(frozen=True)
class Proof:
    """One exhaustive search, up to its end or to a violation."""

    size: Size
    steps: int
    states: int
    seconds: float


@dataclass(frozen=True)
class Finding:
    """What is known of a variant after its searches."""

    variant: Variant
    proofs: tuple[Proof, ...]
    violated: str = ""
    choices: tuple[Choice, ...] = field(default=(), repr=False)
    trace: tuple[str, ...] = field(default=(), repr=False)
    """The violating run, one step a line; the last line names the violated property."""

    @property
    def safe(self) -> bool:
        return not self.violated

    @property
    def states(self) -> int:
        return sum(proof.states for proof in self.proofs)

    @property
    def as_expected(self) -> bool:
        return self.violated == self.variant.violates


def sizes_of(variant: Variant, bound: str) -> tuple[Size, ...]:
    """The sizes that a variant is searched at."""
    if not variant.expected_safe:
        return COUNTEREXAMPLE_SIZES
    if bound == "small":
        return SMALL_SIZES
    if variant.largest is not None:
        return (variant.largest,)
    return FULL_SIZES + CONTRACT_SIZES if variant in (CONTRACT, FUSED) else FULL_SIZES


def check(variant: Variant, sizes: Sequence[Size]) -> Finding:
    """Search ``variant`` at each size until one shows a violation."""
    proofs: list[Proof] = []
    for size in sizes:
        model = Model(variant.rules, size)
        started = time.perf_counter()
        verdict = search(model)
        proofs.append(Proof(size, model.table.count, verdict.states, time.perf_counter() - started))
        if not verdict.safe:
            choices = shorten(model, verdict)
            played = replay(model, choices)
            assert played is not None, "a run that the search has made can be made again"
            trace = (*played[0], f"violated: {played[1]}")
            return Finding(variant, tuple(proofs), verdict.violated, choices, trace)
    return Finding(variant, tuple(proofs))


def lines(finding: Finding) -> Iterator[str]:
    """A finding for people. Steps that say nothing (a CTA begins, a number goes up) are left out."""
    verdict = "safe" if finding.safe else f"UNSAFE, violates: {finding.violated}"
    surprise = "" if finding.as_expected else f" (expected: {finding.variant.violates or 'safe'})"
    yield f"{finding.variant.name}: {verdict}{surprise}"
    yield f"  because: {finding.variant.why}"
    for proof in finding.proofs if finding.safe else finding.proofs[-1:]:
        yield f"  {in_words(proof.size)}: {proof.states:,} states, {proof.steps} steps a run, {proof.seconds:.1f} s"
    if finding.safe:
        return
    rules = finding.variant.rules
    size = finding.proofs[-1].size
    steps = Model(rules, size).steps
    numbers_matter = rules.missing_wait or rules.counter in (Counter.FIRST_CTA_STARTS, Counter.FIRST_CTA_ENDS)
    shown = []
    for index, line in enumerate(finding.trace):
        routine = index < len(finding.choices) and steps[finding.choices[index][0]].kind in LOCAL
        if numbers_matter or not routine or "empty" in line:
            shown.append(line)
    for line in shown:
        yield f"    {line}"
    if len(shown) < len(finding.trace):
        yield f"    ({len(finding.trace) - len(shown)} steps of CTAs beginning and counting left out)"


def in_words(size: Size) -> str:
    """A size in words."""
    rows = "any rows empty" if size.empty_rows else "no row empty"
    parts = ((size.ranks, "rank"), (size.words, "word"), (size.uses, "use"), (size.readers, "reader"))
    return ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in parts) + f", {rows}"


def document(findings: Sequence[Finding], bound: str) -> dict[str, Any]:
    """The findings as one JSON document. It holds no times, so that the same code writes the same document."""
    return {
        "schema": 1,
        "command": "protocol",
        "bound": bound,
        "verified": all(finding.as_expected for finding in findings),
        "properties": list(PROPERTIES),
        "variants": [
            {
                "name": finding.variant.name,
                "rules": _changed(finding.variant.rules),
                "why": finding.variant.why,
                "states": finding.states,
                "safe": finding.safe,
                "violated": finding.violated or None,
                "trace": list(finding.trace),
                "sizes": [
                    {**asdict(proof.size), "steps": proof.steps, "states": proof.states} for proof in finding.proofs
                ],
            }
            for finding in findings
        ],
    }


def _changed(rules: Rules) -> dict[str, Any]:
    """The rules that differ from the protocol of the harness."""
    usual = Rules()
    pairs = ((each.name, getattr(rules, each.name), getattr(usual, each.name)) for each in fields(Rules))
    return {name: value for name, value, default in pairs if value != default}


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
