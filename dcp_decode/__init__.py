"""Decode context parallelism (DCP) of sparse MLA models: mailboxes, kernels, verify steps."""

__version__ = "0.1.0"
