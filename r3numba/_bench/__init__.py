"""What ``r3numba bench`` and the asv suite share: shapes, arms, the host's limit, and how to measure.

Nothing here is public. Import the modules by name: this package imports none of them.
"""
