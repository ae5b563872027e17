"""
What an Orin would need, from efficiencies fitted on published figures.

One efficiency a stage and weight format (share of the peak rate for encoder and prefill, of the
peak bandwidth for decoding), and one time a layer of a decode step, at the full clock, for what
neither roof explains: many small kernels that wait for each other. They are fitted on every other
figure of :data:`~qwen_vl_ros.measure.peers.PEERS` and must reproduce the others within
:data:`TOLERANCE`; a format that fails is refused. What comes out is projected, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from qwen_vl_ros.measure.devices import Device, Mode, find_device
from qwen_vl_ros.measure.peers import DECODERS, ENCODERS, PEERS, Peer
from qwen_vl_ros.measure.roofline import FORMATS, Case, Limit, limit, stages

#: How far a figure that was not fitted may be off.
TOLERANCE = 0.15

#: Most microseconds a layer that the fit looks at.
MOST_LAYER_US = 150

#: (stage, kind of weight format).
Key = tuple[str, str]


class NotValidatedError(ValueError):
    """A projection whose efficiency has not reproduced the published figures."""


@dataclass(frozen=True)
class Fit:
    """
    What was fitted.

    :param efficiency: share of the peak, by stage and weight format.
    :param layer_us: time of a decode step for each layer beside its bytes, at the full clock.
    """

    efficiency: dict[Key, float]
    layer_us: float


def layer_ms(layers: int, layer_us: float, device: Device, mode: Mode) -> float:
    """Return the fixed time of a decode step; it is taken to scale with the GPU's clock."""
    clock = 1300.0 / mode.mhz if device.orin else 1.0
    return layers * layer_us * clock / 1e3


def predict(peer: Peer, fit: Fit) -> float:
    """Return what the model says of a published figure, milliseconds."""
    device, _, mode = find_device(peer.device, peer.mode)
    peak = mode.tflops * 1e9
    if peer.stage == 'token':
        decoder = DECODERS[peer.decoder]
        moved = peer.bytes or decoder.token_bytes(peer.weight_format, peer.tokens)
        share = fit.efficiency['token', peer.weight_format]
        return moved / (share * mode.gb_s * 1e6) + layer_ms(
            decoder.layers, fit.layer_us, device, mode)
    spent = 0.0
    if 'encode' in peer.stage:
        share = fit.efficiency['encode', 'fp16']
        spent += ENCODERS[peer.encoder].flops(peer.patches) / (share * peak)
    if 'prefill' in peer.stage:
        share = fit.efficiency['prefill', peer.weight_format]
        spent += DECODERS[peer.decoder].prefill_flops(peer.tokens) / (share * peak)
    return spent


def deviation(peer: Peer, fit: Fit) -> float:
    """Return predicted over published, less one."""
    return predict(peer, fit) / peer.ms - 1


def key_of(peer: Peer) -> Key:
    """Return the efficiency that a figure tells about."""
    return ('prefill' if peer.stage == 'encode+prefill' else peer.stage, peer.weight_format)


def halves(peers: Iterable[Peer] = PEERS) -> tuple[list[Peer], list[Peer]]:
    """Return the figures in two halves: of each stage and format every other one."""
    first: list[Peer] = []
    second: list[Peer] = []
    seen: dict[Key, int] = {}
    for peer in peers:
        if not peer.excluded:
            number = seen.get(key_of(peer), 0)
            seen[key_of(peer)] = number + 1
            (second if number % 2 else first).append(peer)
    return first, second


def fit_peers(peers: Sequence[Peer]) -> Fit:
    """Return the efficiencies with the least squares of log(predicted / published)."""
    efficiency: dict[Key, float] = {}
    for key in (('encode', 'fp16'), ('prefill', 'fp16'), ('prefill', 'w4')):
        _fit_one(key, peers, Fit(efficiency, 0.0))
    decoding = [p for p in peers if p.stage == 'token']
    formats = list(dict.fromkeys(p.weight_format for p in decoding))

    def loss(layer_us: float) -> float:
        fit = Fit(efficiency, layer_us)
        # The format that the package does not run has no say in the time a layer.
        return sum(_fit_one(('token', name), decoding, fit) for name in formats
                   if name != 'gguf')

    layer_us = min((float(us) for us in range(MOST_LAYER_US + 1)), key=loss)
    fit = Fit(efficiency, layer_us)
    for name in formats:
        _fit_one(('token', name), decoding, fit)
    return fit


