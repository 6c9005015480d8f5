"""torchrun's agent without its report of failed ranks: `launch/torchrun.sh` says what the ranks' records say.

python -m dcp_decode.control.agent --standalone --nproc-per-node 8 -m dcp_decode run ...
"""

from __future__ import annotations

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """Run torchrun with this process's arguments; 1 if a rank failed or the run was told to stop."""
    logging.disable(logging.ERROR)  # its lines on every process that it stops
    try:
        run.main(sys.argv[1:])
    except (ChildFailedError, SignalException):  # SignalException: told to stop; it has stopped the ranks
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
