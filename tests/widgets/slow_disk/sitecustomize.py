"""The slow-disk hook: with this folder in PYTHONPATH, every read of an expert takes two milliseconds longer.

    PYTHONPATH=$PWD/tests/widgets/slow_disk make test-notebooks

Python imports this module when it starts, whoever starts it: a kernel, a script, nbval, papermill. Reads go by threads
then, since the system's own queue has nothing that could be slowed down from here.
"""

import time

from colibri_lab.pager.queue import QueueTransfer
from colibri_lab.pager.reader import Reader

SLOWER_S = 0.002
_fetch = Reader._fetch
reads = 0


def _slow(*arguments):
    global reads
    reads += 1
    time.sleep(SLOWER_S)
    return _fetch(*arguments)


Reader._fetch = _slow
QueueTransfer.open = lambda *arguments: None
