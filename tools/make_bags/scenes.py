"""Rendered robot scenes as a camera's stream, with questions whose answers are known."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from qwen_vl_ros.roboscene import questions as q
from qwen_vl_ros.roboscene.items import mix, move
from qwen_vl_ros.roboscene.render import render, render_packed
from qwen_vl_ros.roboscene.scene import Plan, Scene, sample_scene

#: Families asked about a still, in the order of the demo.
STILL = ('attribute', 'count', 'relation', 'pointing', 'number', 'path', 'far')

#: Asked first, for an answer of some length; there are many right ones, so it is not scored.
OPEN = 'describe'

#: A scene is taken when it allows at least so many questions.
ENOUGH = 6

RATE = 30.0
FRAMES_A_SHOT = 15

#: Grey levels by which a pixel differs from frame to frame at most.
FLICKER = 2

#: Frame of a shot at which it is asked about. In a shot where something moves, it moves between
#: frames 6 and 7, and a clip of four frames ends here: two before, two after.
ASKED_AT, MOVED_AT = 8, 7


@dataclass(frozen=True)
class Shot:
    """
    Half a second of a camera that stands still.

    :param before: what it shows first.
    :param after: what it shows from frame :data:`MOVED_AT` on; the same where nothing moves.
    :param asked: questions about it, with their true answers.
    """

    before: Scene
    after: Scene
    asked: tuple[q.Question, ...]

    @property
    def moving(self) -> bool:
        """Say whether something moves."""
        return self.before is not self.after


def ready_renderer() -> None:
    """Build the native renderer where it is missing; needs CMake and g++."""
    try:
        render_packed(np.empty((0, 40)), np.empty((0, 12, 24)))
    except FileNotFoundError:
        script = Path(__file__).resolve().parents[2] / 'kernels' / 'build.py'
        subprocess.run([sys.executable, str(script)], check=True)


def draw_shots(stills: int = 6, moves: int = 2, seed: int = 0) -> list[Shot]:
    """
    Draw scenes from the distribution that the tiny checkpoint was tested on, never trained on.

    :param stills: shots with all questions about one picture.
    :param moves: shots in which one thing moves, asked about as clips.
    :param seed: the same seed gives the same shots on every machine.
    """
    shots: list[Shot] = []
    number = 0
    while len(shots) < stills:
        rng = Random(mix(71, seed, number))
        number += 1
        scene = sample_scene(rng, 'test', Plan(count=6 + number % 4, numbers=2))
        if scene is None:
            continue
        found = [question for family in (OPEN, *STILL)
                 if (question := q.STILL[family](rng, scene)) is not None]
        if len(found) >= ENOUGH:
            shots.append(Shot(scene, scene, tuple(found)))
    while len(shots) < stills + moves:
        rng = Random(mix(72, seed, number))
        number += 1
        scene = sample_scene(rng, 'test', Plan(count=5))
        pair = move(rng, scene) if scene else None
        if scene and pair:
            after, moved = pair
            shots.append(Shot(scene, after, tuple(
                q.change(rng, scene, after, moved, kind) for kind in range(3))))
    return shots


def frames(shots: Sequence[Shot], start_ns: int) -> Iterator[tuple[int, np.ndarray]]:
    """
    Render the shots one after the other at 30 Hz, every frame with noise of its own.

    :param start_ns: stamp of the first frame.
    :return: stamp in nanoseconds and uint8 [336, 448, 3] RGB.
    """
    for number, shot in enumerate(shots):
        before, after = render([shot.before, shot.after])
        for i in range(FRAMES_A_SHOT):
            tick = number * FRAMES_A_SHOT + i
            # The scene's own sensor noise stands still with its textures; this one does not.
            flicker = np.random.Generator(np.random.PCG64(tick)).integers(
                -FLICKER, FLICKER + 1, before.shape, np.int16)
            picture = after if i >= MOVED_AT else before
            yield (start_ns + round(tick * 1e9 / RATE),
                   np.clip(picture + flicker, 0, 255).astype(np.uint8))


def questions_file(shots: Sequence[Shot]) -> list[dict[str, Any]]:
    """Return what ``qwen_vl replay --questions`` reads: questions, moments and true answers."""
    return [
        {'question': question.text,
         'expected': None if question.family == OPEN else question.answer,
         'at': round((number * FRAMES_A_SHOT + ASKED_AT) / RATE, 4),
         'frames': 4 if shot.moving else 1,
         'note': question.family}
        for number, shot in enumerate(shots) for question in shot.asked]
