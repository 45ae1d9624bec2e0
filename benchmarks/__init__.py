"""asv suite. It shares its arms with ``r3numba bench`` (``r3numba._bench``).

``R3NUMBA_ASV_SMALL=1`` shrinks every size, for a smoke run. A commit that has no ``r3numba._bench`` yet, and a host
without what an arm needs, give "n/a" and no failure.
"""
