"""The end of a program that a test starts as users would."""

import atexit
import os
import sys
from typing import NoReturn

import torch.distributed as dist


def leave() -> NoReturn:
    """Destroy the groups and end this rank as multiprocessing ends its children: by the exit handlers alone.

    A thread of gloo's that has not dropped its last tensor yet aborts an interpreter that ends (pytorch #179291,
    #190489). After a training of milliseconds on a busy machine that happens, and many things keep a group alive when
    it is destroyed: caches of DTensor, Megatron's globals, defaults of torch.distributed.nn's functions.
    """
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)
