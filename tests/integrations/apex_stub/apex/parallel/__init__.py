from .distributed import DistributedDataParallel as DistributedDataParallel
from .distributed import Reducer as Reducer
