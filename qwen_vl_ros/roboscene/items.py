"""Evaluation items: one scene (or a pair), one question, drawn from a seed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from qwen_vl_ros.roboscene import questions as q
from qwen_vl_ros.roboscene.geometry import bounding_box
from qwen_vl_ros.roboscene.scene import (
    COLOURS,
    HELD_OUT,
    SHAPES,
    Plan,
    Scene,
    pick,
    sample_scene,
    uniform,
)

#: Families whose questions name a pair of colour and shape that can be held out.
HELD_OUT_FAMILIES = ('attribute', 'count', 'relation', 'pointing', 'far', 'change')
#: How often each count is the answer in evaluation: even up to 5, then thinning out.
COUNT_WEIGHTS = (5, 5, 5, 5, 5, 5, 3, 2, 1, 1)


@dataclass(frozen=True)
class Item:
    """
    One evaluation item.

    :param scenes: one scene, or two for family 'change' (one a temporal slice).
    :param question: what is asked, the answer and its evidence.
    :param seed: the number from which it was drawn.
    """

    scenes: tuple[Scene, ...]
    question: q.Question
    seed: int


def mix(*parts: int) -> int:
    """Fold numbers into one 63-bit seed (splitmix64 finaliser after each)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ part) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        state ^= state >> 31
    return state >> 1


_SPLIT_SEEDS = {'train': 11, 'test': 23, 'heldout': 37, 'shift': 41}


def items(family: str, split: str = 'test', count: int = 200, seed: int = 0) -> Iterator[Item]:
    """
    Draw evaluation items of one family.

    :param family: one of :data:`questions.FAMILIES`.
    :param split: 'test' (new scenes), 'heldout' (a pair never seen in training is asked about:
        :data:`HELD_OUT_FAMILIES`), 'shift' (other cameras, textures).
    :param count: how many; a longer run starts with the items of a shorter one.
    :param seed: another seed, other items.
    """
    if family not in q.FAMILIES:
        raise ValueError(f"family '{family}' is not one of {', '.join(q.FAMILIES)}")
    if split not in _SPLIT_SEEDS:
        raise ValueError(f"split '{split}' is not one of {', '.join(_SPLIT_SEEDS)}")
    if split == 'heldout' and family not in HELD_OUT_FAMILIES:
        raise ValueError(f"split 'heldout' asks about {', '.join(HELD_OUT_FAMILIES)}, "
                         f"not about '{family}'")
    for index in range(count):
        yield draw(family, split, mix(_SPLIT_SEEDS[split], q.FAMILIES.index(family), seed, index))


def draw(family: str, split: str, seed: int) -> Item:
    """Draw the item of one seed; scenes that do not fit the family are drawn again."""
    rng = Random(seed)
    # What decides the answer is drawn once, outside the retries: rejection cannot skew it.
    goal = _goal(rng, family, split)
    for _ in range(2000):
        found = _try(rng, family, split, goal)
        if found is not None:
            return Item(*found, seed)
    raise RuntimeError(f'no scene for family {family}, split {split}, seed {seed}')


@dataclass(frozen=True)
class _Goal:
    target: tuple[str, str] | None = None
    want: str = ''
    count: int = 0


#: All pairs that training scenes may contain.
KNOWN_PAIRS = tuple((c, s) for c in COLOURS for s in SHAPES if (c, s) not in HELD_OUT)


def _goal(rng: Random, family: str, split: str) -> _Goal:
    pairs = tuple(sorted(HELD_OUT)) if split == 'heldout' else KNOWN_PAIRS
    if family == 'far':
        # A pallet is wider than a unit wherever it is still high enough to be seen.
        pairs = tuple(p for p in pairs if p[1] != 'pallet')
    target = pick(rng, pairs)
    if family == 'count':
        roll, answer = rng.random() * sum(COUNT_WEIGHTS), 0
        while roll >= COUNT_WEIGHTS[answer]:
            roll -= COUNT_WEIGHTS[answer]
            answer += 1
        return _Goal(target if split == 'heldout' else None, '', answer)
    if family == 'far':
        wants = ('yes', 'colour') if split == 'heldout' else ('yes', 'no', 'colour')
        return _Goal(target, pick(rng, wants))
    if family == 'change':
        return _Goal(target, pick(rng, ('left', 'right')), int(3 * rng.random()))
    if family == 'attribute':
        return _Goal(target, pick(rng, ('colour', 'shape')))
    if family in ('path', 'number', 'relation') and split != 'heldout':
        target = None
    return _Goal(target, pick(rng, ('yes', 'no')))


