"""Measuring: what the kernels cost here, and (with the `compare` work) what recipes gain on a slow network."""
