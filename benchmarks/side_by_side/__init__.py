"""minichunk beside the engines people would use instead: the same requests, one kind of trace.

Each engine runs in a worker process of its own environment (`worker`) behind a thin adapter
(`adapters/`) that records what its scheduler did as a minichunk `Trace`; so one set of functions
computes every figure. `minichunk bench` is the command; its tables are kept in
`benchmarks/results/`.
"""
