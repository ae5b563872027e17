"""What a run produced, as one JSON document: answers, where their time went, on what machine."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from qwen_vl_ros import __version__
from qwen_vl_ros.engine.types import Answer
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import STAGES

#: Grows when a field of report.json changes its meaning.
FORMAT_VERSION = 1

#: Longest side of a picture in report.html, pixels.
PICTURE_SIDE = 480


@dataclass(frozen=True)
class Shown:
    """
    A frame that a question looked at, as the report keeps it: without the camera's buffer.

    :param jpeg: a small copy, a JPEG file.
    """

    camera: str
    stamp_ns: int
    frame_id: str
    encoding: str
    width: int
    height: int
    jpeg: bytes = field(repr=False)

    @classmethod
    def of(cls, frame: Frame) -> Shown:
        """Note a frame and make its small copy."""
        return cls(frame.camera, frame.stamp_ns, frame.frame_id, frame.encoding, frame.width,
                   frame.height, thumbnail(frame))


@dataclass
class Exchange:
    """
    One question with what came of it.

    :param question: the user's words.
    :param time_ns: when it was asked: the bag's time, or 0 for picture files.
    :param frames: the newest frame of each visual.
    :param answer: ``None`` where the request failed.
    :param error_code: name of an :class:`~qwen_vl_ros.engine.errors.ErrorCode`; ``''`` is none.
    :param error: the reason, for a person.
    :param expected: the right answer where it is known.
    :param timeline: :meth:`Timeline.to_dict` of the request.
    """

    question: str
    time_ns: int = 0
    frames: tuple[Shown, ...] = ()
    answer: Answer | None = None
    error_code: str = ''
    error: str = ''
    expected: str | None = None
    timeline: dict[str, Any] = field(default_factory=dict)

    @property
    def correct(self) -> bool | None:
        """Say whether the answer is the expected one; ``None`` where none is known."""
        if self.expected is None:
            return None
        return self.answer is not None and normalised(self.answer.text) == normalised(
            self.expected)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data, pictures left out."""
        answer = self.answer
        out: dict[str, Any] = {
            'question': self.question,
            'time_ns': self.time_ns,
            'frames': [{
                'camera': f.camera, 'stamp_ns': f.stamp_ns, 'frame_id': f.frame_id,
                'encoding': f.encoding, 'width': f.width, 'height': f.height,
            } for f in self.frames],
            'text': answer.text if answer else '',
            'finish_reason': answer.finish_reason if answer else 'error',
            'error_code': self.error_code,
            'error': self.error,
        }
        if answer:
            out |= {
                'confidence': _number(answer.confidence),
                'vision_tokens_in': answer.vision_tokens_in,
                'vision_tokens_kept': answer.vision_tokens_kept,
                'prompt_tokens': answer.prompt_tokens,
                'output_tokens': len(answer.token_ids),
                'total_ms': round(answer.timeline.total_ms(), 3),
                'time_to_first_token_ms': _number(answer.timeline.time_to_first_token_ms()),
            }
        if self.expected is not None:
            out |= {'expected': self.expected, 'correct': self.correct}
        out['timeline'] = self.timeline
        return out


def normalised(text: str) -> str:
    """Return a text as answers are compared: lower case, single spaces, no full stop."""
    return ' '.join(text.lower().split()).rstrip('.').strip()


def thumbnail(frame: Frame, side: int = PICTURE_SIDE) -> bytes:
    """Return a frame as a JPEG file whose longest side is at most ``side`` pixels."""
    rgb = frame.rgb()
    scale = side / max(rgb.shape[:2])
    if scale < 1:
        size = (max(1, round(frame.width * scale)), max(1, round(frame.height * scale)))
        rgb = cv2.resize(rgb, size, interpolation=cv2.INTER_AREA)
    import simplejpeg  # for reports alone: figures are had without it

    return simplejpeg.encode_jpeg(np.ascontiguousarray(rgb), 85)


