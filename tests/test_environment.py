"""Which commit a result came from: of a checkout, and of an archive that carries no history."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_decode import environment

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("text", "commit"), [("0" * 40, "0" * 40), ("$Format:%H$", None), ("", None)])
def test_an_archive_knows_its_commit_and_a_copy_of_the_files_does_not(tmp_path, monkeypatch, text, commit):
    (tmp_path / "dcp_decode").mkdir()
    (tmp_path / environment.ARCHIVAL).write_text(text + "\n")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "dcp_decode" / "environment.py"))
    assert environment.commit() == (commit, None)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an archive itself")
def test_git_fills_in_the_file_that_this_repository_keeps():
    assert (ROOT / environment.ARCHIVAL).read_text() == "$Format:%H$\n"
    assert f"{environment.ARCHIVAL} export-subst\n" in (ROOT / ".gitattributes").read_text()
