"""Choosing tokens and knowing when to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qwen_vl_ros.engine.errors import EngineError, ErrorCode

#: So many times token 0 in a row is what a model whose numbers broke down says ("!!!!").
ZERO_RUN = 16


@dataclass(frozen=True)
class Sampling:
    """
    How a token is chosen from logits.

    :param temperature: 0 is greedy.
    :param top_k: keep the k most probable; 0 is off.
    :param top_p: then keep the fewest whose probabilities reach p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Choice:
    """
    One chosen token.

    :param probability: of the token under the model's own distribution (temperature 1).
    :param margin: logit distance of the best and the second-best token.
    :param finite: whether all logits were finite.
    :param launched_ns: when its step was launched, by the host's monotonic clock; 0 where that is
        when it was asked for.
    :param ended_ns: when its step had ended on the device, by the same clock; 0 where that is when
        it was returned.
    """

    token: int
    probability: float
    margin: float
    finite: bool
    launched_ns: int = field(default=0, compare=False)
    ended_ns: int = field(default=0, compare=False)


def choose(
    logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None,
    allowed: Tensor | None = None,
) -> Choice:
    """
    Choose the next token; one transfer to the host, which waits for it.

    :param logits: [vocab], any float dtype.
    :param generator: of the logits' device; not used when greedy.
    :param allowed: bool [vocab], tokens that a grammar permits; ``None`` permits all.
    """
    return choice_of(choice_row(logits, sampling, generator, allowed))


def choice_of(row: Tensor) -> Choice:
    """Read what :func:`choice_row` gave."""
    token, probability, margin, finite = row.tolist()
    return Choice(int(token), probability, margin, bool(finite))


def choice_row(
    logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """
    Choose the next token and leave it on the device; parameters as for :func:`choose`.

    :return: float64 [4]: the fields of a :class:`Choice`.
    """
    wide = logits.float()
    finite = torch.isfinite(wide).all()
    if allowed is not None:
        wide = wide.masked_fill(~allowed, -torch.inf)
    best = wide.topk(2)
    if sampling.temperature == 0:
        token = best.indices[:1]
    else:
        # A broken row must reach the caller as such, not as an error of the sampler.
        probabilities = torch.where(finite, _distribution(wide, sampling), 1.0)
        token = torch.multinomial(probabilities, 1, generator=generator)
    # By gather: a token as an index would have to come to the host first.
    probability = (wide.gather(0, token) - wide.logsumexp(0)).exp()
    return torch.stack((token[0].double(), probability[0].double(),
                        (best.values[0] - best.values[1]).double(), finite.double()))


def _distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return probabilities [vocab] after temperature, then top-k, then top-p (as transformers)."""
    x = logits / sampling.temperature
    if 0 < sampling.top_k < x.numel():
        x = x.masked_fill(x < x.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = x.sort()
        drop = ordered.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        drop[-1] = False
        x = x.masked_fill(torch.zeros_like(drop).scatter(0, index, drop), -torch.inf)
    return x.softmax(-1)


def repeats(ids: list[int], window: int, longest: int = 64) -> bool:
    """
    Tell whether the answer runs in a circle.

    True when its tail of ``window`` tokens (three rounds, if that is longer) is one cycle of at
    most ``longest`` tokens said over and over.

    :param window: 0 switches the guard off.
    """
    for period in range(1, longest + 1 if window else 0):
        span = max(window, 3 * period)
        if span > len(ids):
            break
        if ids[-1] == ids[-1 - period] and ids[-span:-period] == ids[period - span:]:
            return True
    return False


@dataclass
class Generated:
    """What a generation has come to; filled in while it runs."""

    ids: list[int] = field(default_factory=list)
    reason: str = ''
    probability_sum: float = 0.0
    margin: float = float('nan')

    @property
    def confidence(self) -> float:
        """Return the mean probability of the chosen tokens, NaN without any."""
        return self.probability_sum / len(self.ids) if self.ids else float('nan')


class Acceptor:
    """
    Takes the choices of one answer and says which tokens became certain and when it has ended.

    Runs of token 0 are held back until another token follows, so that a breakdown leaves no text.

    :param state: ids, reason and statistics; filled in.
    :param end_tokens: ids that end the answer; not part of it.
    :param most: tokens at most, at least 1.
    :param repetition_window: see :func:`repeats`.
    """

    def __init__(
        self, state: Generated, end_tokens: frozenset[int], most: int, repetition_window: int,
    ) -> None:
        self.state = state
        self.most = most
        self._end_tokens = end_tokens
        self._window = repetition_window
        self._held: list[int] = []

    def take(self, choice: Choice) -> list[int]:
        """
        Count a choice in; ``state.reason`` is set when it was the last.

        :return: tokens that became certain, maybe none.
        :raises EngineError: NUMERICAL for logits that are not finite or :data:`ZERO_RUN` zeros.
        """
        state = self.state
        if not choice.finite:
            raise EngineError(
                ErrorCode.NUMERICAL,
                f'numerical failure: logits are not finite at token {len(state.ids)}; '
                'use bfloat16 or float32')
        if not state.ids:
            state.margin = choice.margin
        if choice.token in self._end_tokens:
            state.reason = 'stop'
            return self.rest()
        state.ids.append(choice.token)
        state.probability_sum += choice.probability
        self._held.append(choice.token)
        certain: list[int] = []
        if choice.token != 0:
            certain = self.rest()
        elif len(self._held) >= ZERO_RUN:
            raise EngineError(
                ErrorCode.NUMERICAL,
                f'numerical failure: token 0 came {ZERO_RUN} times in a row')
        if len(state.ids) >= self.most:
            state.reason = 'length'
        elif repeats(state.ids, self._window):
            state.reason = 'repetition'
        return certain

    def rest(self) -> list[int]:
        """Return the tokens still held back."""
        held, self._held = self._held, []
        return held


def generate(
    next_choice: Callable[[int | None], Choice],
    state: Generated,
    *,
    end_tokens: frozenset[int],
    most: int,
    repetition_window: int,
    stop: Callable[[], str],
) -> Iterator[list[int]]:
    """
    Yield tokens as they become certain; one of the finish reasons is in ``state`` at the end.

    :param next_choice: computes the next token after the given one (``None``: from the prompt).
    :param state: ids, reason and statistics.
    :param end_tokens: see :class:`Acceptor`, as ``most`` and ``repetition_window``.
    :param stop: polled before every token; a finish reason, or '' to go on.
    :raises EngineError: NUMERICAL, see :meth:`Acceptor.take`.
    """
    acceptor = Acceptor(state, end_tokens, most, repetition_window)
    last: int | None = None
    state.reason = ''
    while not state.reason:
        state.reason = stop()
        if not state.reason:
            choice = next_choice(last)
            last = choice.token
            certain = acceptor.take(choice)
            if certain:
                yield certain
    held = acceptor.rest()
    if held:
        yield held