def _fit_one(key: Key, peers: Sequence[Peer], fit: Fit) -> float:
    """Set one efficiency of ``fit`` to its best value; return the remaining squares."""
    own = [p for p in peers if key_of(p) == key]

    def loss(share: float) -> float:
        fit.efficiency[key] = share
        return sum(math.log1p(deviation(p, fit)) ** 2 for p in own)

    if not own:
        return 0.0
    share = _minimum(loss, 0.02, 1.0)
    fit.efficiency[key] = share
    return loss(share)


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one valley is least (golden section)."""
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-5:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) < function(right):
            high = right
        else:
            low = left
    return (low + high) / 2


@dataclass(frozen=True)
class Check:
    """
    What became of one stage and weight format.

    :param fitted: figures that the efficiency was fitted on; ``held`` those it was not.
    :param worst: largest deviation among the held ones, as a share; NaN without any.
    :param misses: names of held figures beyond :data:`TOLERANCE`.
    :param spread: largest deviation of any figure, whichever half it was fitted on: how much the
        published figures disagree with one efficiency for all.
    :param spread_at: the figure that deviates so.
    """

    efficiency: float
    fitted: int
    held: int
    worst: float
    misses: tuple[str, ...]
    spread: float
    spread_at: str

    @property
    def good(self) -> bool:
        """Say whether projections of this kind may be printed."""
        return self.held > 0 and not self.misses


@lru_cache
def validated() -> tuple[Fit, dict[Key, Check]]:
    """Return the fit on the first half and how it does on the second."""
    first, second = halves()
    fit, other = fit_peers(first), fit_peers(second)
    checks = {}
    for key, share in fit.efficiency.items():
        held = [p for p in second if key_of(p) == key]
        off = {p.name: deviation(p, fit) for p in held}
        spread = {p.name: abs(deviation(p, f)) for p in (*first, *second) if key_of(p) == key
                  for f in ((fit, other) if key in other.efficiency else (fit,))}
        at = max(spread, key=spread.__getitem__)
        checks[key] = Check(
            share, sum(key_of(p) == key for p in first), len(held),
            max(map(abs, off.values()), default=math.nan),
            tuple(name for name, value in off.items() if abs(value) > TOLERANCE),
            spread[at], at)
    return fit, checks


ASSUMPTIONS = (
    'projected, not measured: no Orin was at hand',
    'efficiencies of published Orin stacks, not of this engine, which may be slower',
    'clocks locked at the mode\'s caps, no throttling, nothing else on the memory bus',
    'patches and upload at their byte limit, hidden or not; no ROS transport',
    'in modes with fewer SMs the full bandwidth is taken to be reachable (not published)',
)


@dataclass(frozen=True)
class Projected:
    """One run of a stage: its limit and the projected time, milliseconds."""

    name: str
    count: int
    limit: Limit
    ms: float
    part_of: str


#: Stages whose efficiency may be given: a share of the peak rate, ``token`` of the bandwidth.
OWN = ('encode', 'prefill', 'token')


def project(case: Case, device: Device, mode: Mode,
            own: Mapping[str, float] | None = None) -> list[Projected]:
    """
    Return each stage's projected time, from published efficiencies (Orin only) or given ones.

    :param own: efficiencies measured elsewhere, by a name of :data:`OWN`; the published ones stand
        in for those left out. One of ``token`` holds the time between kernels already.
    :raises NotValidatedError: for a device that is no Orin without all three, and for weight
        formats whose efficiency did not reproduce the published figures.
    """
    own = own or {}
    if set(own) < set(OWN):
        if not device.orin:
            missing = [name for name in OWN if name not in own]
            raise NotValidatedError(
                f'no efficiencies are published for {device.title}: '
                + (f'--efficiency lacks {" and ".join(missing)}' if own else 'limits only'))
        if case.format == 'fp32':
            raise NotValidatedError('no figure with 32-bit weights is published for an Orin')
    kind = FORMATS[case.format].kind
    # Weights that are widened before a matrix product: fp16 rates hold for 8 bits too.
    keys = {'encode': ('encode', 'fp16'), 'prefill': ('prefill', 'w4' if kind == 'w4' else 'fp16'),
            'token': ('token', kind)}
    fit, checks = validated()
    share = dict(own)
    for name, key in keys.items():
        if name in own:
            continue
        if key not in checks or not checks[key].good:
            raise NotValidatedError(
                f'{key[0]} with {key[1]} weights did not reproduce the published figures within '
                f'{TOLERANCE:.0%}: ' + '; '.join(checks[key].misses if key in checks else ()))
        share[name] = fit.efficiency[key]
    gaps = 0.0 if 'token' in own else layer_ms(
        case.shape.language.layers, fit.layer_us, device, mode)
    belongs = {'projection': 'encode', 'first_token': 'token'}
    out = []
    for stage in stages(case):
        roofs = limit(stage, mode, device.launch_us)
        ms = roofs.ms
        name = belongs.get(stage.name, stage.name)
        if name in share:
            # Decoding alone tells how much of the bandwidth a kernel gets.
            ms = roofs.memory / share['token']
            if name != 'token':
                ms = max(ms, roofs.compute / share[name])
        if stage.name == 'token':
            ms += gaps
        out.append(Projected(stage.name, stage.count, roofs, ms, stage.part_of))
    return out


def total_ms(projected: Iterable[Projected]) -> float:
    """Return the time of a whole answer."""
    return sum(p.ms * p.count for p in projected if not p.part_of)


def peer_rows() -> list[tuple[Peer, str, float]]:
    """Return every figure with its role (fitted, held, excluded) and its deviation."""
    fit, _ = validated()
    first, _ = halves()
    return [(p, 'excluded' if p.excluded else 'fitted' if p in first else 'held',
             deviation(p, fit)) for p in PEERS]
