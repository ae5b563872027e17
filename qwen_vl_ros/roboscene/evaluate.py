"""Scoring an engine on RoboScene-VQA: exact match by family, with intervals and floors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Answer, Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Span, Timeline
from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, HEIGHT, UNITS, WIDTH
from qwen_vl_ros.roboscene.items import Item, items, mix, move
from qwen_vl_ros.roboscene.render import render
from qwen_vl_ros.roboscene.scene import Scene, uniform
from qwen_vl_ros.saliency.answering import AS_IT_IS, FULL_FRAME, Fewer, answer
from qwen_vl_ros.saliency.select import top_units

#: 'none' shows the right picture, 'blind' a plain grey one, 'shuffled' that of another item.
#: (A prompt without a picture would say nothing about guessing: the model was never trained on one
#: and answers none of its words.)
FLOORS = ('none', 'blind', 'shuffled')


@dataclass
class Score:
    """
    What one family got in one split.

    :param right: answers that are exactly the expected text.
    :param count: items asked.
    :param chance: what the best constant answer would get (see :func:`chance`).
    :param kept: vision tokens that the language model saw, mean of all items.
    :param recall: share of the evidence units of the newest slice that were kept, mean of the
        items that have some.
    :param gflops: of selector, encoder and decoder, mean of all items.
    :param scoring: of these, what choosing the units took.
    :param ms: of each question on the wall clock, from the request to the end of its answer.
    :param select_ms: of these, what choosing took.
    :param reflect_ms: what the selector did after the answer before, while nobody waits.
    :param again: items that were asked about again with the full frame.
    :param wrong: up to twenty (question, expected, said).
    """

    family: str
    split: str
    floor: str = 'none'
    right: int = 0
    count: int = 0
    chance: float = 0.0
    kept: float = 0.0
    recall: float = 1.0
    gflops: float = 0.0
    scoring: float = 0.0
    again: int = 0
    ms: list[float] = field(default_factory=list)
    select_ms: list[float] = field(default_factory=list)
    reflect_ms: list[float] = field(default_factory=list)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Return the share of right answers."""
        return self.right / self.count if self.count else float('nan')

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % Wilson interval of the accuracy."""
        return wilson(self.right, self.count)


def wilson(right: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """
    Return the Wilson score interval of a share (Wilson 1927).

    :param z: quantile of the normal distribution; the default gives 95 %.
    """
    if count == 0:
        return 0.0, 1.0
    p, n = right / count, count
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (max(0.0, (centre - spread) / (1 + z * z / n)),
            min(1.0, (centre + spread) / (1 + z * z / n)))


def frames_of(item: Item) -> tuple[Frame, ...]:
    """Render an item: one frame, or two of each slice for a clip."""
    pictures = [Frame.from_rgb(p) for p in render(item.scenes)]
    if len(pictures) == 1:
        return (pictures[0],)
    return tuple(p for p in pictures for _ in range(2))


def earlier(item: Item) -> Item:
    """
    Return an item as its camera saw it a moment earlier, for signals that use the last frame.

    Half of the cameras turned since (the picture shifts by up to 42 pixels), in half of the rooms
    a thing moved; sensor noise is new. Of a clip both slices show what its first one shows.
    """
    rng = Random(mix(61, item.seed))
    past = item.scenes[0]
    if len(item.scenes) == 1 and rng.random() < 0.5:
        moved = move(rng, past)
        past = past if moved is None else moved[0]
    turn = uniform(rng, -42.0, 42.0) if len(item.scenes) == 1 and rng.random() < 0.5 else 0.0
    return replace(item, scenes=tuple(_turned(rng, past, turn) for _ in item.scenes))


def _turned(rng: Random, scene: Scene, turn: float) -> Scene:
    """Shift a scene's picture sideways by so many pixels and draw its sensor noise anew."""
    env = dict(scene.env, noise_seed=float(int(rng.random() * (1 << 23))))
    things = []
    for thing in scene.things:
        u0, v0, u1, v1 = thing.box
        u, v, size = thing.decal
        things.append(replace(thing, box=(u0 + turn, v0, u1 + turn, v1),
                              decal=(u + turn, v, size)))
    return Scene(replace(scene.camera, cx=scene.camera.cx + turn), env, things)


def chance(family: str, drawn: Iterable[Item]) -> float:
    """
    Return what a model without eyes could get: the most frequent answer of each kind of question.

    Two questions are of one kind when their answers come from the same set (yes and no, colours,
    shapes, sides, counts); for numbers and places it is the most frequent answer of all.
    """
    from qwen_vl_ros.roboscene.scene import COLOURS, SHAPES
    sets: list[tuple[str, ...]] = [('yes', 'no'), ('left', 'right'), tuple(COLOURS), SHAPES]
    kinds: dict[int, Counter[str]] = {}
    for item in drawn:
        answer = item.question.answer
        kind = next((i for i, s in enumerate(sets) if answer in s), -1)
        kinds.setdefault(kind, Counter())[answer] += 1
    total = sum(sum(c.values()) for c in kinds.values())
    return sum(c.most_common(1)[0][1] for c in kinds.values()) / total if total else 0.0


