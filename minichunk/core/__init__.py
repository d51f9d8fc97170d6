"""The scheduling layer: requests, blocks, policies, orders, the step loop and its trace.

Standard library only; it runs wherever Python does, in a browser too.
"""
