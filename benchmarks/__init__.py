"""Measurements, each run as `python -m benchmarks.NAME`; results with date, card and versions lie
in `benchmarks/results/`."""
