"""The end of a run, for whoever outlives its ranks: judge it, and keep the evidence if it failed. Needs no torch.

The archive lies beside the run's JSON document, and the document says so:

    "forensics": "PATH.forensics.tar.gz", "first_cause": {"kind": "late rank", "rank": 3, "sentence": ...}
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

from dcp_decode.errors import WAIT_EXPIRED, WRONG_RESULT
from dcp_decode.forensics import archive
from dcp_decode.forensics.diagnosis import diagnose
from dcp_decode.records import Plan, read_records
from dcp_decode.results import Conclusion, conclude, document_path

SUFFIX = ".forensics.tar.gz"


def conclude_folder(plan: Plan, folder: Path) -> Conclusion:
    """Judge a run by the folder that its ranks and its launcher wrote to, and keep that folder if the run failed."""
    return keep(conclude(plan, read_records(folder)), plan, folder)


def keep(conclusion: Conclusion, plan: Plan, folder: Path) -> Conclusion:
    """The conclusion with `forensics` and `first_cause` in its document: null if the run verified or never ran.

    An archive that can't be written, or not be read again, is said on standard error and changes nothing else.
    """
    findings: dict[str, object] = {"forensics": None, "first_cause": None}
    if conclusion.exit_code in (WRONG_RESULT, WAIT_EXPIRED):
        document = document_path(plan.output, plan.started)
        path = document.with_name(document.name.removesuffix(".json") + SUFFIX)
        try:
            archive.write(path, plan, folder, conclusion.document)
            findings["forensics"] = str(path)
            findings["first_cause"] = asdict(diagnose(archive.read(path)))
        except OSError as error:
            print(f"forensics: {path} not written: {error.strerror}", file=sys.stderr, flush=True)
        except archive.BadArchive as error:
            print(f"forensics: {error}", file=sys.stderr, flush=True)
    return replace(conclusion, document=conclusion.document | findings)
