"""Memory settings that training profits from."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory instead of returning it to the system page by page.

    The tensors of each training step are freed and asked for again at once; with the default settings that costs a third of a
    small network's step in page faults. Returns whether the settings were made (glibc only); the results do not change.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_MMAP_THRESHOLD, 2**30), (_M_TOP_PAD, 64 * 2**20))
    return all(mallopt(name, value) for name, value in settings)
