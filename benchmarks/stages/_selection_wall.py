"""Wall time of answers under every method, one at a time, as a robot asks the engine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.records import Record, median, record
from benchmarks.stages._selection_ways import Way, ways
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Answer, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.roboscene.evaluate import earlier, frames_of, say
from qwen_vl_ros.roboscene.items import Item, items
from qwen_vl_ros.saliency.head import SaliencyHead
from qwen_vl_ros.saliency.head_signal import HeadSignal
from qwen_vl_ros.share import share

#: Answers before those that are timed: graphs are captured and products chosen.
WARM = 5


def wall(args: argparse.Namespace, head: Path) -> list[Record]:
    """
    Time answers about stills with all tokens, and with 72 of 192 by every method.

    One engine, which forgets pictures and prompts after every answer.

    :param head: file of the light head.
    """
    folder = share('models', 'tiny')
    drawn = list(items('attribute', 'test', max(1, args.wall)))
    found = net_ms(head, args.device)
    engine = Engine.load(str(folder), device=args.device)
    shown = Shown(drawn)
    whole = 0.0
    for method, way in ways(engine, folder, head).items():
        timed = _timed(engine, way, shown, args.wall)
        case = {'model': 'tiny', 'method': method, 'kept': round(median(timed.kept)),
                'dtype': engine.info.dtype}
        whole = whole or median(timed.total)
        found.append(record('selection', case, 'ms_per_answer', median(timed.total), 'ms',
                            times=timed.total, baseline=('all tokens', whole)))
        if method not in ('full', 'downsample'):
            found.append(record('selection', case, 'ms_select', median(timed.select), 'ms',
                                times=timed.select,
                                share_of_whole_frame=median(timed.select) / whole))
        if way.reflects:
            found.append(record(
                'selection', case, 'ms_reflect', median(timed.reflect), 'ms', times=timed.reflect,
                note='what is worked out of the last answer, while nobody waits'))
    engine.close()
    return found


class Shown:
    """
    Pictures of items and of the moment before each, rendered once.

    :param drawn: stills.
    """

    def __init__(self, drawn: list[Item]) -> None:
        self.items = drawn
        self._now = [frames_of(item)[0].rgb() for item in drawn]
        self._before = [frames_of(earlier(item))[0].rgb() for item in drawn]

    def frame(self, number: int, before: bool = False) -> Frame:
        """Return an item's picture as it comes from a camera."""
        return Frame.from_rgb((self._before if before else self._now)[number].copy(), camera='c')


class Times:
    """Milliseconds of answers, of their stage ``select`` and of what came after the one before."""

    def __init__(self) -> None:
        self.total: list[float] = []
        self.select: list[float] = []
        self.reflect: list[float] = []
        self.kept: list[float] = []

    def add(self, got: Answer) -> None:
        """Take note of an answer."""
        self.total.append(got.timeline.total_ms())
        self.select.append(got.timeline.ms('select'))
        self.kept.append(got.vision_tokens_kept)


def _timed(engine: Engine, way: Way, shown: Shown, count: int) -> Times:
    """Answer so many times in one way."""
    times, limits = Times(), (engine.options.min_pixels, engine.options.max_pixels)
    way.enter(engine)
    for turn in range(WARM + count):
        number = turn % len(shown.items)
        item = shown.items[number]
        if way.looks_back:
            _ask(engine, way, item, shown.frame(number, before=True))
            begin = time.perf_counter()
            engine.options.selector.reflect()  # type: ignore[attr-defined]
            spent = (time.perf_counter() - begin) * 1e3
        got = _ask(engine, way, item, shown.frame(number))
        if turn < WARM:
            continue
        times.add(got)
        if way.looks_back:
            times.reflect.append(spent)
    way.leave(engine, limits)
    return times


def _ask(engine: Engine, way: Way, item: Item, frame: Frame) -> Answer:
    engine.forget()
    timeline = Timeline()
    with timeline.stage('select'):
        keep = None if way.mask is None else way.mask(item, frame)
    request = Request(item.question.text, (Visual((frame,), keep),), keep_ratio=way.ratio,
                      max_new_tokens=8)
    return say(engine, request, way.fewer, timeline)


def net_ms(head: Path, device: str) -> list[Record]:
    """Time the light head alone, from frame to map and (on CUDA) the net itself."""
    engine = Engine.load(str(share('models', 'tiny')), device=device)
    kinds: list[torch.dtype | None] = [None]
    if engine.model.device.type == 'cpu':
        kinds += [torch.bfloat16, torch.int8]
    found = []
    for kind in kinds:
        signal = HeadSignal(SaliencyHead.load(head), kind)
        signal.bind(engine)
        for size, (rows, columns) in (('448x336', (12, 16)), ('640x480', (17, 23))):
            width, height = (int(n) for n in size.split('x'))
            noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
            frame = Frame.from_rgb(noise)
            times = []
            for _ in range(80):
                begin = time.perf_counter()
                signal([frame], rows, columns, 'Where is the red box?')
                times.append((time.perf_counter() - begin) * 1e3)
            name = 'int8' if kind == torch.int8 else str(signal.head.score.weight.dtype)[6:]
            case = {'method': 'head', 'size': size, 'dtype': name}
            found.append(record('selection', case, 'ms_frame_to_map', median(times[20:]), 'ms',
                                times=times[20:]))
            if signal.graphs:
                net = next(reversed(signal.graphs.values())).replay_ms(200)
                found.append(record(
                    'selection', case, 'ms_net', median(net), 'ms', times=net,
                    note='replay of upload, shrinking, net and download, CUDA events'))
    engine.close()
    return found
