"""``python -m r3numba.cli`` is the command ``r3numba``."""

import sys

from . import main

sys.exit(main())
