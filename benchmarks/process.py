"""What a new process pays: imports, and the first call with compilation."""

from __future__ import annotations


class Import:
    """Seconds of an import; the second and third include NumPy's."""

    number = 1
    repeat = 3

    def timeraw_numpy(self):
        return "import numpy"

    def timeraw_r3numba(self):
        return "import numpy, r3numba"

    def timeraw_collate_routes(self):
        return "import numpy\nfrom r3numba import collate_routes, RouteCollator"


class FirstCall:
    """The first call of a process, its imports included."""

    number = 1
    repeat = 2

    def timeraw_small(self):
        return "import numpy, r3numba\nr3numba.collate_routes([numpy.zeros((9, 48, 8), 'uint8')], [10])"

    def timeraw_large(self):
        return "import numpy, r3numba\nr3numba.collate_routes([numpy.zeros((30000, 48, 8), 'uint8')], [30001])"
