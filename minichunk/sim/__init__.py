"""Simulated GPUs: what a step computes and moves, and how long that takes on hardware one lacks.

The scheduler and the step loop are those of `minichunk.core`; only the executor differs.
"""
