"""Benchmarks that run as `python -m benchmarks.scripts.NAME` from the root of the repository; each has --help."""
