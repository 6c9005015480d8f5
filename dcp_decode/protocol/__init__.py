"""The mailbox protocol as a model, an exhaustive checker of it, and the variants that show which rules are needed.

``docs/protocol.md`` is the reading of it. The parts, in the order in which they build on each other:

* :mod:`~dcp_decode.protocol.rules`: a protocol and the size of its model, as data
* :mod:`~dcp_decode.protocol.steps`: every step a run can take, and what must come before it
* :mod:`~dcp_decode.protocol.fences`: which pushes release and which polls acquire
* :mod:`~dcp_decode.protocol.state`, :mod:`~dcp_decode.protocol.layout`: what a state holds, and where
* :mod:`~dcp_decode.protocol.model`: what a step does to the mailboxes in a weak memory, and the properties
* :mod:`~dcp_decode.protocol.wording`: steps in words
* :mod:`~dcp_decode.protocol.search`: the exhaustive search, its reduction, and traces
* :mod:`~dcp_decode.protocol.variants`: the protocol of the harness, and the table of variants
* :mod:`~dcp_decode.protocol.report`: findings in words and as JSON
"""
