"""Weights of signals: which signals there are, which selector combines them, and as what text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

#: Signals of the frame at hand. The head needs its file, see head_signal.py.
OF_FRAME = ('gradient', 'colour', 'contrast', 'head')
#: Signals of what is remembered of a camera, see next_frame.py.
REMEMBERED = ('motion', 'entropy', 'grad_cam')

#: What the head may compute in; 'auto' is float16 on CUDA and float32 on a CPU.
HEAD_DTYPES = ('auto', 'float32', 'float16', 'bfloat16', 'int8')

#: Selectors that combine signals by weights, and which ones.
COMBINING = {'saliency': OF_FRAME, 'next_frame': (*OF_FRAME, *REMEMBERED)}


def check_signals(weights: Mapping[str, float], known: Iterable[str]) -> None:
    """
    Refuse signals that there are not, and weights that are none.

    :raises ValueError: one sentence: what was found and what was expected.
    """
    for name, weight in weights.items():
        if name not in known:
            raise ValueError(f"signal '{name}' is not one of {', '.join(known)}")
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f'weight of {name} is {weight:g}; expected a number over 0')


def check_weights(selector: str, weights: Mapping[str, float]) -> None:
    """
    Refuse weights that a selector cannot combine by; none at all are good for every selector.

    :raises ValueError: one sentence: what was found and what was expected.
    """
    if weights and selector not in COMBINING:
        raise ValueError(f"selector '{selector}' combines nothing by weights; expected one of "
                         f"{', '.join(COMBINING)}")
    check_signals(weights, COMBINING.get(selector, ()))


def parse_weights(text: str, selector: str) -> dict[str, float]:
    """
    Read weights such as ``gradient=1,contrast=0.3,motion=1``.

    :param text: '' for what the selector has by default.
    :param selector: that is to combine by them.
    :return: signal to weight, empty for ''.
    :raises ValueError: one sentence, as :func:`check_weights`.
    """
    weights: dict[str, float] = {}
    for part in text.split(',') if text.strip() else ():
        name, equals, number = (word.strip() for word in part.partition('='))
        if not (name and equals):
            raise ValueError(f"'{part.strip()}' of the weights '{text}' is not NAME=NUMBER; "
                             'expected such as gradient=1,contrast=0.3')
        if name in weights:
            raise ValueError(f"the weights '{text}' name {name} twice")
        try:
            weights[name] = float(number)
        except ValueError:
            raise ValueError(f"weight of {name} is '{number}'; expected a number over 0"
                             ) from None
    check_weights(selector, weights)
    return weights
