"""Training batches from seeds: worker processes draw scenes and questions, step by step."""

from __future__ import annotations

import multiprocessing as mp
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from queue import Empty, Full
from random import Random

import numpy as np

from qwen_vl_ros.roboscene import questions as q
from qwen_vl_ros.roboscene.geometry import HEIGHT, WIDTH, unit_of
from qwen_vl_ros.roboscene.items import COUNT_WEIGHTS, Item, count_kind, mix, move
from qwen_vl_ros.roboscene.layout import pack
from qwen_vl_ros.roboscene.scene import (
    COLOURS,
    MAX_OBJECTS,
    SHAPES,
    Plan,
    Scene,
    pick,
    sample_scene,
)
from tools.train_tiny.tokenizer import build

ASKED = 7     # questions a still
ASKED_CLIP = 4
BLOCK = 28    # tokens a question with its answer, padded
FAMILY_NAMES = (*q.FAMILIES, 'describe')
#: How often each family is asked about stills; the hard ones more (relation, pointing, number).
WEIGHTS = {'attribute': .10, 'count': .15, 'relation': .22, 'pointing': .20, 'number': .20,
           'path': .05, 'far': .18, 'describe': .06}
_COLOUR_INDEX = {name: i for i, name in enumerate(COLOURS)}


@dataclass(frozen=True)
class Mix:
    """
    What a step is made of.

    :param stills: pictures with seven questions each.
    :param clips: two-slice clips with four.
    :param focus: 'count' makes half of the scenes and half of the questions about counting.
    :param cameras: 'train', or 'wide' for cameras beyond those that 'test' draws from.
    """

    stills: int
    clips: int
    focus: str = ''
    cameras: str = 'train'


@dataclass
class Batch:
    """
    One training step's scenes and questions.

    Scenes are ordered: stills, then the first slices of all clips, then their second slices.

    :param env: float32 [stills + 2 * clips, 40].
    :param objects: float32 [.., 12, 24].
    :param aux: int16 [.., 12, 6]: unit of the centre (-1 is none), colour, shape, three digits
        (10 is none).
    :param tokens: int64 [stills, 7, 28] for stills, [clips, 4, 28] for clips.
    :param labels: same shapes; the token that follows where an answer is being said, else -1.
    :param family: int64 [stills, 7] and [clips, 4], index into FAMILY_NAMES.
    """

    env: np.ndarray
    objects: np.ndarray
    aux: np.ndarray
    tokens: tuple[np.ndarray, np.ndarray]
    labels: tuple[np.ndarray, np.ndarray]
    family: tuple[np.ndarray, np.ndarray]


@cache
def tokenizer():
    """Return the tokenizer, trained once a process (it is deterministic)."""
    return build()


@cache
def encode(text: str) -> tuple[int, ...]:
    """Return the ids of a text."""
    return tuple(tokenizer().encode(text).ids)


def prefix_ids() -> tuple[int, ...]:
    """Return the ids before the picture: system turn, start of the user's, vision start."""
    return encode('<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
                  '<|im_start|>user\n<|vision_start|>')


def block(question: q.Question, length: int = BLOCK) -> tuple[list[int], list[int]]:
    """Return tokens and labels of a question with its answer, padded to ``length``."""
    asked = encode(question.text) + encode('<|im_end|>\n<|im_start|>assistant\n')
    said = encode(question.answer) + encode('<|im_end|>')
    tokens = list(asked + said)
    if len(tokens) > length:
        raise ValueError(f'{len(tokens)} tokens do not fit into a block of {length}: {question}')
    labels = [-1] * (len(asked) - 1) + list(said)
    pad = encode('<|endoftext|>')[0]
    return (tokens + [pad] * (length - len(tokens)),
            labels + [-1] * (length - len(labels)))


def training_scene(rng: Random, mixed: Mix) -> tuple[Scene, list[q.Question]]:
    """Draw a scene of a random theme and seven questions about it."""
    focus = mixed.focus
    while True:
        roll, kind, theme = rng.random(), ('', ''), ''
        plan = Plan()
        if focus == 'count':
            roll = roll * 0.44 if roll < 0.5 else 0.22 + (roll - 0.5) * 1.56
        if roll < 0.22:
            theme, kind = 'count', count_kind(rng, 'train')
            weights = COUNT_WEIGHTS
            goal = int(rng.random() * 10) if rng.random() < (0.6 if focus else 0.3) else pick(
                rng, [n for n, w in enumerate(weights) for _ in range(w)])
            plan = Plan(count=min(12, max(3, goal + int(6 * rng.random()))),
                        matching=(*kind, goal))
        elif roll < 0.40:
            theme, plan = 'number', Plan(numbers=2 + int(2 * rng.random()))
        elif roll < 0.56:
            theme, plan = 'far', Plan(far=1 + int(3 * rng.random()))
        elif roll < 0.70:
            theme, plan = 'path', Plan(blocked=rng.random() < 0.5)
        elif roll < 0.80:
            plan = Plan(count=8 + int(5 * rng.random()))
        scene = sample_scene(rng, mixed.cameras, plan)
        if scene is None:
            continue
        asked: list[q.Question] = []
        first = q.count(rng, scene, kind) if theme == 'count' else (
            q.STILL[theme](rng, scene) if theme else None)
        if first is not None:
            asked.append(first)
        for _ in range(60):
            if len(asked) == ASKED:
                return scene, asked
            asks = 'count' if focus and rng.random() < 0.4 else _family(rng)
            found = q.STILL[asks](rng, scene)
            if found is not None:
                asked.append(found)


