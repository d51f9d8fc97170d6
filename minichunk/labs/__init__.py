"""Checks for the exercises of the course: `from minichunk.labs import check`."""
