"""Sampling parameters. Names, defaults and limits are llama.cpp's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llamado.engine.errors import InvalidRequest
from llamado.engine.sampling.rng import Seed

# one letter per sampler, as in llama.cpp's `--sampling-seq`
SAMPLER_LETTERS: Mapping[str, str] = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
    "a": "adaptive_p",
}
KNOWN_SAMPLERS = tuple(SAMPLER_LETTERS.values())
DEFAULT_SAMPLERS = KNOWN_SAMPLERS[:9]

# other spellings that llama.cpp accepts; the `top-k` and `topk` forms are derived below
_SAMPLER_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"} | {
    name.replace("_", joint): name for name in KNOWN_SAMPLERS for joint in ("_", "-", "")
}

# limits of one request, because a token of it must not take long; typical chains and lists have a dozen members
MAX_CHAIN = 64
MAX_BREAKERS = 256

RANDOM_SEED = -1
"""The seed that requests a random one."""
MAX_SEED = 4096  # characters of a text, digits of a number (Python writes up to 4,300)
_LARGEST_SEED = 10**MAX_SEED


def sampler_names(spec: str | Sequence[str]) -> tuple[str, ...]:
    """Return canonical sampler names from a list of names or a string of letters (`"edskypmxt"`).

    Raises InvalidRequest for an unknown sampler (llama-server drops those silently).
    """
    names = []
    for item in spec:
        name = SAMPLER_LETTERS.get(item) if isinstance(spec, str) else _SAMPLER_ALIASES.get(item.lower())
        if name is None:
            raise InvalidRequest(f"unknown sampler {item!r}; known are {', '.join(KNOWN_SAMPLERS)}")
        names.append(name)
    return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request; defaults are llama.cpp's (`common_params_sampling`)."""

    seed: Seed | None = None
    """Source of the random numbers: an integer or a text, each different. None and -1: a random seed, which the result
    reports. (llama.cpp, whose seeds have 32 bits, treats 4294967295 as -1.)
    """
    temperature: float = 0.8
    """≤ 0 is greedy."""
    top_k: int = 40
    """≤ 0 is the whole vocabulary."""
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_last_n: int = 64
    """Tokens that the penalties look back at; 0: none, -1: the whole sequence."""
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens; -inf bans a token. Ids outside the vocabulary are ignored."""
    ignore_eos: bool = False
    min_keep: int = 0
    """Fewest candidates that top-p, min-p, typical and XTC leave."""
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    """The chain in its order; a sampler listed twice is applied twice. With Mirostat only temperature applies."""

    dynatemp_range: float = 0.0
    """> 0: the temperature is within `temperature ± range`, depending on the entropy of the distribution."""
    dynatemp_exponent: float = 1.0
    top_n_sigma: float = -1.0
    """> 0: keep logits within this many standard deviations of the largest."""
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    """> 0.5: XTC is off."""
    dry_multiplier: float = 0.0
    """0: DRY is off."""
    dry_base: float = 1.75
    """< 1: DRY is off."""
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    """Tokens that DRY looks back at; 0: DRY is off, -1: the whole sequence."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """Texts that no repetition extends across; the first 40 bytes of each count."""
    mirostat: int = 0
    """0, 1 or 2."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    """Target probability of adaptive-p, if `samplers` has it; negative: it only draws."""
    adaptive_decay: float = 0.9

    def validate(self) -> None:
        """Raise InvalidRequest for values that no sampler supports."""
        for name in _NUMBERS:
            value = getattr(self, name)
            if not math.isfinite(value):
                raise InvalidRequest(f"{name} must be a finite number, not {value}")
        if self.repeat_penalty <= 0 or not math.isfinite(1 / self.repeat_penalty):
            raise InvalidRequest(f"repeat_penalty must be greater than 0, not {self.repeat_penalty}")
        for name, low in (
            ("repeat_last_n", -1),
            ("dry_penalty_last_n", -1),
            ("dry_allowed_length", 0),
            ("min_keep", 0),
        ):
            if getattr(self, name) < low:
                raise InvalidRequest(f"{name} must be {low} or more, not {getattr(self, name)}")
        if self.mirostat not in (0, 1, 2):
            raise InvalidRequest(f"mirostat must be 0 (off), 1 or 2, not {self.mirostat}")
        if not 0.0 <= self.adaptive_decay <= 0.99:
            raise InvalidRequest(f"adaptive_decay must be between 0 and 0.99, not {self.adaptive_decay}")
        if len(self.dry_sequence_breakers) > MAX_BREAKERS:
            n = len(self.dry_sequence_breakers)
            raise InvalidRequest(f"dry_sequence_breakers holds {n} texts; at most {MAX_BREAKERS} are possible")
        if isinstance(self.seed, str):
            if len(self.seed) > MAX_SEED:
                raise InvalidRequest(f"seed is a text of {len(self.seed)} characters; at most {MAX_SEED} are possible")
        elif self.seed is not None and abs(self.seed) >= _LARGEST_SEED:
            raise InvalidRequest(f"seed has more than {MAX_SEED} digits")
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise InvalidRequest(f"logit_bias of token {token} must be a number or -inf, not {bias}")
        unknown = set(self.samplers) - set(KNOWN_SAMPLERS)
        if unknown:
            raise InvalidRequest(f"unknown sampler {min(unknown)!r}; known are {', '.join(KNOWN_SAMPLERS)}")
        if len(self.samplers) > MAX_CHAIN:
            raise InvalidRequest(
                f"a chain of {len(self.samplers)} samplers is too long; at most {MAX_CHAIN} are possible"
            )


_NUMBERS = tuple(f.name for f in dataclasses.fields(Sampling) if f.type == "float")
