"""
A board's sensors on one clock: sources, a sampling thread, throttling, and who moved the bytes.

tegrastats, jtop, kernel files and NVML are each optional; what none of them knows is unknown. A
recorded tegrastats log goes through the same code as a live board.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from qwen_vl_ros.measure.nvml import Nvml, UnavailableError
from qwen_vl_ros.measure.samples import Load, Sample, merge
from qwen_vl_ros.measure.sysfs import Sysfs
from qwen_vl_ros.measure.tegrastats import parse

#: Seconds between samples.
PERIOD_S = 0.1

#: Bytes that the memory moves in one clock of the controller, by a part of the module's name:
#: double data rate on 256 or 128 bits.
BYTES_PER_CLOCK = {'AGX Orin': 64, 'Orin NX': 32, 'Orin Nano': 32, 'AGX Xavier': 64,
                   'Xavier NX': 32, 'Thor': 64, 'Nano': 16, 'TX2': 32, 'TX1': 16}


#: Engines that move pictures and tensors through memory, by the start of their names; the audio
#: processor, which is always on and moves next to nothing, is none.
MOVERS = ('NVDLA', 'NVENC', 'NVDEC', 'NVJPG', 'VIC', 'OFA', 'PVA', 'MSENC')


class Source(Protocol):
    """Something that can be asked for a sample; ``read`` never raises."""

    name: str

    def read(self) -> Sample:
        """Return what is known now."""


class Tegrastats:
    """
    The newest line of a running tegrastats.

    :param command: to start; its output is read on a thread.
    :raises UnavailableError: where it cannot be started.
    """

    name = 'tegrastats'

    def __init__(self, command: Sequence[str] = ('tegrastats', '--interval', '100')) -> None:
        if shutil.which(command[0]) is None:
            raise UnavailableError(f'{command[0]} is not on this machine')
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise UnavailableError(f'{command[0]} does not start: {error.strerror}') from None
        self._newest: Sample | None = None
        self._thread = threading.Thread(target=self._follow, name='tegrastats', daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._newest = parse(line, time.monotonic_ns())

    def read(self) -> Sample:
        """Return the newest line's values; a line older than ten periods is not news."""
        newest = self._newest
        age_ns = time.monotonic_ns() - newest.time_ns if newest else 0
        if newest is None or age_ns > 10 * PERIOD_S * 1e9:
            return Sample(whys={'tegrastats': 'silent'})
        return newest

    def close(self) -> None:
        """End the program."""
        self._process.terminate()
        self._process.wait(5)
        self._thread.join(1)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Jtop:
    """
    jetson_stats' service.

    :param make: returns a ``jtop.jtop``; by default that of the installed package.
    :raises UnavailableError: package absent, service stopped, other version, or any other fault.
    """

    name = 'jtop'

    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        try:
            self._jtop: Any = (make or import_module('jtop').jtop)()
            self._jtop.start()
        except ImportError:
            raise UnavailableError('jetson-stats is not installed') from None
        except Exception as error:
            raise UnavailableError(
                f'jtop does not answer: {type(error).__name__}: {error}') from None

    def read(self) -> Sample:
        """Return the service's values; a part that is missing or odd is unknown."""
        j, whys = self._jtop, {}

        def ask(name: str, call: Callable[[], Any]) -> Any:
            try:
                return call()
            except Exception as error:
                whys[name] = f'jtop: {type(error).__name__}: {error}'
                return None

        emc = ask('emc_percent', lambda: j.memory['EMC'])
        ram = ask('ram_used_mb', lambda: j.memory['RAM'])
        gpu = ask('gpu_percent', lambda: next(iter(j.gpu.values())))
        rails = ask('power_mw', lambda: {
            str(k): float(v['power']) for k, v in j.power['rail'].items()}) or {}
        total = ask('power_mw', lambda: float(j.power['tot']['power']))
        warm = ask('temperatures', lambda: {
            str(k).lower(): float(v['temp']) for k, v in j.temperature.items()
            if v.get('online', True) and float(v['temp']) > -256.0}) or {}
        cores = ask('cpu', lambda: tuple(
            Load(None if 'idle' not in c else 100.0 - float(c['idle']),
                 _mhz(c.get('freq')), bool(c.get('online', True))) for c in j.cpu['cpu'])) or ()
        mode = ask('power_mode', lambda: None if j.nvpmodel is None else str(j.nvpmodel))
        clock = ask('gpu_mhz', lambda: _mhz(gpu['freq'])) if gpu else None
        return Sample(
            emc_percent=ask('emc_percent', lambda: float(emc['val'])) if emc else None,
            emc_mhz=ask('emc_mhz', lambda: float(emc['cur']) / 1e3) if emc else None,
            ram_used_mb=ask('ram_used_mb', lambda: ram['used'] / 1024) if ram else None,
            ram_total_mb=ask('ram_total_mb', lambda: ram['tot'] / 1024) if ram else None,
            gpu_percent=ask('gpu_percent', lambda: float(gpu['status']['load'])) if gpu else None,
            gpu_mhz=() if clock is None else (clock,),
            power_mw=rails if total is None else {'total': total, **rails},
            temperatures=warm, cpu=cores, power_mode=mode, whys=whys)

    def close(self) -> None:
        """Leave the service."""
        try:
            self._jtop.close()
        except Exception:
            self._jtop = None


