"""The board's sensors beside a run, and what they say about where its bytes and watts went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from qwen_vl_ros.measure.jetson import (
    Sampler,
    Source,
    Throttle,
    attribute,
    bytes_per_clock,
    find_sources,
)
from qwen_vl_ros.measure.samples import Sample
from qwen_vl_ros.measure.sysfs import read
from qwen_vl_ros.measure.timeline import Span


class Watch:
    """
    Samples from its making until :meth:`stop`.

    :param sources: of the sensors; by default all that this machine has.
    :param module: the board's name; by default this machine's.
    """

    def __init__(self, sources: Sequence[Source] | None = None, module: str | None = None) -> None:
        self._missing: dict[str, str] = {}
        if sources is None:
            sources, self._missing = find_sources()
        if module is None:
            module = read(Path('/'), ['proc/device-tree/model'])[0] or ''
        self.module = module
        self._sampler = Sampler(sources)
        self._start_ns = time.monotonic_ns()
        self._end_ns = 0
        self._sampler.start()

    def stop(self) -> None:
        """End sampling."""
        self._end_ns = time.monotonic_ns()
        self._sampler.close()

    @property
    def samples(self) -> list[Sample]:
        """Return the samples, which also fit into a trace of the same run."""
        return self._sampler.between(self._start_ns, self._end_ns or time.monotonic_ns())

    def report(self, spans: Iterable[Span]) -> dict[str, Any]:
        """
        Return means over the run, JSON-ready; what was not measured is null, with the reason.

        :param spans: of all timelines of the run.
        """
        samples = self.samples
        width = bytes_per_clock(self.module)
        # The peak is that of the highest clock seen: a mode that caps it caps the peak too.
        clocks = [s.emc_mhz for s in samples if s.emc_mhz]
        peak = max(clocks) * 1e6 * width / 1e9 if clocks and width else None
        moved = attribute(samples, spans, self._start_ns, self._end_ns, width, peak)
        throttle = Throttle()
        reasons = list(dict.fromkeys(r for s in samples if (r := throttle.update(s))))
        whys = dict(self._missing)
        for sample in samples:
            whys |= sample.whys
        return {
            'module': self.module, 'samples': len(samples), 'bandwidth': asdict(moved) | {
                f'{part}_share': moved.share(part) for part in ('measured', 'gpu', 'cpu', 'rest')},
            'gpu_percent': _mean(s.gpu_percent for s in samples),
            'emc_percent': _mean(s.emc_percent for s in samples),
            'power_w': _mean(None if s.total_mw is None else s.total_mw / 1e3 for s in samples),
            'junction_c_max': max((s.junction_c for s in samples if s.junction_c is not None),
                                  default=None),
            'power_mode': next((s.power_mode for s in samples if s.power_mode), None),
            'throttled': reasons, 'unknown': whys}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def format_report(report: dict[str, Any]) -> str:
    """Return a report of :meth:`Watch.report` as two or three lines."""
    moved = report['bandwidth']

    def rate(part: str) -> str:
        if moved[part] is None:
            return 'unknown'
        share = moved[f'{part}_share']
        return f'{moved[part]:.2f} GB/s' + ('' if share is None else f' ({share:.0%} of the peak)')

    def show(name: str, unit: str) -> str:
        value = report[name]
        return 'unknown' if value is None else f'{value:.1f} {unit}'

    engines = moved['engines']
    on = ', '.join(moved['engines_on'])
    inside = ('engines such as DLA and video unknown' + (f' ({on} on)' if on else '')
              if engines is None else 'no DLA or video engine on')
    lines = [f'memory  {rate("measured")} in all: GPU stages {rate("gpu")}, CPU stages '
             f'{rate("cpu")}, the rest {rate("rest")} (stages by their own byte counts; of the '
             f'rest: {inside})',
             f'board   GPU load {show("gpu_percent", "%")}, power {show("power_w", "W")}, '
             f'junction at most {show("junction_c_max", "C")}, '
             f'mode {report["power_mode"] or "unknown"}']
    if report['throttled']:
        lines.append('throttled: ' + '; '.join(report['throttled']))
    return '\n'.join(lines)
