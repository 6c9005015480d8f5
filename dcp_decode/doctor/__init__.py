"""What a machine, or every rank's machine, offers a run, and why something won't work: facts first, then verdicts."""
