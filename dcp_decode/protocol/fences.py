"""Where a protocol has its fences: which pushes release their thread's view, and which polls acquire."""

from dcp_decode.protocol.rules import Credit, PollFence, PushFence, Rules
from dcp_decode.protocol.steps import Kind, Step


def releases(rules: Rules, step: Step) -> bool:
    """Whether the thread of a store executes a fence between what it has in its view and the store."""
    if rules.has_credit(step.use):
        return step.kind is Kind.PUSH_CREDIT and rules.credit is not Credit.NO_PUSH_FENCE
    if step.kind is Kind.PUSH_VALUE:
        return rules.value_push_fence
    if step.kind is not Kind.PUSH_QUERY:
        return False
    fence = rules.push_fence
    if fence is PushFence.EVERY_THREAD:
        return True
    if fence is PushFence.ONE_PER_DESTINATION:
        return step.index == 0
    # A fence before the dependency wait comes before there is anything in the view.
    return fence is PushFence.ONE_THREAD and step.index == 0 and step.peer == 0


def acquires(rules: Rules, step: Step) -> bool:
    """Whether the thread of a poll executes a fence after it."""
    if rules.has_credit(step.use):
        return step.kind is Kind.POLL_CREDIT and rules.credit is not Credit.NO_POLL_FENCE
    if step.stage == 3:
        return rules.merge_poll_fence
    fence = rules.poll_fence
    if fence is PollFence.ONE_PER_ROW:
        return step.index == 0 and step.cta == 0
    return fence is not PollFence.NONE
