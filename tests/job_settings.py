"""A CI job's settings for tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dcp_decode.job.stages import Settings


def settings(folder: Path, **given: object) -> Settings:
    """Of a job in one folder on one node; given: what else is asked for."""
    defaults = Settings("c.toml", folder, folder, "auto", folder / "baselines", 0.5, None)
    return dataclasses.replace(defaults, **given)  # type: ignore[arg-type]