def say(engine: Engine, request: Request, fewer: Fewer = AS_IT_IS,
        timeline: Timeline | None = None) -> Answer:
    """Ask one question; see :func:`saliency.answering.answer`."""
    for event in answer(engine, request, timeline, fewer=fewer):
        if isinstance(event, Done):
            return event.answer
    raise RuntimeError('the engine ended without an answer')


def oracle(item: Item, frames: tuple[Frame, ...], ratio: float) -> np.ndarray:
    """Keep the evidence of an item, filled up with units drawn at random from its seed."""
    slices = len(item.scenes)
    values = np.random.default_rng(item.seed).random(slices * UNITS) * 0.5
    values[sorted(item.question.evidence)] += 1
    return top_units(values.reshape(slices, GRID_H, GRID_W).astype(np.float32), ratio)


def evaluate(engine: Engine, families: Iterable[str], *, split: str = 'test', count: int = 200,
             seed: int = 0, floor: str = 'none', keep_ratio: float = 1.0, select: str = '',
             fewer: Fewer = AS_IT_IS, on_item: Callable[[], None] = lambda: None
             ) -> Iterator[Score]:
    """
    Score the engine, family by family.

    An engine whose selector uses the last frame (it has ``observe``) is asked about the moment
    before each item first. What it works out from that answer (``reflect``) is timed apart, as a
    robot does it while nobody waits; its FLOPs count by the share of answers that it is done for.

    :param count: items a family; the items of a shorter run come first in a longer one.
    :param floor: one of :data:`FLOORS`.
    :param keep_ratio: share of the units kept.
    :param select: '' lets the engine's selector (or ``fewer``) choose them; 'oracle' keeps the
        units that carry the evidence.
    :param fewer: droppers after the merger, region first, fall-back.
    :param on_item: called after each item (for a progress bar).
    :raises ValueError: unknown family, split, floor or selector.
    """
    if floor not in FLOORS:
        raise ValueError(f"floor '{floor}' is not one of {', '.join(FLOORS)}")
    if select not in ('', 'oracle'):
        raise ValueError(f"select '{select}' is neither oracle nor empty")
    looks_back = keep_ratio < 1 and not select and hasattr(engine.options.selector, 'observe')
    for family in families:
        drawn = list(items(family, split, count, seed))
        score = Score(family, split, floor, chance=chance(family, drawn))
        kept = flops = scoring = 0.0
        recall: list[float] = []
        for index, item in enumerate(drawn):
            frames = frames_of(drawn[index - 1] if floor == 'shuffled' else item)
            if floor == 'blind':
                grey = np.full((HEIGHT, WIDTH, 3), 118, np.uint8)
                frames = (Frame.from_rgb(grey),) * len(frames)
            mask = oracle(item, frames, keep_ratio) if select == 'oracle' else None
            request = Request(item.question.text, (Visual(frames, mask),), max_new_tokens=32,
                              keep_ratio=keep_ratio)
            if looks_back:
                # Items are different rooms: nothing of the last one may be remembered.
                engine.options.selector.forget()  # type: ignore[attr-defined]
                say(engine, replace(request, visuals=(Visual(frames_of(earlier(item))),)))
                aside = _reflected(engine.options.selector)
                score.reflect_ms.append(aside.ms)
                scoring += aside.flops / getattr(engine.options.selector, 'every', 1)
            got = say(engine, request, fewer)
            kept += got.vision_tokens_kept
            scoring += sum(span.flops for span in got.timeline.spans if span.name == 'select')
            flops += sum(span.flops for span in got.timeline.spans if span.name != 'select')
            score.ms.append(got.timeline.total_ms())
            score.select_ms.append(got.timeline.ms('select'))
            recall += _recall(item, got.kept_units[0])
            score.count += 1
            score.again += FULL_FRAME in got.approximate
            if got.text == item.question.answer:
                score.right += 1
            elif len(score.wrong) < 20:
                score.wrong.append((item.question.text, item.question.answer, got.text))
            on_item()
        score.kept = kept / max(1, score.count)
        score.gflops = (flops + scoring) / max(1, score.count) / 1e9
        score.scoring = scoring / max(1, score.count) / 1e9
        score.recall = sum(recall) / len(recall) if recall else 1.0
        yield score


def _reflected(selector: Any) -> Span:
    """Let a selector work out what it will need of the last answer; return what that took."""
    with Timeline().stage('select') as span:
        if hasattr(selector, 'reflect'):
            selector.reflect()
    return span


def _recall(item: Item, kept: np.ndarray) -> list[float]:
    """Return the share of the newest slice's evidence that was kept; nothing where it has none."""
    first = (len(item.scenes) - 1) * UNITS
    newest = [u - first for u in sorted(item.question.evidence) if u >= first]
    return [float(kept.reshape(-1)[newest].mean())] if newest else []
