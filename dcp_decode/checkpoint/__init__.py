"""Measurements of the harness: what a stage, a layer or a whole step takes, and against what."""