def _number(value: float) -> float | None:
    """Return a number that JSON has; NaN and infinity become null."""
    return round(value, 4) if math.isfinite(value) else None


def stage_table(exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
    """
    Sum up the stages over all answers.

    :return: one row a stage, in the order of :data:`STAGES`: ``calls``, then over the answers that
        had it ``mean_ms``, ``p50_ms``, ``p95_ms`` and ``max_ms`` of its time in one answer;
        ``gb_per_s`` and ``gflop_per_s`` where bytes and FLOPs are known (else null).
    """
    per_answer: dict[str, list[float]] = {}
    totals: dict[str, dict[str, float]] = {}
    for exchange in exchanges:
        sums: dict[str, float] = {}
        for span in exchange.timeline.get('spans', ()):
            name = span['name']
            sums[name] = sums.get(name, 0.0) + span['ms']
            total = totals.setdefault(name, {'calls': 0, 'ms': 0, 'bytes': 0, 'flops': 0})
            total['calls'] += 1
            total['ms'] += span['ms']
            total['bytes'] += span['bytes_read'] + span['bytes_written']
            total['flops'] += span['flops']
        for name, ms in sums.items():
            per_answer.setdefault(name, []).append(ms)
    rows = []
    for name in sorted(per_answer, key=lambda n: STAGES.index(n) if n in STAGES else 99):
        values, total = np.array(per_answer[name]), totals[name]
        seconds = total['ms'] / 1e3
        rows.append({
            'stage': name,
            'calls': int(total['calls']),
            'mean_ms': round(float(values.mean()), 4),
            'p50_ms': round(float(np.percentile(values, 50)), 4),
            'p95_ms': round(float(np.percentile(values, 95)), 4),
            'max_ms': round(float(values.max()), 4),
            'gb_per_s': _number(total['bytes'] / seconds / 1e9) if (
                seconds and total['bytes']) else None,
            'gflop_per_s': _number(total['flops'] / seconds / 1e9) if (
                seconds and total['flops']) else None,
        })
    return rows


def summary(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Return the figures that stand above the table; rates are over the time of the answers."""
    answers = [e.answer for e in exchanges if e.answer]
    totals = np.array([a.timeline.total_ms() for a in answers])
    firsts = np.array([a.timeline.time_to_first_token_ms() for a in answers])
    firsts = firsts[np.isfinite(firsts)]
    spans = [s for e in exchanges for s in e.timeline.get('spans', ()) if s['name'] == 'token']
    token_ms = sum(s['ms'] for s in spans)
    # A question about a picture that was encoded for an earlier one costs far less.
    fresh = np.array([any(s['name'] == 'encode' for s in e.timeline.get('spans', ()))
                      for e in exchanges if e.answer], bool)
    out: dict[str, Any] = {
        'questions': len(exchanges),
        'answered': len(answers),
        'failed': len(exchanges) - len(answers),
        'total_ms_p50': _percentile(totals, 50),
        'total_ms_p95': _percentile(totals, 95),
        'total_ms_new_picture_p50': _percentile(totals[fresh], 50),
        'total_ms_same_picture_p50': _percentile(totals[~fresh], 50),
        'time_to_first_token_ms_p50': _percentile(firsts, 50),
        'answers_per_s': _number(len(answers) / totals.sum() * 1e3) if totals.sum() else None,
        'decode_tokens_per_s': _number(len(spans) / token_ms * 1e3) if token_ms else None,
        'vision_tokens_in': sum(a.vision_tokens_in for a in answers),
        'vision_tokens_kept': sum(a.vision_tokens_kept for a in answers),
        'output_tokens': sum(len(a.token_ids) for a in answers),
    }
    known = [e.correct for e in exchanges if e.correct is not None]
    if known:
        out |= {'with_known_answer': len(known), 'correct': sum(known)}
    return out


def _percentile(values: np.ndarray, q: float) -> float | None:
    return _number(float(np.percentile(values, q))) if values.size else None


def machine() -> dict[str, Any]:
    """Return what a reader must know to compare two runs."""
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path('/proc/cpuinfo')
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding='utf-8', errors='replace').splitlines():
            if line.startswith('model name'):
                name = line.split(':', 1)[1].strip()
                break
    return {
        'cpu': name,
        'cpus': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity')
        else os.cpu_count(),
        'torch_threads': torch.get_num_threads(),
        'gpu': torch.cuda.get_device_name(0) if torch.cuda.is_available() else '',
        'system': f'{platform.system()} {platform.machine()}',
        'python': platform.python_version(),
        'torch': torch.__version__,
    }


def commit() -> str:
    """Return the source tree's commit, with ``+`` when files differ from it; ``''`` if unknown."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(['git', 'rev-parse', '--short=12', 'HEAD'], cwd=here, timeout=5,
                              capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(['git', 'status', '--porcelain', '-uno'], cwd=here, timeout=5,
                                 capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ''
    return head + ('+' if changed else '')


def build_report(
    title: str, exchanges: Sequence[Exchange], *, model: dict[str, Any], source: dict[str, Any],
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """
    Put the document together.

    :param title: one line, for people.
    :param model: the engine's ModelInfo as a dict.
    :param source: what was looked at: bag, topics, counts.
    :param options: what the run was asked for.
    :return: JSON-ready data.
    """
    return {
        'format': 'qwen_vl_ros.report',
        'format_version': FORMAT_VERSION,
        'title': title,
        'kind': 'measured',
        'product_version': __version__,
        'commit': commit(),
        'command': [Path(sys.argv[0]).name, *sys.argv[1:]],
        'machine': machine(),
        'model': model,
        'source': source,
        'options': options or {},
        'summary': summary(exchanges),
        'stages': stage_table(exchanges),
        'exchanges': [e.to_dict() for e in exchanges],
    }


def load_report(path: str | Path) -> dict[str, Any]:
    """
    Read a report.json, or that of a folder.

    :raises ValueError: when it is none; the message names path and reason.
    """
    path = Path(path)
    if path.is_dir():
        path = path / 'report.json'
    try:
        data = json.loads(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise ValueError(f'{path} cannot be read: {error.strerror}') from None
    except ValueError:
        raise ValueError(f'{path} does not hold JSON') from None
    if not isinstance(data, dict) or data.get('format') != 'qwen_vl_ros.report':
        raise ValueError(f'{path} is no report of qwen_vl')
    if data.get('format_version') != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {data.get('format_version')}; "
                         f'this program reads {FORMAT_VERSION}')
    return data


def write_report(
    folder: str | Path, report: dict[str, Any], exchanges: Sequence[Exchange],
) -> tuple[Path, Path]:
    """
    Write report.json and report.html.

    :param folder: made where it is missing.
    :param exchanges: those of the report, for their pictures.
    :return: both paths.
    """
    from qwen_vl_ros.measure.report_html import render

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    json_path, html_path = folder / 'report.json', folder / 'report.html'
    json_path.write_text(
        json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + '\n',
        encoding='utf-8')
    pictures = [[f.jpeg for f in e.frames] for e in exchanges]
    html_path.write_text(render(report, pictures), encoding='utf-8')
    return json_path, html_path


def format_stages(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of stages for a terminal."""
    lines = [f'{"stage":<16}{"calls":>7}{"mean ms":>11}{"p50 ms":>11}{"p95 ms":>11}'
             f'{"max ms":>11}{"GB/s":>9}{"GFLOP/s":>10}']
    for row in rows:
        lines.append(
            f'{row["stage"]:<16}{row["calls"]:>7}{row["mean_ms"]:>11.2f}{row["p50_ms"]:>11.2f}'
            f'{row["p95_ms"]:>11.2f}{row["max_ms"]:>11.2f}{_cell(row["gb_per_s"]):>9}'
            f'{_cell(row["gflop_per_s"]):>10}')
    return '\n'.join(lines)


def _cell(value: float | None) -> str:
    return '-' if value is None else f'{value:.1f}'
