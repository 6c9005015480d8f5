"""A job's outcomes as one JSON document, as JUnit XML for the CI server, and as an HTML page that links to the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2

from dcp_decode import environment
from dcp_decode.inputs import read_input
from dcp_decode.job.runner import Outcome
from dcp_decode.results import SCHEMA

ARCHIVES = "*.forensics.tar.gz"
EXPLAIN_SECONDS = 60
VERDICTS = ("fabrics", "kernels", "launchers", "builds")  # of the doctor's document

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>dcp_decode: {{ verdict }}</title>
<style>
  body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 64em; padding: 0 1em; color: #222 }
  table { border-collapse: collapse; width: 100% }
  th, td { text-align: left; vertical-align: top; padding: .3em .8em .3em 0; border-bottom: 1px solid #ddd }
  td:nth-child(-n+3) { white-space: nowrap }
  code, pre { font: 13px/1.4 ui-monospace, monospace } pre { background: #f4f4f4; padding: .8em; white-space: pre-wrap }
  .ok { color: #070 } .failed { color: #b00; font-weight: bold } .skipped { color: #777 }
</style>
<h1 class="{{ 'ok' if exit_code == 0 else 'failed' }}">{{ verdict }}</h1>
<p>{{ doctor.answer or "nothing known of the machine" }}</p>
<p>commit {{ commit or "unknown" }}{{ ", changed" if dirty }}; {{ "%.0f"|format(seconds) }} s</p>
<table>
<tr><th>stage<th>result<th>time<th>what happened
{% for stage in stages %}
<tr><td>{% if stage.log %}<a href="{{ stage.log }}">{{ stage.name }}</a>{% else %}{{ stage.name }}{% endif %}
<td class="{{ stage.result }}">{{ stage.result }}{{ " (%d)"|format(stage.exit_code) if stage.exit_code }}
<td>{{ "%.1f"|format(stage.seconds) }} s<td>{{ stage.text }}<br><code>{{ stage.command }}</code>
{% endfor %}
</table>
<h2>What works here</h2>
<table>
{% for verdict in verdicts %}
<tr><td>{{ verdict.name }}<td class="{{ 'ok' if verdict.works else 'skipped' }}">{{ "yes" if verdict.works else "no" }}
<td>{{ verdict.reason }}
{% endfor %}
</table>
{% for archive, text in explanations.items() %}
<h2>{{ archive }}</h2><pre>{{ text }}</pre>
{% endfor %}
<h2>Files</h2>
<ul>{% for file in files %}<li><a href="{{ file }}">{{ file }}</a>{% endfor %}</ul>
</html>
"""


def write_report(folder: Path, outcomes: Sequence[Outcome], exit_code: int) -> Path:
    """Write job.json, job.xml and index.html into `folder`; the path of job.json."""
    doctor = _examination(folder)
    document = _document(folder, outcomes, exit_code, doctor)
    path = folder / "job.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    ElementTree.ElementTree(_junit(outcomes)).write(folder / "job.xml", encoding="utf-8", xml_declaration=True)
    page = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    files = sorted(file.name for file in folder.iterdir() if file.is_file() and file.name != "index.html")
    verdicts = [verdict for part in VERDICTS for verdict in doctor.get(part, [])]
    (folder / "index.html").write_text(page.render(document, files=files, doctor=doctor, verdicts=verdicts))
    return path


def _document(folder: Path, outcomes: Sequence[Outcome], exit_code: int, doctor: dict[str, Any]) -> dict[str, Any]:
    commit, dirty = environment.commit()
    failed = [outcome.name for outcome in outcomes if outcome.exit_code]
    return {
        "schema": SCHEMA,
        "command": "ci-job",
        "exit_code": exit_code,
        "verdict": "green" if not failed else f"red: {', '.join(failed)}",
        "commit": commit,
        "dirty": dirty,
        "device": doctor.get("answer"),
        "seconds": sum(outcome.seconds for outcome in outcomes),
        "stages": [asdict(outcome) | {"result": _result(outcome)} for outcome in outcomes],
        "explanations": {path.name: _explain(path) for path in sorted(folder.glob(ARCHIVES))},
    }


def _result(outcome: Outcome) -> str:
    return {None: "skipped", 0: "ok"}.get(outcome.exit_code, "failed")


def _examination(folder: Path) -> dict[str, Any]:
    """The doctor's document, or nothing if it left none."""
    try:
        document = json.loads(read_input(folder / "doctor.json"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _explain(archive: Path) -> str:
    """What `dcp-decode explain` says of a forensics archive."""
    command = [sys.executable, "-m", "dcp_decode", "explain", str(archive)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=EXPLAIN_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not explained within {EXPLAIN_SECONDS} s"
    return ended.stdout or ended.stderr


def _junit(outcomes: Sequence[Outcome]) -> ElementTree.Element:
    suite = ElementTree.Element(
        "testsuite",
        name="dcp_decode ci-job",
        tests=str(len(outcomes)),
        failures=str(sum(bool(outcome.exit_code) for outcome in outcomes)),
        errors="0",
        skipped=str(sum(outcome.exit_code is None for outcome in outcomes)),
        time=f"{sum(outcome.seconds for outcome in outcomes):.3f}",
    )
    for outcome in outcomes:
        case = ElementTree.SubElement(
            suite, "testcase", classname="ci-job", name=outcome.name, time=f"{outcome.seconds:.3f}"
        )
        if outcome.exit_code is None:
            ElementTree.SubElement(case, "skipped", message=_of_xml(outcome.text))
        elif outcome.exit_code:
            failure = ElementTree.SubElement(
                case, "failure", message=_of_xml(outcome.text), type=f"exit code {outcome.exit_code}"
            )
            failure.text = f"{outcome.command}\nsee {outcome.log}"
    return suite


def _of_xml(text: str) -> str:
    """Text without the characters that XML can't hold, such as those that colour a terminal."""
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)
