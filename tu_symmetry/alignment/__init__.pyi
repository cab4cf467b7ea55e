from .align import Alignment as Alignment
from .barrier import LossBarrier as LossBarrier
from .barrier import measure as measure
from .matching import Matching as Matching
from .merging import Merged as Merged
from .merging import average as average
from .networks import StateSource as StateSource
from .repair import correct as correct