def _mhz(freq: Mapping[str, Any] | None) -> float | None:
    """Return jtop's clock (kHz) in MHz."""
    return None if not freq or freq.get('cur') is None else float(freq['cur']) / 1e3


def find_sources(jtop: bool = True) -> tuple[list[Source], dict[str, str]]:
    """
    Return the sources of this machine, richest first, and why the others are not there.

    :param jtop: ask jetson_stats' service too.
    """
    found: list[Source] = []
    missing: dict[str, str] = {}
    kinds: list[tuple[str, Callable[[], Source]]] = [('tegrastats', Tegrastats), ('nvml', Nvml)]
    if jtop:
        kinds.insert(1, ('jtop', Jtop))
    for name, kind in kinds:
        try:
            found.append(kind())
        except UnavailableError as error:
            missing[name] = str(error)
    found.append(Sysfs())
    return found, missing


class Sampler:
    """
    Asks all sources every 100 ms on one thread, on the monotonic clock.

    :param sources: richest first.
    :param keep: newest samples that are held.
    """

    def __init__(self, sources: Sequence[Source], period_s: float = PERIOD_S,
                 keep: int = 6000) -> None:
        self._sources = sources
        self._period_s = period_s
        self._samples: deque[Sample] = deque(maxlen=keep)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.faults: dict[str, str] = {}

    def start(self) -> None:
        """Begin; once."""
        self._thread = threading.Thread(target=self._run, name='sensors', daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._end.wait(max(0.0, due - time.monotonic())):
            self.sample()
            # A reading that took longer leaves moments out rather than catching up.
            due = max(due + self._period_s, time.monotonic())

    def sample(self) -> Sample:
        """Ask all sources once and keep what they say; a source that fails is named once."""
        parts = []
        now = time.monotonic_ns()
        for source in self._sources:
            try:
                parts.append(source.read())
            except Exception as error:
                self.faults[source.name] = f'{type(error).__name__}: {error}'
        merged = merge(parts, now)
        self._samples.append(merged)
        return merged

    def newest(self) -> Sample | None:
        """Return the newest sample."""
        return self._samples[-1] if self._samples else None

    def between(self, start_ns: int, end_ns: int) -> list[Sample]:
        """Return the samples of a span of time, both ends included."""
        return [s for s in tuple(self._samples) if start_ns <= s.time_ns <= end_ns]

    def close(self) -> None:
        """End thread and sources."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(5)
        for source in self._sources:
            close = getattr(source, 'close', None)
            if close is not None:
                close()


@dataclass
class Throttle:
    """
    Whether a board is too hot or held back, with hysteresis.

    :param warn_c: junction temperature that warns; 0 or less never does.
    :param back_k: so much cooler the warning ends.
    :param hold_ns: so long after the last over-current event its warning ends.
    """

    warn_c: float = 95.0
    back_k: float = 5.0
    hold_ns: int = 10_000_000_000
    hot: bool = False
    _events: int | None = None
    _event_ns: int | None = None

    def update(self, sample: Sample) -> str:
        """Return why the board is throttled or about to be; empty: it is not."""
        reasons = []
        warm = sample.junction_c
        if warm is not None:
            self.hot = self.warn_c > 0 and warm >= self.warn_c - (self.back_k if self.hot else 0)
        if self.hot and warm is not None:
            reasons.append(f'junction at {warm:.1f} degrees, warns at {self.warn_c:g}')
        elif self.hot:
            reasons.append('junction was hot when last read')
        events = sample.over_current
        if events is not None:
            if self._events is not None and events > self._events:
                self._event_ns = sample.time_ns
            self._events = events
        if self._event_ns is not None and sample.time_ns - self._event_ns <= self.hold_ns:
            reasons.append('throttled due to over-current')
        if sample.throttled:
            reasons.append('clocks held back: ' + ', '.join(sample.throttled))
        return '; '.join(reasons)


def bandwidth_gb_s(sample: Sample, bytes_per_clock: int) -> float | None:
    """Return the memory bandwidth in use, 1e9 bytes/s; ``None`` where load or clock is unknown."""
    if sample.emc_percent is None or sample.emc_mhz is None:
        return None
    return sample.emc_percent / 100 * sample.emc_mhz * 1e6 * bytes_per_clock / 1e9


@dataclass(frozen=True)
class Attribution:
    """
    Who moved the bytes of a span of time, 1e9 bytes/s each; ``None`` is unknown.

    :param measured: by the memory controller.
    :param gpu: the engine's own count of its GPU stages, ``cpu`` of its CPU stages.
    :param rest: measured less both: other processes, cameras, display, and what the counts leave
        out. Unknown when the counts exceed the measurement.
    :param peak: of the memory.
    :param engines: of the rest, what the fixed-function engines (DLA, video, JPEG, VIC, OFA, PVA)
        moved: 0 where the board says of all of them that they are off. Nothing counts the bytes of
        one that is on, so that it is unknown then.
    :param engines_on: those that were seen on.
    """

    seconds: float
    measured: float | None
    gpu: float
    cpu: float
    rest: float | None
    peak: float | None
    engines: float | None = None
    engines_on: tuple[str, ...] = ()

    def share(self, part: str) -> float | None:
        """Return a part's share of the peak."""
        value = getattr(self, part)
        return None if value is None or not self.peak else value / self.peak


def attribute(
    samples: Iterable[Sample], spans: Iterable[Any], start_ns: int, end_ns: int,
    bytes_per_clock: int | None, peak_gb_s: float | None = None,
) -> Attribution:
    """
    Divide the measured bandwidth among GPU, CPU and the rest by the engine's byte counts.

    :param samples: of the sensors; those within the span of time count.
    :param spans: :class:`~qwen_vl_ros.measure.timeline.Span` or anything like it; a span that lies
        partly outside counts with its share.
    :param bytes_per_clock: see :data:`BYTES_PER_CLOCK`; ``None`` where the board is unknown.
    :raises ValueError: for a span of time without any length.
    """
    if end_ns <= start_ns:
        raise ValueError('the span of time is empty')
    seconds = (end_ns - start_ns) / 1e9
    moved = {True: 0.0, False: 0.0}
    for span in spans:
        length = span.end_ns - span.start_ns
        inside = min(end_ns, span.end_ns) - max(start_ns, span.start_ns)
        if length > 0 and inside > 0:
            moved[span.stream == 'cpu'] += (span.bytes_read + span.bytes_written) * inside / length
    samples = [s for s in samples if start_ns <= s.time_ns <= end_ns]
    known = [value for s in samples if bytes_per_clock
             for value in [bandwidth_gb_s(s, bytes_per_clock)] if value is not None]
    measured = sum(known) / len(known) if known else None
    gpu, cpu = moved[False] / seconds / 1e9, moved[True] / seconds / 1e9
    rest = None if measured is None or measured < gpu + cpu else measured - gpu - cpu
    states = {(name, load.on) for s in samples for name, load in s.engines.items()
              if name.startswith(MOVERS)}
    on = tuple(sorted({name for name, state in states if state is not False}))
    return Attribution(
        seconds, measured, gpu, cpu, rest, peak_gb_s, 0.0 if states and not on else None, on)


def bytes_per_clock(module: str) -> int | None:
    """Return :data:`BYTES_PER_CLOCK` of a module by its name; ``None`` where it is unknown."""
    return next((n for name, n in BYTES_PER_CLOCK.items() if name in module), None)