def count_kind(rng: Random, split: str, target: tuple[str, str] | None = None
               ) -> tuple[str, str]:
    """Draw what a counting question counts: colour and shape, either may be ''."""
    if target is not None:
        return target
    while True:
        colour, shape = pick(rng, tuple(COLOURS)), pick(rng, SHAPES)
        mode = int(3 * rng.random())
        if mode == 0 and (colour, shape) in HELD_OUT:
            continue
        return ((colour, shape), (colour, ''), ('', shape))[mode]


def _try(rng: Random, family: str, split: str, goal: _Goal
         ) -> tuple[tuple[Scene, ...], q.Question] | None:
    target = goal.target
    plan = Plan(target=target)
    kind = ('', '')
    if family == 'count':
        kind = count_kind(rng, split, target)
        total = min(12, max(3, goal.count + int(6 * rng.random())))
        plan = Plan(count=total, matching=(*kind, goal.count))
    elif family == 'far':
        assert target is not None
        first = target
        if goal.want == 'no':  # a hard negative: something there shares one of the two words
            colour, shape = target
            first = ((colour, pick(rng, SHAPES)) if rng.random() < 0.5
                     else (pick(rng, tuple(COLOURS)), shape))
            if first == target or first in HELD_OUT or first[1] == 'pallet':
                return None
        plan = Plan(far=1 + int(2 * rng.random()), target=first)
    elif family == 'number':
        plan = Plan(numbers=2, target=target)
    elif family == 'path':
        plan = Plan(blocked=goal.want == 'yes', target=target)
    scene = sample_scene(rng, split, plan)
    if scene is None:
        return None
    if family == 'change':
        pair = move(rng, scene, goal.want, target)
        if pair is None:
            return None
        after, moved = pair
        return (scene, after), q.change(rng, scene, after, moved, goal.count)
    found: q.Question | None
    if family == 'count':
        found = q.count(rng, scene, kind)
        if found is None or found.answer != str(goal.count):
            return None
    elif family == 'relation':
        found = q.relation(rng, scene, goal.want, target)
    elif family == 'far':
        found = q.far(rng, scene, goal.want, target)
    elif family == 'attribute':
        found = q.attribute(rng, scene, target, goal.want)
    elif family == 'pointing':
        found = q.pointing(rng, scene, target)
    else:
        found = q.STILL[family](rng, scene)
    return None if found is None else ((scene,), found)


def move(rng: Random, scene: Scene, side: str = '', target: tuple[str, str] | None = None
         ) -> tuple[Scene, int] | None:
    """
    Move one thing of a scene sideways by at least 16 pixels and half its width.

    :param side: 'left' or 'right' in the picture; '' draws it.
    :param target: colour and shape of the thing to move; ``None`` draws it.
    :return: (the scene afterwards, index of the thing), or ``None`` when nothing could move.
    """
    side = side or pick(rng, ('left', 'right'))
    options = [i for i, t in enumerate(scene.things) if t.visible >= 0.6
               and (target is None or (t.colour, t.shape) == target)]
    if not options:
        return None
    for _ in range(6):
        index = pick(rng, options)
        old = scene.things[index]
        width = old.box[2] - old.box[0]
        shift = uniform(rng, max(16.0, 0.5 * width), 110.0 + 0.5 * width)
        shift = -shift if side == 'left' else shift
        camera = scene.camera
        new = copy.copy(old)
        new.z = old.z * uniform(rng, 0.93, 1.07)
        new.x = old.x + shift / camera.focal * old.depth
        new.hidden = 0.0
        placed = bounding_box(camera, new.shape, new.x, new.z, new.sx, new.tall, new.sz, new.yaw)
        if placed is None:
            continue
        new.box, new.depth = placed
        if abs(new.centre[0] - old.centre[0]) < max(14.0, 0.4 * width):
            continue
        # The decal is drawn in picture coordinates: it moves and scales with its thing.
        zoom = (new.box[3] - new.box[1]) / (old.box[3] - old.box[1])
        u, v, size = old.decal
        new.decal = (u + new.centre[0] - old.centre[0],
                     new.box[1] + (v - old.box[1]) * zoom, size * zoom)
        after = _rebuild(rng, scene, index, new)
        if after is not None:
            return after, index
    return None


def _rebuild(rng: Random, scene: Scene, index: int, new) -> Scene | None:
    """Place all things again with one of them moved; ``None`` when one would be hidden."""
    from qwen_vl_ros.roboscene.scene import _fits
    env = dict(scene.env)
    env['noise_seed'] = float(int(rng.random() * (1 << 23)))
    # The moved thing is checked last, against all others where they stood.
    others = [copy.copy(t) for i, t in enumerate(scene.things) if i != index]
    bare = Scene(scene.camera, env)
    for thing in others:
        thing.hidden = 0.0
        if not _fits(bare, thing, Plan(), 99):
            return None
        bare.things.append(thing)
    if not _fits(bare, new, Plan(), 99) or new.visible < 0.6:
        return None
    bare.things.insert(index, new)
    return bare
