"""The mean of consecutive differences, and its uncertainty.

Consecutive observations are correlated, which an ordinary t-test mistakes for evidence. The
variance of their mean is therefore estimated from the projections on a few slow cosines, and judged
by Student's t with as many degrees of freedom (the equal-weighted cosine test: Müller 2007,
https://doi.org/10.1016/j.jeconom.2006.08.004; Lazarus, Lewis, Stock and Watson 2018,
https://doi.org/10.1080/07350015.2018.1506926).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LEAST_PIECES = 12
"""With fewer observations than this, the noise is not estimated."""
MOST_COSINES = 6
"""More would mistake slow changes for evidence."""
PIECES_PER_COSINE = 12


@dataclass(frozen=True, kw_only=True)
class MeanEstimate:
    """The mean of correlated observations.

    Args:
        mean: The mean.
        error: Its standard error; inf with fewer than `LEAST_PIECES` observations.
        freedom: Degrees of freedom of the error.
    """

    mean: float
    error: float
    freedom: int

    def above(self, probability: float) -> float:
        """An upper bound, with this probability, on how far the estimate is above the true mean."""
        from scipy import stats  # a worker starts without it, which takes a second to import

        if math.isinf(self.error):
            return math.inf
        return float(stats.t.ppf(probability, self.freedom)) * self.error


def mean_of(differences: Floats) -> MeanEstimate:
    """The mean of correlated observations, in order."""
    count = len(differences)
    mean = float(np.mean(differences))
    cosines = min(MOST_COSINES, max(2, count // PIECES_PER_COSINE))
    if count < LEAST_PIECES:
        return MeanEstimate(mean=mean, error=math.inf, freedom=cosines)
    times = (np.arange(count) + 0.5) / count
    orders = np.arange(1, cosines + 1)
    projections = math.sqrt(2 / count) * np.cos(np.pi * np.outer(orders, times)) @ differences
    long_run_variance = float(np.mean(projections**2))
    return MeanEstimate(mean=mean, error=math.sqrt(long_run_variance / count), freedom=cosines)