def _family(rng: Random) -> str:
    roll = rng.random() * sum(WEIGHTS.values())
    for name, weight in WEIGHTS.items():
        roll -= weight
        if roll < 0:
            return name
    return 'describe'


def training_clip(rng: Random, mixed: Mix) -> tuple[Scene, Scene, list[q.Question]]:
    """Draw two slices between which one thing moved, and the four questions about it."""
    while True:
        scene = sample_scene(rng, mixed.cameras)
        pair = move(rng, scene) if scene is not None else None
        if scene is None or pair is None:
            continue
        after, moved = pair
        return scene, after, [q.change(rng, scene, after, moved, kind)
                              for kind in range(ASKED_CLIP)]


def aux_targets(scene: Scene) -> np.ndarray:
    """Return int16 [12, 6]: centre unit, colour, shape and digits of every visible thing."""
    out = np.full((MAX_OBJECTS, 6), -1, np.int16)
    for row, t in zip(out, sorted(scene.things, key=lambda t: -t.depth)):
        u, v = t.centre
        if 0 <= u < WIDTH and 0 <= v < HEIGHT and t.visible >= 0.5:
            digits = [int(d) for d in t.number] + [10] * (3 - len(t.number))
            row[:] = (unit_of(u, v), _COLOUR_INDEX[t.colour], SHAPES.index(t.shape), *digits)
    return out


def make_batch(seed: int, step: int, mixed: Mix) -> Batch:
    """Draw the batch of one step; it depends on nothing but its arguments."""
    scenes: list[Scene] = []
    asked: list[list[q.Question]] = []
    for i in range(mixed.stills):
        scene, questions = training_scene(Random(mix(7, seed, step, i)), mixed)
        scenes.append(scene)
        asked.append(questions)
    first, second, moved = [], [], []
    for i in range(mixed.clips):
        before, after, questions = training_clip(Random(mix(8, seed, step, i)), mixed)
        first.append(before)
        second.append(after)
        moved.append(questions)
    return collate(scenes + first + second, asked, moved)


def collate(scenes: list[Scene], stills: list[list[q.Question]], clips: list[list[q.Question]],
            length: int = BLOCK) -> Batch:
    """Pack scenes and questions into arrays."""
    packed = [pack(s) for s in scenes]
    tokens, labels, family = [], [], []
    for rows in (stills, clips):
        cells = [[block(x, length) for x in row] for row in rows]
        shape = (len(rows), len(rows[0]) if rows else 0, length)
        tokens.append(np.array([[c[0] for c in row] for row in cells],
                               np.int64).reshape(shape))
        labels.append(np.array([[c[1] for c in row] for row in cells],
                               np.int64).reshape(shape))
        family.append(np.array([[FAMILY_NAMES.index(x.family) for x in row] for row in rows],
                               np.int64).reshape(shape[:2]))
    return Batch(np.stack([p[0] for p in packed]), np.stack([p[1] for p in packed]),
                 np.stack([aux_targets(s) for s in scenes]), (tokens[0], tokens[1]),
                 (labels[0], labels[1]), (family[0], family[1]))


def item_batch(items: list[Item]) -> Batch:
    """Collate evaluation items of one kind (all stills or all clips), one question each."""
    asked = [[i.question] for i in items]
    if len(items[0].scenes) == 1:
        return collate([i.scenes[0] for i in items], asked, [])
    return collate([i.scenes[0] for i in items] + [i.scenes[1] for i in items], [], asked)


class DataError(RuntimeError):
    """A process that draws scenes failed or ended; the message says how."""


def _work(queue, seed: int, start: int, stride: int, mixed: Mix) -> None:
    step = start
    while True:
        try:
            drawn: Batch | str = make_batch(seed, step, mixed)
        except Exception as error:  # handed over: the other side is waiting for this step
            drawn = f'{type(error).__name__}: {error}'
        while True:
            try:
                queue.put(drawn, timeout=5.0)
                break
            except Full:
                trainer = mp.parent_process()
                if trainer is not None and not trainer.is_alive():
                    queue.cancel_join_thread()
                    return  # it was killed: nobody will take this
        step += stride


def _take(process: BaseProcess, queue) -> Batch:
    """
    Return a worker's next batch.

    :raises DataError: when it failed, or is gone (out of memory, for one) and left nothing.
    """
    drawn: Batch | str | None = None
    while drawn is None:
        alive = process.is_alive()
        try:
            drawn = queue.get(timeout=1.0)
        except Empty:
            if not alive:
                raise DataError('a process that draws scenes ended with exit code '
                                f'{process.exitcode}') from None
    if isinstance(drawn, str):
        raise DataError(f'a process that draws scenes failed: {drawn}')
    return drawn


def batches(seed: int, first: int, mixed: Mix, workers: int) -> Iterator[Batch]:
    """
    Yield the batches of steps ``first``, ``first + 1``, …; the same whatever ``workers`` is.

    :param workers: processes; 0 draws in this one.
    :raises DataError: when one of them fails.
    """
    if workers == 0:
        step = first
        while True:
            yield make_batch(seed, step, mixed)
            step += 1
    context = mp.get_context('spawn')
    queues = [context.Queue(maxsize=4) for _ in range(workers)]
    processes = [context.Process(target=_work, daemon=True,
                                 args=(queue, seed, first + i, workers, mixed))
                 for i, queue in enumerate(queues)]
    # Blocked in the workers from their birth: Ctrl-C is the trainer's to act on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for p in processes:
            p.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        while True:
            for p, queue in zip(processes, queues):
                yield _take(p, queue)
    finally:
        for p in processes:
            p.terminate()
