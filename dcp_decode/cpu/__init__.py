"""The stages of a verify step on the CPU: vectorised torch over the same mailboxes as the GPU kernels."""
