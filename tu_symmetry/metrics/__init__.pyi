from . import functional as functional
from .averages import PairwiseMutualInformation as PairwiseMutualInformation
from .averages import PredictiveAgreement as PredictiveAgreement
from .averages import PredictiveTotalVariation as PredictiveTotalVariation
from .averages import RepresentationCost as RepresentationCost
from .averages import TranspositionCount as TranspositionCount
from .samples import MarginalHomogeneity as MarginalHomogeneity
from .samples import MaximumMeanDiscrepancy as MaximumMeanDiscrepancy
