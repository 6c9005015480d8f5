"""The protocol of the harness is safe, and each weakening of it that is not has a run that shows it."""

import json

import pytest

from dcp_decode.protocol.model import Model
from dcp_decode.protocol.report import Finding, check, document, lines, sizes_of
from dcp_decode.protocol.search import replay
from dcp_decode.protocol.state import PROPERTIES
from dcp_decode.protocol.variants import CONTRACT, FULL_SIZES, FUSED, VARIANTS, Variant, variant

pytestmark = pytest.mark.xdist_group("protocol_variants")  # one worker makes the findings for all tests

SAFE = [each for each in VARIANTS if each.expected_safe]
UNSAFE = [each for each in VARIANTS if not each.expected_safe]


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    return {each.name: check(each, sizes_of(each, "small")) for each in VARIANTS}


@pytest.mark.parametrize("size", FULL_SIZES, ids=str)
@pytest.mark.parametrize("protocol", [CONTRACT, FUSED], ids=["contract", "fused"])
def test_the_protocols_of_the_harness_are_safe_at_every_required_size(protocol, size):
    finding = check(protocol, [size])
    assert finding.safe
    assert finding.proofs[0].states > finding.proofs[0].steps, "every run has all its steps"


@pytest.mark.parametrize("each", SAFE, ids=lambda each: each.name)
def test_safe_variant(each: Variant, findings):
    assert findings[each.name].violated == ""


@pytest.mark.parametrize("each", UNSAFE, ids=lambda each: each.name)
def test_unsafe_variant_has_a_trace_that_can_be_replayed(each: Variant, findings):
    finding = findings[each.name]
    assert finding.violated == each.violates
    assert finding.violated in PROPERTIES
    assert finding.trace[-1] == f"violated: {each.violates}"
    assert finding.trace[0].startswith("rank ")
    model = Model(each.rules, finding.proofs[-1].size)
    played = replay(model, finding.choices)
    assert played is not None
    assert played == (list(finding.trace[:-1]), each.violates)
    if len(finding.trace) == len(finding.choices) + 1:  # violated by a step, not by having come to an end
        before = replay(model, finding.choices[:-1])
        assert before is not None
        assert before[1] == "", "the run violates nothing before its last step"


@pytest.mark.parametrize("each", UNSAFE, ids=lambda each: each.name)
def test_a_counterexample_needs_every_rule_it_breaks(each: Variant, findings):
    """The protocol of the harness cannot follow the trace to a violation: at some step it has to do otherwise."""
    finding = findings[each.name]
    model = Model(CONTRACT.rules, finding.proofs[-1].size)
    if model.steps == Model(each.rules, finding.proofs[-1].size).steps:
        played = replay(model, finding.choices)
        assert played is None or played[1] == ""


def test_names_are_unique_and_every_rule_is_varied():
    assert len({each.name for each in VARIANTS}) == len(VARIANTS)
    assert variant("contract") is CONTRACT
    with pytest.raises(KeyError):
        variant("nonsense")
    usual = vars(CONTRACT.rules)
    varied = {key for each in VARIANTS for key, value in vars(each.rules).items() if value != usual[key]}
    assert varied == set(usual)


def test_document_and_lines(findings):
    content = json.loads(json.dumps(document(list(findings.values()), "small")))
    assert content["verified"]
    by_name = {each["name"]: each for each in content["variants"]}
    assert by_name["contract"]["safe"]
    assert by_name["contract"]["rules"] == {}
    assert by_name["contract"]["trace"] == []
    assert by_name["one_generation"]["rules"] == {"generations": 1}
    assert by_name["one_generation"]["trace"][-1] == "violated: no lost push"
    assert all(each["states"] == sum(size["states"] for size in each["sizes"]) for each in content["variants"])
    text = "\n".join(lines(findings["one_generation"]))
    assert "UNSAFE" in text
    assert "the re-arm of use 0" in text
    assert "violated: no lost push" in text
