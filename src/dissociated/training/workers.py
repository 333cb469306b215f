"""Worker processes of a loader."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait

from dissociated.base.once import once


@once
def end_with_parent() -> None:
    """End this process as soon as the process that has started it ends, in whatever way.

    PyTorch's workers compare the id of their parent now and then. Under `forkserver` this is the id of the server of
    forks, and a worker that waits elsewhere does not compare. The end of the parent is seen here at once, by a
    descriptor of the process. A pipe shows the end of a parent that was gone before that.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    signs: list[int] = [parent.sentinel]
    try:
        signs.append(os.pidfd_open(parent.pid))
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # no descriptor is free, or the kernel has no such call
        pass

    def watch() -> None:
        wait(signs)
        os._exit(1)

    threading.Thread(target=watch, name="dissociated-parent", daemon=True).start()
