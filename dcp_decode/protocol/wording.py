"""Steps in words, for traces and for people."""

from dcp_decode.protocol.fences import acquires, releases
from dcp_decode.protocol.rules import Rules, Size
from dcp_decode.protocol.steps import STAGE_NAMES, Kind, Step


def describe(rules: Rules, size: Size, step: Step) -> str:
    """A step in words: "rank: stage: action"."""
    return f"rank {step.rank}: {STAGE_NAMES[step.stage]} (use {step.use}): {_action(rules, size, step)}"


def _action(rules: Rules, size: Size, step: Step) -> str:
    word = f"query word {step.index}"
    value = "LSE word" if step.index == size.words else f"payload word {step.index}"
    before = "fence, " if releases(rules, step) else ""  # of a push
    after = ", fence" if acquires(rules, step) else ""  # of a poll
    if step.kind is Kind.BEGIN:
        what = {1: "CTA for rank", 2: "row of rank", 3: "slot of rank"}[step.stage] + f" {step.peer}"
        reader = f", reader {step.cta}" if step.stage == 2 else ""
        wait = "no dependency wait" if rules.missing_wait == step.stage else "dependency wait"
        return f"{what}{reader}: {wait}, read the use number"
    if step.kind is Kind.COUNT_USE:
        return f"increment the use number of {STAGE_NAMES[step.cta]}"
    if step.kind is Kind.COUNT_KEYS:
        return f"count keys of the row of rank {step.peer}"
    if step.kind is Kind.PUSH_QUERY:
        return f"{before}push {word} to rank {step.peer}"
    if step.kind is Kind.POLL_QUERY:
        return f"reader {step.cta} polls {word} from rank {step.peer}{after}"
    if step.kind is Kind.PUSH_CREDIT:
        return f"{before}push credit to rank {step.peer}"
    if step.kind is Kind.POLL_CREDIT:
        return f"poll credit from rank {step.peer}{after}"
    if step.kind is Kind.ARM_CREDIT:
        return f"re-arm credit from rank {step.peer}"
    if step.kind is Kind.READ_QUERY:
        return f"reader {step.cta} reads {word} from rank {step.peer} without polling"
    if step.kind is Kind.ARM_QUERY:
        return f"reader {step.cta} re-arms {word} from rank {step.peer}"
    if step.kind is Kind.PUSH_VALUE:
        return f"{before}push {value} to rank {step.peer}"
    if step.kind is Kind.POLL_VALUE:
        return f"poll {value} from rank {step.peer}{after}"
    return f"re-arm {value} from rank {step.peer}"
