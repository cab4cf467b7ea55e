from .align import Alignment as Alignment
from .barrier import LossBarrier as LossBarrier
from .matching import Matching as Matching
from .merging import Merged as Merged
