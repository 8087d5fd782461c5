"""OpenBLAS for mlx on Linux.

mlx's CPU package for Linux calls the BLAS that the process has loaded, and ships a slow one. Loading OpenBLAS first,
with its symbols global, makes matrix products several times faster. It must happen before mlx is imported.
"""

import ctypes
import sys


def use_openblas() -> bool:
    """Loads OpenBLAS into this process on Linux; to be called before mlx is imported.

    Returns:
        True when OpenBLAS is loaded; False on other systems and where the library is absent.
    """
    if sys.platform != "linux":
        return False
    try:
        ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
