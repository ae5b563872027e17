"""What choosing costs and what a latency target does, on an official shape, random weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.records import Record, median, record, table, write
from benchmarks.stages._engines import Camera, timed_engine
from benchmarks.stages.answer import QUESTION
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.patches import grid_of, uniform_keep
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.saliency.controller import LADDER, LatencyController, Level
from qwen_vl_ros.saliency.head import SaliencyHead
from qwen_vl_ros.saliency.head_signal import HeadSignal
from qwen_vl_ros.saliency.select import UnitSelector

SIZES = ((640, 480), (1280, 720))
#: Share of the units that the timed selectors keep.
RATIO = 0.33
#: Tokens of an answer under the controller.
TOKENS = 8
#: Answers to each target.
ANSWERS = 60


def on_shape(shape: str, partial: Path | None = None) -> list[Record]:
    """
    Time the light head before the frames of a shape, and the controller that holds a target.

    What matters most comes first, and every part is shown when it is done.

    :param shape: 2b or 7b; its head has random weights as well: speed does not depend on values.
    :param partial: write the records there after every part.
    :raises CannotRun: without a GPU.
    """
    begun = time.monotonic()
    engine = timed_engine(shape, preprocess='auto')
    width = engine.model.language.embedding.shape[1]
    torch.manual_seed(0)
    signal = HeadSignal(SaliencyHead(width).eval().requires_grad_(False))
    chooser = UnitSelector({'head': 1.0}, {'head': signal}, spread=0.0)
    chooser.bind(engine)
    found: list[Record] = []

    def done(what: str, more: list[Record]) -> None:
        print(f'{what}: {time.monotonic() - begun:.1f} s', flush=True)
        if more:
            print(table(more), flush=True)
            found.extend(more)
            if partial:
                write(partial, found)

    done(f'random {shape}', [])
    for size in SIZES:
        case = {'model': shape, 'size': f'{size[0]}x{size[1]}'}
        whole = _whole(engine, size)
        done(case['size'], _map_cost(engine, signal, case, size, whole))
        done(f"{case['size']}, within answers", _stage_cost(engine, chooser, case, size, whole))
    engine.options = replace(engine.options, selector=chooser)
    done('controller', _controlled(engine, shape, SIZES[1]))
    engine.close()
    return found


def _ask(engine: Engine, camera: Camera, tokens: int, ratio: float = 1.0,
         question: str = QUESTION) -> Timeline:
    """Answer about a new picture; only the prompt's beginning is known from before."""
    request = Request(question, (Visual((camera.frame(),)),), max_new_tokens=tokens,
                      keep_ratio=ratio)
    return next(e.answer.timeline for e in engine.answer(request) if isinstance(e, Done))


def _whole(engine: Engine, size: tuple[int, int]) -> list[float]:
    """Return the milliseconds to the first token of whole frames."""
    camera = Camera(size, 1)
    return [_ask(engine, camera, 1).total_ms() for _ in range(28)][8:]


def _map_cost(engine: Engine, signal: HeadSignal, case: dict[str, str], size: tuple[int, int],
              whole: list[float]) -> list[Record]:
    """Time the map alone, as it stands to the whole frame to its first token."""
    camera = Camera(size, 1)
    grid = grid_of((camera.frame(),), engine.options.min_pixels, engine.info.max_pixels)
    rows, columns = grid[1] // 2, grid[2] // 2
    found = [record('selection', {**case, 'method': 'full'}, 'ms_first_token', median(whole), 'ms',
                    times=whole)]

    def timed(name: str, question: Callable[[int], str], note: str) -> Record:
        times = []
        for number in range(120):
            frame = camera.frame()
            begin = time.perf_counter()
            signal([frame], rows, columns, question(number))
            times.append((time.perf_counter() - begin) * 1e3)
        return record('selection', {**case, 'method': 'head'}, name, median(times[20:]), 'ms',
                      times=times[20:], share_of_whole_frame=median(times[20:]) / median(whole),
                      note=note)

    found.append(timed('ms_frame_to_map', lambda n: QUESTION, 'a standing question'))
    net = next(reversed(signal.graphs.values())).replay_ms(200)
    found.append(record('selection', {**case, 'method': 'head'}, 'ms_net', median(net), 'ms',
                        times=net, share_of_whole_frame=median(net) / median(whole),
                        note='replay of upload, shrinking, net and download, CUDA events'))
    found.append(timed('ms_frame_to_map_new_question', lambda n: f'{QUESTION} {n}',
                       'its words are read first'))
    return found


