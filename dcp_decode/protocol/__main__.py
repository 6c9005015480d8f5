"""``python -m dcp_decode.protocol``: check every variant of the mailbox protocol and report."""

import argparse
import sys
import time
from pathlib import Path

from dcp_decode.protocol.report import check, document, lines, sizes_of, write
from dcp_decode.protocol.state import PROPERTIES
from dcp_decode.protocol.variants import VARIANTS


def main() -> int:
    """Return 0 if every variant turns out as expected, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m dcp_decode.protocol", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the findings to this file")
    parser.add_argument("--bound", choices=("full", "small"), default="full", help="how large the models are")
    arguments = parser.parse_args()
    print(f"properties: {', '.join(PROPERTIES)}")
    started = time.perf_counter()
    findings = []
    for variant in VARIANTS:
        finding = check(variant, sizes_of(variant, arguments.bound))
        findings.append(finding)
        print("\n".join(lines(finding)), flush=True)
    states = sum(finding.states for finding in findings)
    wrong = [finding.variant.name for finding in findings if not finding.as_expected]
    safe = sum(finding.safe for finding in findings)
    print(
        f"{len(findings)} variants: {safe} safe, {len(findings) - safe} unsafe, "
        f"{len(wrong)} not as expected{': ' + ', '.join(wrong) if wrong else ''}; "
        f"{states:,} states in {time.perf_counter() - started:.1f} s"
    )
    if arguments.json is not None:
        write(arguments.json, document(findings, arguments.bound))
        print(arguments.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
