"""A sequential test of a mean: it may be evaluated after every observation.

A test of a fixed size that is evaluated after each of 10,000 requests stops far more good challengers than its level
allows. Here the evidence is a test martingale: the wealth of a bettor who bets against "the mean is at most the limit"
at fair odds. While that is true the wealth is a non-negative supermartingale that starts at 1, so by Ville's inequality
it reaches 1 / significance with a probability of at most `significance`, at whatever time the test is evaluated.

Sources: I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86(1), 2024
(the bets); H. Robbins, "Statistical methods related to the law of the iterated logarithm", Ann. Math. Stat. 41(5), 1970
(mixtures); J. Ville, "Étude critique de la notion de collectif", 1939 (the bound).
"""

import math
from collections import deque
from functools import lru_cache

STEPS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
SHARES = sorted({*STEPS, *(1 - step for step in STEPS)})  # of the largest possible bet
RESTART = 500  # observations after which another bettor begins
NUM_BETTORS = 2  # the latest ones
CACHE_SIZE = 64  # different values whose gains are cached


class MeanTest:
    """Test whether the mean of observations in [0, 1] is above a limit; valid at any time.

    The observations may have any distribution, and need not be independent: under the null hypothesis the mean of each
    observation, given the earlier ones, is at most the limit. A bet λ in [0, 1/limit) has the wealth
    Π (1 + λ (x - limit)); a bettor divides the stake among fixed bets, some of which detect large excesses quickly and
    some small ones eventually. For x in {0, 1} a bet is the likelihood ratio of the share limit + λ limit (1 - limit).

    Old evidence in favour delays detection, so another bettor begins after every `RESTART` observations, the k-th with
    a stake of 6 / (π k)²: a mean that rises late is detected nearly as fast. The stakes add up to 1, and to drop old
    bettors only lowers the wealth, so the bound holds.
    """

    def __init__(self, limit: float, significance: float) -> None:
        """Make a test without evidence.

        Args:
            limit: Limit of the mean, in [0, 1); 0 is replaced by 1e-6, at which a single 1 is no proof yet.
            significance: Probability in (0, 1) of ever reporting a mean above the limit although it is not.
        """
        self.limit = max(limit, 1e-6)
        self.significance = significance
        self.count = 0  # observations so far
        self._bets = [share / self.limit for share in SHARES]
        self._gains = lru_cache(CACHE_SIZE)(self._compute_gains)  # most observations are 0 or 1
        self._bettors: deque[list[float]] = deque(maxlen=NUM_BETTORS)  # logarithms of the wealth of each bet
        self._sums: deque[list[float]] = deque(maxlen=NUM_BETTORS)  # observations and their total since each began

    @property
    def mean(self) -> float:
        """Mean of the latest 500 to 1,000 observations, since the older bettor began; 0 without any."""
        return self._sums[0][1] / self._sums[0][0] if self._sums else 0.0

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the wealth of the latest bettors; minus infinity without observations."""
        logs = [log for bettor in self._bettors for log in bettor]
        top = max(logs, default=-math.inf)
        return top + math.log(math.fsum(math.exp(log - top) for log in logs)) if logs else top

    def observe(self, value: float) -> bool:
        """Add one observation in [0, 1]; return whether the evidence now suffices that the mean is above the limit."""
        if self.count % RESTART == 0:
            stake = 6 / (math.pi * (self.count // RESTART + 1)) ** 2
            self._bettors.append([math.log(stake / len(self._bets))] * len(self._bets))
            self._sums.append([0.0, 0.0])
        self.count += 1
        gains = self._gains(value)
        for bettor, sums in zip(self._bettors, self._sums, strict=True):
            bettor[:] = [log + gain for log, gain in zip(bettor, gains, strict=True)]
            sums[0] += 1
            sums[1] += value
        return value > self.limit and self.log_evidence >= -math.log(self.significance)

    def _compute_gains(self, value: float) -> list[float]:
        """Return the increase of the logarithm of each bet's wealth."""
        return [math.log1p(bet * (value - self.limit)) for bet in self._bets]
