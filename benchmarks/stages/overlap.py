"""
Continuous mode with several cameras: answers/s, frame age, bubbles; overlap beside strict order.

Every camera always has a newer frame. ``sequential`` is Engine.answer for one camera after the
other, as a node without a scheduler does; ``overlap`` is the scheduler, one frame ahead, decoding
shared. They take turns. A question that arrives meanwhile is timed against one that finds the
engine idle. On a CPU the shipped tiny model is timed, on a GPU the official 2B shape with random
weights.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.records import CannotRun, Record, median, record
from benchmarks.stages._engines import Camera, timed_engine
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.schedule import ScheduleOptions, Scheduler
from qwen_vl_ros.engine.task import Priority
from qwen_vl_ros.engine.types import Done, Event, Request, Stage, Visual
from qwen_vl_ros.measure.bubble import Bubble, bubble
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.measure.trace import write_trace
from qwen_vl_ros.standing import AHEAD, Standing

QUESTION = 'what colour is the largest thing ?'
URGENT = 'is the path free ?'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--seconds', type=float, default=4.0, help='for each thing that is timed')
    parser.add_argument('--rounds', type=int, default=2, help='turns that both sides take')
    parser.add_argument('--threads', type=int, help='of torch (its own choice)')
    parser.add_argument('--device', default='auto')
    parser.add_argument('--dtype', default='auto')
    parser.add_argument('--shape', choices=('2b', '7b'),
                        help='random weights of this shape (on a GPU 2b)')
    parser.add_argument('--size', default='640x480')
    parser.add_argument('--cameras', type=int, nargs='+', default=[1, 2, 4])
    parser.add_argument('--tokens', type=int, nargs='+', default=[8, 33], help='of an answer')
    parser.add_argument('--questions', type=int, default=10,
                        help='that arrive during continuous mode')
    parser.add_argument('--max-sequences', type=int, default=8)
    parser.add_argument('--timeline', type=Path, metavar='STEM',
                        help='write STEM.png and STEM.json (for Perfetto) of the last case')


def run(args: argparse.Namespace) -> list[Record]:
    """Time all numbers of cameras and tokens."""
    if args.threads:
        torch.set_num_threads(args.threads)
    on_gpu = torch.cuda.is_available() and args.device != 'cpu'
    shape = args.shape or ('2b' if on_gpu else None)
    engine = timed_engine(shape, args.device, args.dtype, max_context=1024,
                          max_sequences=args.max_sequences)
    size = tuple(map(int, args.size.split('x')))
    found: list[Record] = []
    lines: list[Timeline] = []
    for cameras in args.cameras:
        for tokens in args.tokens:
            case = {'model': shape or engine.info.name, 'dtype': engine.info.dtype,
                    'size': args.size, 'path': engine.model.device.type, 'cameras': cameras,
                    'answer_tokens': tokens}
            records, lines = one_case(engine, args, (size[0], size[1]), cameras, tokens, case)
            for line in records:
                print(f"{cameras} cameras, {tokens} tokens: {line['metric']} {line['value']} "
                      f"{line['unit']} {line['ratio'] or ''}", flush=True)
            found += records
    if args.timeline and lines:
        write_trace(args.timeline.with_suffix('.json'), lines)
        draw(lines, args.timeline.with_suffix('.png'))
    engine.close()
    return found


@dataclass
class Run:
    """
    What a stretch of continuous mode gave.

    :param answers: finished.
    :param seconds: that it took.
    :param ages: of the frames when their answer was whole, milliseconds.
    :param lines: of the answers.
    """

    answers: int = 0
    seconds: float = 0.0
    ages: list[float] = field(default_factory=list)
    lines: list[Timeline] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Return the answers per second."""
        return self.answers / self.seconds

    def note(self, taken: float, event: Event, tokens: int) -> None:
        """Count an answer whose frame was taken at a time."""
        assert isinstance(event, Done)
        if len(event.answer.token_ids) != tokens:
            raise CannotRun(f'{len(event.answer.token_ids)} tokens came, {tokens} were asked')
        self.answers += 1
        self.ages.append((time.perf_counter() - taken) * 1e3)
        self.lines.append(event.answer.timeline)


