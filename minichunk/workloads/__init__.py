"""Workloads: who asks what, when, and how long the answers will be.

A workload is what the engine is driven with, on a real model and in simulation alike. Here are the
scene that chunked prefill was invented for, the arrival processes of the queueing textbook
(Poisson, bursty, closed loop, several tenants), and loaders for published request traces.
"""

from minichunk.workloads.arrivals import bursty, closed_loop, multi_tenant, poisson, stall_scene
from minichunk.workloads.lengths import Lengths
from minichunk.workloads.published import load, load_azure, load_mooncake, load_sharegpt_lengths
from minichunk.workloads.workload import ClosedLoop, Workload, describe, merge

__all__ = [
    "ClosedLoop",
    "Lengths",
    "Workload",
    "bursty",
    "closed_loop",
    "describe",
    "load",
    "load_azure",
    "load_mooncake",
    "load_sharegpt_lengths",
    "merge",
    "multi_tenant",
    "poisson",
    "stall_scene",
]
