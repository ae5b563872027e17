"""
Copies between two GPUs: what a direct link gives over the way through the host.

A grid of transfer size, way, streams, chunks and direction is measured; everything after that is
arithmetic on the measurements: latency and bandwidth of each way, the link's contribution, which
parameter matters (analysis of variance), and a table of the best setting by size.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: 4 KB to 1 GB.
SIZES = tuple(4096 * 4 ** i for i in range(10))

#: How bytes go: by the peer's memory, or through a host buffer that is pinned or not.
WAYS = ('direct', 'staged pinned', 'staged pageable')

FACTORS = ('size', 'way', 'streams', 'chunks', 'both')


@dataclass(frozen=True)
class Setting:
    """
    One point of the grid.

    :param size: bytes of a transfer.
    :param way: one of :data:`WAYS`.
    :param streams: that share the transfer.
    :param chunks: pieces that it is cut into.
    :param both: the same transfer runs the other way at the same time.
    """

    size: int
    way: str = 'direct'
    streams: int = 1
    chunks: int = 1
    both: bool = False


@dataclass(frozen=True)
class Measured:
    """A setting with the milliseconds of each run, from issue to arrival."""

    setting: Setting
    times: tuple[float, ...]

    @property
    def ms(self) -> float:
        """Return the median."""
        return statistics.median(self.times)

    @property
    def gb_s(self) -> float:
        """Return the bandwidth, both directions added, 1e9 bytes/s."""
        return self.setting.size * (2 if self.setting.both else 1) / self.ms / 1e6


def grid(sizes: Sequence[int] = SIZES, ways: Sequence[str] = WAYS,
         streams: Sequence[int] = (1, 2, 4), chunks: Sequence[int] = (1, 4, 16)
         ) -> Iterator[Setting]:
    """Yield every combination; one that cannot be cut so finely is left to the smallest cut."""
    for values in itertools.product(sizes, ways, streams, chunks, (False, True)):
        yield Setting(*values)


def measure(settings: Iterable[Setting], time_one: Callable[[Setting], float], runs: int = 5,
            on_done: Callable[[Measured], None] = lambda measured: None) -> list[Measured]:
    """
    Time every setting, after one run that does not count.

    :param time_one: runs a setting and returns its milliseconds.
    """
    out = []
    for setting in settings:
        time_one(setting)
        out.append(Measured(setting, tuple(time_one(setting) for _ in range(runs))))
        on_done(out[-1])
    return out


@dataclass(frozen=True)
class Way:
    """
    Latency (microseconds) and bandwidth (1e9 bytes/s) by ``time = latency + size / bandwidth``.

    :param error: root mean square of the relative error of that law.
    """

    latency_us: float
    gb_s: float
    error: float


def fit_path(measured: Iterable[Measured]) -> Way:
    """
    Return latency and bandwidth of transfers of different sizes (weighted least squares).

    Errors are weighed relative to the time, or the largest transfers alone would count.

    :raises ValueError: for fewer than two sizes.
    """
    points = [(m.setting.size * (2 if m.setting.both else 1), m.ms) for m in measured]
    if len({size for size, _ in points}) < 2:
        raise ValueError('a latency and a bandwidth need at least two sizes')
    # Minimise sum of ((a + b * size) / ms - 1)^2: linear in a and b.
    u = [(1 / ms, size / ms) for size, ms in points]
    aa, ab, bb = (sum(x[i] * x[j] for x in u) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = sum(x[0] for x in u), sum(x[1] for x in u)
    det = aa * bb - ab * ab
    a, b = (a1 * bb - b1 * ab) / det, (aa * b1 - ab * a1) / det
    if a < 0:
        a, b = 0.0, b1 / bb
    error = math.sqrt(sum(((a + b * s) / ms - 1) ** 2 for s, ms in points) / len(points))
    return Way(a * 1e3, 1 / b / 1e6 if b > 0 else math.inf, error)


def contribution(direct_gb_s: float, host_gb_s: float, communication: float) -> float:
    """
    Return the source's contribution rate of the link.

    eta = B_link / (B_link + B_host) * alpha: its share of the bandwidth of both ways, times the
    share of the time that is communication at all.

    :param communication: alpha, measured, 0 to 1.
    """
    if not 0 <= communication <= 1:
        raise ValueError(f'the share of communication is {communication}; expected 0 to 1')
    return direct_gb_s / (direct_gb_s + host_gb_s) * communication


def communication_share(transfer_ms: float, compute_ms: float) -> float:
    """Return alpha of a hand-over: the transfer's share of transfer and computation."""
    return transfer_ms / (transfer_ms + compute_ms)


@dataclass(frozen=True)
class Sensitivity:
    """
    How much of the variance of log(time) a factor explains.

    :param alone: first-order Sobol index: the factor by itself.
    :param total: total index: with all its interactions.
    """

    factor: str
    alone: float
    total: float


