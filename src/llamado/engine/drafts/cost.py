"""Cost of batches, and the decision if draft tokens are worth their time."""

from __future__ import annotations

_LEAST_GAIN = 0.02  # least acceptance rate of a draft token at any cost
_FIRST_GAIN = 0.125  # least acceptance rate before costs are known
_MEMORY = 0.96  # decay of the cost sums, per batch
_TRIAL_BATCHES, _TRIAL_SECONDS = 8, 0.2  # batches and seconds of a window, at least
_PAUSE = 1.0
_TRIALS, _MOST_TRIALS = 8, 64  # windows until the other mode is tried again; doubled while it is worse
_DOUBT = 1.2
_USUAL, _BELIEF = (
    0.1,
    4.0,
)  # expected cost of a further token before it was measured, in tokens, and the weight of that prior
_TRY_AGAIN = 32  # queries until a seemingly worse choice is tried again
_ALONE = 0.8  # decay of the time of one-token batches, per batch
_LATE = 1.25  # times the shortest latency of a window, above which windows wait for each other
_FORGET = 1.01  # assumed growth of that latency per window, because links and loads change
_FIRST_LENGTH, _MOST_LENGTH = 2.0, 16.0


class Cost:
    """Cost of batches: a + b × tokens seconds, fitted to the last ones, and the tokens they yield.

    Batches without drafts now and then show if drafting pays at all: if devices are busy anyway, large batches only
    prevent overlap. All of it is measured per number of generating sequences (by powers of two): the cost of a token
    with one sequence does not apply to twenty.
    """

    def __init__(self) -> None:
        self._companies: dict[int, tuple[_Fit, _Trial]] = {}

    def _company(self, n_generating: int) -> tuple[_Fit, _Trial]:
        return self._companies.setdefault(n_generating.bit_length(), (_Fit(), _Trial()))

    def note(
        self, n_generating: int, n_tokens: int, seconds: float, n_yielded: int, now: float, drafting: float = 0.0
    ) -> None:
        """Record that a batch of `n_tokens` took `seconds` and yielded `n_yielded` tokens with that many generating
        sequences.

        `drafting`: seconds that a model took to draft its tokens.
        """
        fit, trial = self._company(n_generating)
        fit.note(float(n_tokens), seconds, n_yielded, drafting)
        trial.note(n_yielded, now, 1.0 / fit.alone if n_generating == 1 and fit.alone else 0.0)

    def drafts(self, n_generating: int) -> bool:
        """Return True if drafting pays."""
        return self._company(n_generating)[1].drafting

    def least_gain(self, n_generating: int, seconds: float = 0.0) -> float:
        """Return the acceptance probability from which on one more token in a batch is worth its time plus
        `seconds`.
        """
        fit, trial = self._company(n_generating)
        return max(fit.least_gain(seconds), _LEAST_GAIN) if trial.drafting else 1.0


class DraftWindow:
    """Number of tokens that a model drafts before they are sent behind others in flight.

    Short windows arrive sooner, but each costs devices as much as one token: if windows wait for each other, they get
    longer until they do not.
    """

    def __init__(self) -> None:
        self._length, self._shortest = _FIRST_LENGTH, 0.0

    @property
    def length(self) -> int:
        return int(self._length)

    def note(self, seconds: float) -> None:
        """Record the seconds of a window from start to end."""
        self._shortest = min(_FORGET * self._shortest, seconds) if self._shortest else seconds
        late = seconds > _LATE * self._shortest
        self._length = min(self._length + 0.5, _MOST_LENGTH) if late else max(self._length - 0.125, 1.0)


class _Trial:
    """Tokens per second with and without drafts, measured alternately; the better mode runs most of the time."""

    def __init__(self) -> None:
        self.drafting = True
        self._rates: dict[bool, float] = {}
        self._skip = 0  # batches that were in flight when the mode changed
        self._began = self._last = 0.0
        self._n = self._batches = self._windows = 0
        self._patience = _TRIALS

    def note(self, n_yielded: int, now: float, plain: float) -> None:
        """`plain`: tokens per second without drafts, if known, otherwise 0."""
        pause, self._last = now - self._last, now
        if self._skip or pause > _PAUSE:  # another request began meanwhile, or a prompt was read
            self._skip = max(self._skip - 1, 0)
            self._began, self._n, self._batches = now, 0, 0
            return
        self._n += n_yielded
        self._batches += 1
        if self._batches < _TRIAL_BATCHES or now - self._began < _TRIAL_SECONDS:
            return
        rate = self._n / (now - self._began)
        self._rates[self.drafting] = 0.5 * (self._rates.get(self.drafting, rate) + rate)
        self._began, self._n, self._batches = now, 0, 0
        self._windows += 1
        # The acceptance rate depends on the text, which changes: drafting gets a bonus.
        with_, without = _DOUBT * self._rates.get(True, 0.0), self._rates.get(False)
        if self.drafting and plain:
            without = plain
        worse = without is None or (without > with_ if self.drafting else with_ > without)
        if not worse and (self._windows < self._patience or (self.drafting and plain)):
            return
        if worse and self._windows == 1 and without is not None:  # a trial, and it is still worse
            self._patience = min(2 * self._patience, _MOST_TRIALS)
        elif worse:
            self._patience = _TRIALS
        self.drafting = not self.drafting
        self._skip, self._windows = _TRIAL_BATCHES // 2, 0


class _Fit:
    """Sums for a least-squares line through (tokens, seconds); older batches decay."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = self._yielded = self._drafting = 0.0
        self._asked = 0
        self._sizes: set[float] = set()
        self.alone = 0.0
        """Seconds of a batch of one token; 0: unknown."""

    def note(self, x: float, seconds: float, n_yielded: int, drafting: float) -> None:
        if x not in self._sizes:  # the first batch of a size may include compilation
            self._sizes.add(x)
            return
        if x == 1.0:
            self.alone = _ALONE * self.alone + (1.0 - _ALONE) * seconds if self.alone else seconds
        self._n = _MEMORY * self._n + 1.0
        self._x = _MEMORY * self._x + x
        self._y = _MEMORY * self._y + seconds
        self._xx = _MEMORY * self._xx + x * x
        self._xy = _MEMORY * self._xy + x * seconds
        self._yielded = _MEMORY * self._yielded + n_yielded
        self._drafting = _MEMORY * self._drafting + drafting

    def least_gain(self, seconds: float) -> float:
        if not seconds:
            self._asked += 1
        if self._n < 2 or not self._y or not self._asked % _TRY_AGAIN:
            return _FIRST_GAIN
        spread = max(self._xx - self._x * self._x / self._n, 0.0)
        mean = self._y / self._n
        usual = _USUAL * mean / max(self._x / self._n, 1.0)
        slope = (self._xy - self._x * self._y / self._n + _BELIEF * usual) / (spread + _BELIEF)
        per_token = min(max(slope, 0.01 * mean / max(self._x / self._n, 1.0)), mean)
        # the time of a token, in tokens that batches yield in that time
        return (per_token + seconds) * self._yielded / (self._y + self._drafting)
