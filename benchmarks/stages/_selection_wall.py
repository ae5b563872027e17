"""Wall time of answers, one at a time, through the engine as a robot asks it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.records import Record, median, record
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.roboscene.evaluate import earlier, frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.answering import AS_IT_IS, Fewer, answer
from qwen_vl_ros.saliency.head import SaliencyHead
from qwen_vl_ros.saliency.head_signal import HeadSignal
from qwen_vl_ros.saliency.selectors import make_selector
from qwen_vl_ros.share import share

#: 72 of 192 units: the budget's sixteenths.
RATIO = 0.375
#: Pixels of a picture of 7 x 10 units.
SMALLER = 70 * 784


def wall(args: argparse.Namespace, head: Path) -> list[Record]:
    """
    Time answers about stills with all tokens and with 72 of 192.

    :param head: file of the light head.
    """
    folder = share('models', 'tiny')
    drawn = list(items('attribute', 'test', args.wall))
    found = net_ms(head, args.device)
    whole = 0.0
    for method in ('full', 'head', 'saliency', 'next_frame', 'uniform', 'divprune', 'downsample'):
        name = {'full': 'uniform', 'downsample': 'uniform'}.get(method, method)
        engine = Engine.load(str(folder), device=args.device,
                             selector=make_selector(name, model=folder, head=head))
        if method == 'downsample':
            engine.set_pixels(3136, SMALLER)
        ratio = 1.0 if method in ('full', 'downsample') else RATIO
        fewer = Fewer(dropper='divprune') if method == 'divprune' else AS_IT_IS
        totals, selects, reflects = [], [], []
        for number, item in enumerate([*drawn[:5], *drawn]):
            if method == 'next_frame':
                before = Frame.from_rgb(frames_of(earlier(item))[0].rgb(), camera='c')
                _ask(engine, item.question.text, before, ratio, fewer)
                begin = time.perf_counter()
                engine.options.selector.reflect()
                spent = (time.perf_counter() - begin) * 1e3
            now = Frame.from_rgb(frames_of(item)[0].rgb(), camera='c')
            line = _ask(engine, item.question.text, now, ratio, fewer)
            if number < 5:
                continue
            totals.append(line.total_ms())
            selects.append(line.ms('select'))
            if method == 'next_frame':
                reflects.append(spent)
        engine.close()
        case = {'model': 'tiny', 'method': method, 'kept': 192 if method == 'full' else
                70 if method == 'downsample' else 72, 'dtype': engine.info.dtype}
        whole = whole or median(totals)
        found.append(record('selection', case, 'ms_per_answer', median(totals), 'ms', times=totals,
                            baseline=('all tokens', whole)))
        if method not in ('full', 'downsample'):
            found.append(record('selection', case, 'ms_select', median(selects), 'ms',
                                times=selects, share_of_whole_frame=median(selects) / whole))
        if reflects:
            found.append(record(
                'selection', case, 'ms_reflect', median(reflects), 'ms', times=reflects,
                note='the gradient of the last answer, taken while nobody waits'))
    return found


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


def _ask(engine: Engine, question: str, frame: Frame, ratio: float, fewer: Fewer) -> Timeline:
    request = Request(question, (Visual((frame,)),), keep_ratio=ratio, max_new_tokens=8)
    return next(e.answer.timeline for e in answer(engine, request, fewer=fewer)
                if isinstance(e, Done))