def sensitivity(measured: Sequence[Measured], factors: Sequence[str] = FACTORS,
                response: Callable[[Measured], float] = lambda m: math.log(m.ms)
                ) -> tuple[list[Sensitivity], float]:
    """
    Rank the factors of a full grid by variance (functional ANOVA; on a full grid with equal
    weights these are the Sobol indices, exactly).

    :return: the ranking by total index, and the share of variance that runs of one setting have
        among themselves (noise).
    :raises ValueError: when the settings are no full grid.
    """
    cells = {tuple(getattr(m.setting, f) for f in factors): response(m) for m in measured}
    levels = [sorted({key[i] for key in cells}, key=str) for i in range(len(factors))]
    if len(cells) != math.prod(map(len, levels)) or len(cells) != len(measured):
        raise ValueError('the measured settings are no full grid of the factors')
    variance = statistics.pvariance(cells.values())
    runs = [statistics.pvariance([math.log(t) for t in m.times]) for m in measured]
    out = []
    for i, factor in enumerate(factors):
        by_level: dict[Any, list[float]] = {}
        by_rest: dict[Any, list[float]] = {}
        for key, value in cells.items():
            by_level.setdefault(key[i], []).append(value)
            by_rest.setdefault(key[:i] + key[i + 1:], []).append(value)
        main = statistics.pvariance([statistics.fmean(v) for v in by_level.values()])
        rest = statistics.pvariance([statistics.fmean(v) for v in by_rest.values()]) if (
            len(by_rest) > 1) else 0.0
        out.append(Sensitivity(
            factor, main / variance if variance else 0.0,
            (variance - rest) / variance if variance else 0.0))
    whole = variance + statistics.fmean(runs)
    return sorted(out, key=lambda s: -s.total), statistics.fmean(runs) / whole if whole else 0.0


def tuning(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    """
    Return the fastest setting for each size and direction, sizes ascending.

    Among settings within 3 % of the fastest the one with fewer streams and chunks is taken: what
    the noise decides should cost nothing.
    """
    groups: dict[tuple[bool, int], list[Measured]] = {}
    for m in measured:
        groups.setdefault((m.setting.both, m.setting.size), []).append(m)
    out = []
    for (both, size), group in sorted(groups.items()):
        best = min(m.ms for m in group)
        chosen = min((m for m in group if m.ms <= 1.03 * best), key=lambda m: (
            m.setting.streams * m.setting.chunks, m.ms))
        s = chosen.setting
        out.append({'both': both, 'size': size, 'way': s.way, 'streams': s.streams,
                    'chunks': s.chunks, 'ms': chosen.ms, 'gb_s': chosen.gb_s})
    return out


def choose(table: Sequence[dict[str, Any]], size: int, both: bool = False) -> Setting:
    """
    Return the setting for a transfer: that of the nearest measured size (by ratio).

    :param table: of :func:`tuning`.
    :raises ValueError: for a table without that direction.
    """
    rows = [row for row in table if row['both'] == both]
    if not rows:
        raise ValueError('the tuning table has no row of this direction')
    row = min(rows, key=lambda r: abs(math.log(r['size'] / max(1, size))))
    return Setting(size, row['way'], row['streams'], row['chunks'], both)


def load_tuning(path: Path) -> list[dict[str, Any]]:
    """
    Read the tuning table of a file that ``qwen_vl interconnect --json`` wrote.

    :raises ValueError: names the file and what is wrong with it.
    """
    try:
        data = json.loads(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise ValueError(f'{path} cannot be read: {error.strerror}') from None
    except ValueError:
        raise ValueError(f'{path} does not hold JSON') from None
    rows = data.get('tuning') if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(
            isinstance(r, dict) and r.keys() >= {'both', 'size', 'way', 'streams', 'chunks'}
            for r in rows):
        raise ValueError(f"{path} holds no table 'tuning'")
    for number, row in enumerate(rows):
        for name, good, wanted in (
                ('both', isinstance(row['both'], bool), 'true or false'),
                ('way', row['way'] in WAYS, ' or '.join(WAYS)),
                *((name, type(row[name]) is int and 1 <= row[name] <= most, f'1 to {most}')
                  for name, most in (('size', 1 << 50), ('streams', 1024), ('chunks', 1 << 20)))):
            if not good:
                raise ValueError(f"{path}: row {number} of 'tuning' has {name} "
                                 f'{str(row[name])[:40]!r}; expected {wanted}')
    return rows


def analyse(measured: Sequence[Measured], transfer_bytes: int, compute_ms: float
            ) -> dict[str, Any]:
    """
    Return all that the measurements say, JSON-ready.

    :param transfer_bytes: of the hand-over from encoder to decoder.
    :param compute_ms: what the GPUs compute for it.
    """
    ways = {}
    for both in (False, True):
        for way in WAYS:
            own = [m for m in measured if m.setting.way == way and m.setting.both == both
                   and m.setting.streams == 1 and m.setting.chunks == 1]
            ways[f'{way}, {"both ways" if both else "one way"}'] = asdict(fit_path(own))
    table = tuning(measured)
    direct, host = ways['direct, one way'], ways['staged pinned, one way']
    transfer_ms = direct['latency_us'] / 1e3 + transfer_bytes / direct['gb_s'] / 1e6
    alpha = communication_share(transfer_ms, compute_ms)
    ranking, noise = sensitivity(measured)
    return {
        'ways': ways, 'tuning': table,
        'hand_over': {'bytes': transfer_bytes, 'direct_ms': transfer_ms,
                      'host_ms': host['latency_us'] / 1e3 + transfer_bytes / host['gb_s'] / 1e6,
                      'compute_ms': compute_ms, 'communication_share': alpha},
        'contribution': contribution(direct['gb_s'], host['gb_s'], alpha),
        'sensitivity': [asdict(s) for s in ranking], 'noise': noise,
        'measurements': [asdict(m.setting) | {'ms': m.ms, 'gb_s': m.gb_s,
                                              'times': list(m.times)} for m in measured]}