def sequential(engine: Engine, cameras: Sequence[Camera], tokens: int, seconds: float) -> Run:
    """Answer about one camera after the other."""
    out, started = Run(), time.perf_counter()
    while True:
        for camera in cameras:
            taken = time.perf_counter()
            *_, last = engine.answer(Request(
                QUESTION, (Visual((camera.frame(),)),), max_new_tokens=tokens))
            out.note(taken, last, tokens)
        out.seconds = time.perf_counter() - started
        if out.seconds >= seconds:
            return out


class Continuous:
    """
    Continuous mode on a scheduler, as the node runs it.

    :param ended: called with the frame's time, the last event.
    :param ahead: see :class:`Standing`.
    """

    def __init__(self, plan: Scheduler, cameras: Sequence[Camera], tokens: int,
                 ended: Callable[[float, Event], None], ahead: int = AHEAD) -> None:
        self._plan = plan
        self._cameras = {str(i): camera for i, camera in enumerate(cameras)}
        self._standing = Standing(list(self._cameras), ahead)
        self._tokens = tokens
        self._ended = ended
        self._open = True
        self._left = threading.Condition()
        self._count = 0
        self.fault: EngineError | None = None

    def feed(self) -> None:
        """Send every frame whose turn it is."""
        while self._open and (name := self._standing.next()) is not None:
            self._send(name)

    def _send(self, name: str) -> None:
        decoded, taken = [False], [0.0]

        def make() -> Request:
            taken[0] = time.perf_counter()
            return Request(QUESTION, (Visual((self._cameras[name].frame(),)),),
                           max_new_tokens=self._tokens)

        def listener(event: Event | EngineError) -> None:
            if isinstance(event, Stage) and event.name == 'decode':
                decoded[0] = True
                self._standing.decoding(name)
                self.feed()
            elif isinstance(event, (Done, EngineError)):
                self._standing.ended(name, decoded[0])
                if isinstance(event, EngineError):
                    self.fault = event
                else:
                    self._ended(taken[0], event)
                self.feed()
                with self._left:
                    self._count -= 1
                    self._left.notify_all()

        with self._left:
            self._count += 1
        self._plan.submit(make, listener, priority=Priority.CONTINUOUS)

    def finish(self) -> None:
        """
        Send no more and wait for what is under way.

        :raises CannotRun: when an answer failed.
        """
        self._open = False
        with self._left:
            self._left.wait_for(lambda: self._count == 0, 60)
        if self.fault is not None:
            raise CannotRun(self.fault.message)


def overlapped(plan: Scheduler, cameras: Sequence[Camera], tokens: int, seconds: float,
               ahead: int = AHEAD) -> Run:
    """Answer about all cameras as the scheduler orders it."""
    out, started = Run(), time.perf_counter()
    mode = Continuous(plan, cameras, tokens, lambda taken, event: out.note(taken, event, tokens),
                      ahead)
    mode.feed()
    time.sleep(seconds)
    counted, lines = out.answers, list(out.lines)
    out.seconds = time.perf_counter() - started
    mode.finish()
    out.answers, out.lines = counted, lines
    return out


def first_tokens(plan: Scheduler, camera: Camera, count: int, pause_s: float) -> list[float]:
    """Return milliseconds from a question's submission to its first token."""
    times = []
    for number in range(count):
        time.sleep(pause_s * (1 + number % 3))
        frame = camera.frame()
        started = time.perf_counter()
        for event in plan.answer(Request(URGENT, (Visual((frame,)),), max_new_tokens=2)):
            if isinstance(event, Stage) and event.name == 'decode':
                times.append((time.perf_counter() - started) * 1e3)
    return times