def _stage_cost(engine: Engine, chooser: UnitSelector, case: dict[str, str],
                size: tuple[int, int], whole: list[float]) -> list[Record]:
    """Time answers about fewer units, and the stage that chooses them."""
    camera, found = Camera(size, 3), []
    for name, selector in (('uniform', uniform_keep), ('head', chooser)):
        engine.options = replace(engine.options, selector=selector)
        lines = [_ask(engine, camera, 1, RATIO) for _ in range(26)][6:]
        for metric, times in (('ms_first_token', [x.total_ms() for x in lines]),
                              ('ms_select', [x.ms('select') for x in lines])):
            found.append(record(
                'selection', {**case, 'method': name, 'keep': RATIO}, metric, median(times), 'ms',
                times=times, share_of_whole_frame=median(times) / median(whole)))
    return found


@dataclass
class _Load:
    """Other work on the device, for as long as it is entered."""

    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.randn(4096, 4096, device='cuda', dtype=torch.bfloat16)
            while not self._stop.is_set():
                for _ in range(4):
                    x @ x
                stream.synchronize()


def _controlled(engine: Engine, shape: str, size: tuple[int, int]) -> list[Record]:
    """
    Let the controller hold targets, and one while something else takes its share of the device.

    Every rung's graphs are captured before: what a first use costs is no load.
    """
    camera, limits = Camera(size, 2), (engine.options.min_pixels, engine.info.max_pixels)

    def spend(level: Level) -> float:
        most = limits[1] if level.pixels == 1 else max(
            limits[0], round(min(limits[1], size[0] * size[1]) * level.pixels))
        if most != engine.options.max_pixels:
            engine.set_pixels(limits[0], most)
        return _ask(engine, camera, TOKENS, level.keep).total_ms()

    def take(controller: LatencyController) -> tuple[float, int]:
        level = controller.level
        spent = spend(level)
        controller.took(spent)
        return spent, LADDER.index(level)

    free = [median([spend(level) for _ in range(6)][3:]) for level in LADDER]
    whole = free[0]
    found = []
    for name, share, loaded in (('target of 80 %', 0.8, False), ('target of 60 %', 0.6, False),
                                ('target of 250 %, other work', 2.5, True)):
        controller = LatencyController(share * whole)
        if loaded:
            with _Load():
                run = [take(controller) for _ in range(ANSWERS)]
            run += [take(controller) for _ in range(ANSWERS)]
        else:
            run = [take(controller) for _ in range(ANSWERS)]
        times, rungs = [x[0] for x in run], [x[1] for x in run]
        settled = slice(ANSWERS - 30, ANSWERS)
        moves = [sum(a != b for a, b in zip(rungs[p:], rungs[p + 1:p + 30]))
                 for p in range(ANSWERS - 30, len(run), ANSWERS)]
        found.append(record(
            'selection', {'model': shape, 'size': f'{size[0]}x{size[1]}', 'method': 'controller',
                          'case': name}, 'ms_settled', median(times[settled]), 'ms',
            times=times[settled], baseline=('target', share * whole), rungs=rungs,
            moves_when_settled=moves, rungs_ms=[round(x, 2) for x in free],
            note=f'{ANSWERS} answers of {TOKENS} tokens' + (
                ', then as many without the other work' if loaded else '')))
    engine.set_pixels(*limits)
    return found
