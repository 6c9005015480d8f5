"""A cluster's CI job: its stages, how one is run, and the report for machines (JUnit) and people (HTML)."""