def one_case(
    engine: Engine, args: argparse.Namespace, size: tuple[int, int], count: int, tokens: int,
    case: dict[str, object],
) -> tuple[list[Record], list[Timeline]]:
    """Time one number of cameras and tokens."""
    cameras = [Camera(size, seed) for seed in range(count)]
    strict: list[Run] = []
    shared: list[Run] = []
    seconds = args.seconds / args.rounds
    sequential(engine, cameras, tokens, min(0.3, seconds / 4))
    for _ in range(args.rounds):
        strict.append(sequential(engine, cameras, tokens, seconds))
        plan = Scheduler(engine, ScheduleOptions(args.max_sequences, waiting=64))
        plan.start()
        # Long enough for every number of rows that prefill meets: choosing kernels takes 0.3 s.
        overlapped(plan, cameras, tokens, min(1.0, seconds / 2))
        shared.append(overlapped(plan, cameras, tokens, seconds))
        plan.stop()
    lines = shared[-1].lines
    ages = [age for one in shared for age in one.ages]
    rate, base = median([r.rate for r in shared]), median([r.rate for r in strict])
    apart = bubble(strict[-1].lines)
    there = bubble(lines)
    answers = sum(r.answers for r in shared)
    out = [
        record('overlap', case, 'answers_per_s', rate, '1/s', runs=answers,
               baseline=('sequential', base), higher_is_better=True),
        record('overlap', case, 'frame_age_ms', median(ages), 'ms', times=ages,
               baseline=('sequential', median([a for r in strict for a in r.ages]))),
        *shares(case, there, apart)]
    if args.questions:
        out.append(arriving(engine, args, size, cameras, tokens, case))
    return out, lines[-12:]


def shares(case: dict[str, object], there: Bubble, apart: Bubble) -> list[Record]:
    """Return the records of both kinds of bubble."""
    return [
        record('overlap', case, 'bubble_share', there.idle_share, '1', runs=there.answers,
               baseline=('sequential', apart.idle_share),
               note='work waits and the device runs none'),
        record('overlap', case, 'starved_share', there.starved_share, '1', runs=there.answers,
               baseline=('sequential', apart.starved_share),
               note='requests are under way and none of them decodes')]


def arriving(
    engine: Engine, args: argparse.Namespace, size: tuple[int, int], cameras: Sequence[Camera],
    tokens: int, case: dict[str, object],
) -> Record:
    """Time the first token of questions that arrive meanwhile, against an idle engine's."""
    asker = Camera(size, 99)
    plan = Scheduler(engine, ScheduleOptions(args.max_sequences, waiting=64))
    plan.start()
    pause = 0.02 if engine.model.device.type == 'cuda' else 0.2
    first_tokens(plan, asker, 2, 0)
    idle = first_tokens(plan, asker, args.questions, pause)
    mode = Continuous(plan, cameras, tokens, lambda taken, event: None)
    mode.feed()
    time.sleep(10 * pause)
    busy = first_tokens(plan, asker, args.questions, pause)
    mode.finish()
    plan.stop()
    return record('overlap', case, 'question_first_token_ms', median(busy), 'ms', times=busy,
                  baseline=('idle engine', median(idle)),
                  note='a question arrives during continuous mode')


COLOURS = {'patches': '#b9b9b9', 'select': '#d9d9d9', 'upload': '#8c8c8c', 'encode': '#2f7d6b',
           'prefill': '#3d6fb6', 'first_token': '#c2452d', 'token': '#e0a030'}


def draw(lines: Sequence[Timeline], path: Path) -> bool:
    """
    Draw timelines, one row an answer.

    :return: whether matplotlib is there to do so.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    begin = min(span.start_ns for line in lines for span in line.spans)
    figure, axes = plt.subplots(figsize=(11, 0.9 + 0.32 * len(lines)), constrained_layout=True)
    for row, line in enumerate(lines):
        for span in line.spans:
            if span.name in COLOURS:
                axes.barh(row, span.ms, left=(span.start_ns - begin) / 1e6, height=0.8,
                          color=COLOURS[span.name], edgecolor='white', linewidth=0.2)
    axes.set(xlabel='ms', ylabel='answer', title='Continuous mode: stages of answers')
    axes.invert_yaxis()
    axes.legend(handles=[Patch(color=c, label=n) for n, c in COLOURS.items()], fontsize=8,
                ncols=len(COLOURS), loc='lower center', bbox_to_anchor=(0.5, 1.06))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
