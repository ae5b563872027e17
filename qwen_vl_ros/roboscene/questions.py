"""
The eight question families, each answer with the units that carry its evidence.

A family is a function that looks at a scene and returns one question, or ``None`` when the scene
has none to ask. Questions are only asked where a careful person could answer: a referred object
is the only one of its name, relations have a margin, a pointed-at centre is not within
:data:`BIN_MARGIN` pixels of a bin's border.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, HEIGHT, UNIT, UNITS, WIDTH, units_of_box
from qwen_vl_ros.roboscene.scene import (
    COLOURS,
    CORRIDOR_HALF,
    CORRIDOR_LENGTH,
    HELD_OUT,
    PLURALS,
    SHAPES,
    Scene,
    Thing,
    pick,
)

FAMILIES = ('attribute', 'count', 'relation', 'pointing', 'number', 'path', 'far', 'change')
BIN_MARGIN = 2.5
FAR_SIZE = 28.0


@dataclass(frozen=True)
class Question:
    """
    One question with its answer.

    :param family: one of :data:`FAMILIES`, or 'describe' (not scored).
    :param text: what is asked.
    :param answer: what the model should say, exactly.
    :param evidence: raster indices of the units that carry the answer; for clips slice 1 counts
        on from the number of units of a picture.
    """

    family: str
    text: str
    answer: str
    evidence: frozenset[int]


def _evidence(*things: Thing) -> frozenset[int]:
    return frozenset().union(*(units_of_box(t.box) for t in things)) if things else frozenset()


def _unique(scene: Scene, **wanted: str) -> list[Thing]:
    return [t for t in scene.things if scene.unique(t)
            and all(getattr(t, k) == v for k, v in wanted.items())]


def attribute(rng: Random, scene: Scene, target: tuple[str, str] | None = None,
              want: str = '') -> Question | None:
    """Colour of the only thing of a shape, or shape of the only thing of a colour."""
    options = []
    for t in scene.things:
        if target is not None and (t.colour, t.shape) != target:
            continue
        if want != 'shape' and sum(o.shape == t.shape for o in scene.things) == 1:
            options.append((t, 'colour'))
        if want != 'colour' and sum(o.colour == t.colour for o in scene.things) == 1:
            options.append((t, 'shape'))
    if not options:
        return None
    thing, asked = pick(rng, options)
    if asked == 'colour':
        text = pick(rng, ('What colour is the {}?', 'What color is the {}?')).format(thing.shape)
        return Question('attribute', text, thing.colour, _evidence(thing))
    return Question('attribute', f'What shape is the {thing.colour} object?', thing.shape,
                    _evidence(thing))


def count(rng: Random, scene: Scene, kind: tuple[str, str] | None = None) -> Question | None:
    """How many things of a colour, a shape, or both; evidence is every thing counted."""
    if kind is None:
        seed = pick(rng, scene.things)
        mode = int(3 * rng.random())
        kind = ((seed.colour, seed.shape), (seed.colour, ''), ('', seed.shape))[mode]
    colour, shape = kind
    hits = [t for t in scene.things
            if (not colour or t.colour == colour) and (not shape or t.shape == shape)]
    noun = PLURALS[shape] if shape else 'objects'
    what = f'{colour} {noun}' if colour else noun
    text = pick(rng, ('How many {} are there?', 'How many {} do you see?')).format(what)
    return Question('count', text, str(len(hits)), _evidence(*hits))


def relation(rng: Random, scene: Scene, want: str | None = None,
             target: tuple[str, str] | None = None) -> Question | None:
    """Left of, right of, nearer than, behind: yes or no about two uniquely named things."""
    named = _unique(scene)
    want = want or pick(rng, ('yes', 'no'))
    for _ in range(8):
        if len(named) < 2:
            return None
        a, b = pick(rng, named), pick(rng, named)
        if target is not None and (a.colour, a.shape) != target:
            continue
        if a is b:
            continue
        word = pick(rng, ('left of', 'right of', 'nearer than', 'behind'))
        dx = a.centre[0] - b.centre[0]
        ratio = a.depth / b.depth
        if word in ('left of', 'right of'):
            if abs(dx) < 14:
                continue
            true = (dx < 0) == (word == 'left of')
        else:
            # Pallets are too flat to be seen far away: about them depth could be guessed blind.
            if 1 / 1.2 < ratio < 1.2 or 'pallet' in (a.shape, b.shape):
                continue
            true = (ratio < 1) == (word == 'nearer than')
        if true == (want == 'yes'):
            return Question('relation', f'Is the {a.name} {word} the {b.name}?', want,
                            _evidence(a, b))
    return None


def pointing(rng: Random, scene: Scene, target: tuple[str, str] | None = None
             ) -> Question | None:
    """Where a thing's bounding box has its centre, in bins of one unit."""
    options = []
    for t in _unique(scene):
        if target is not None and (t.colour, t.shape) != target:
            continue
        u, v = t.centre
        if not (0 <= u < WIDTH and 0 <= v < HEIGHT) or t.visible < 0.7:
            continue
        if t.box[0] < 0 or t.box[1] < 0 or t.box[2] > WIDTH or t.box[3] > HEIGHT:
            continue
        if min(u % UNIT, UNIT - u % UNIT, v % UNIT, UNIT - v % UNIT) >= BIN_MARGIN:
            options.append(t)
    if not options:
        return None
    thing = pick(rng, options)
    u, v = thing.centre
    text = pick(rng, ('Where is the {}?', 'Point to the {}.')).format(thing.name)
    return Question('pointing', text, f'<x{int(u // UNIT)}><y{int(v // UNIT)}>',
                    _evidence(thing))


def number(rng: Random, scene: Scene) -> Question | None:
    """Read the number on a thing, one to three digits."""
    options = [t for t in _unique(scene) if t.number and t.visible >= 0.85]
    if not options:
        return None
    thing = pick(rng, options)
    text = pick(rng, ('What number is on the {}?', 'Read the number on the {}.')
                ).format(thing.name)
    return Question('number', text, thing.number, _evidence(thing))


def corridor_units(scene: Scene) -> frozenset[int]:
    """Return the units that the floor of the robot's path covers in the picture."""
    h, steps = scene.camera.height, 60
    units: set[int] = set()
    for i in range(steps):
        z = 0.6 * h * (CORRIDOR_LENGTH / 0.6) ** (i / (steps - 1))
        left = scene.camera.project(-CORRIDOR_HALF * h, 0.0, z)
        right = scene.camera.project(CORRIDOR_HALF * h, 0.0, z)
        if left[2] > 0.05 and 0 <= left[1] < HEIGHT:
            units |= units_of_box((left[0], left[1], right[0], left[1]), margin=0.0)
    return frozenset(units)


def path(rng: Random, scene: Scene) -> Question | None:
    """Whether something stands in the robot's way; asked only when that is clear."""
    lies = [scene.in_corridor(t) for t in scene.things]
    if -1 in lies:
        return None
    blocking = [t for t, inside in zip(scene.things, lies) if inside == 1]
    text, yes = pick(rng, (('Is the path blocked?', bool(blocking)),
                           ('Is the path ahead free?', not blocking)))
    evidence = _evidence(*blocking) if blocking else corridor_units(scene)
    return Question('path', text, 'yes' if yes else 'no', evidence)


def far(rng: Random, scene: Scene, want: str = '', target: tuple[str, str] | None = None
        ) -> Question | None:
    """
    A small far thing (at most one unit): does it exist, or which colour has it.

    :param want: 'yes', 'no' or 'colour'; '' draws it.
    :param target: the pair asked about; for 'no' the pair that is absent; ``None`` draws it.
    """
    small = [t for t in scene.things if t.size <= FAR_SIZE and t.depth > 5.0]
    if not small:
        return None
    want = want or pick(rng, ('yes', 'no', 'colour'))
    if want == 'no':
        near = pick(rng, small)
        colour, shape = target or ((near.colour, pick(rng, SHAPES)) if rng.random() < 0.5
                                   else (pick(rng, tuple(COLOURS)), near.shape))
        like = [t for t in small if t.colour == colour or t.shape == shape]
        if (not like or (colour, shape) in HELD_OUT or shape == 'pallet'
                or any(t.colour == colour and t.shape == shape for t in scene.things)):
            return None
        return Question('far', f'Is there a small {colour} {shape} far away?', 'no',
                        _evidence(*like))
    if target is not None:
        small = [t for t in small if (t.colour, t.shape) == target]
        if not small:
            return None
    thing = pick(rng, small)
    if want == 'yes':
        return Question('far', f'Is there a small {thing.name} far away?', 'yes',
                        _evidence(thing))
    if sum(o.shape == thing.shape for o in scene.things) > 1:
        return None
    text = pick(rng, ('What colour is the small {} far away?',
                      'What color is the small {} far away?')).format(thing.shape)
    return Question('far', text, thing.colour, _evidence(thing))


def change(rng: Random, before: Scene, after: Scene, moved: int,
           kind: int | None = None) -> Question:
    """What moved between two slices; evidence is both of its places in both slices."""
    old, new = before.things[moved], after.things[moved]
    places = units_of_box(old.box) | units_of_box(new.box)
    evidence = places | frozenset(u + UNITS for u in places)
    kind = int(3 * rng.random()) if kind is None else kind
    if kind == 0:
        text = pick(rng, ('What colour is the object that moved?',
                          'What color is the object that moved?'))
        return Question('change', text, new.colour, evidence)
    if kind == 1:
        return Question('change', 'What shape is the object that moved?', new.shape, evidence)
    if kind == 2:
        side = 'left' if new.centre[0] < old.centre[0] else 'right'
        return Question('change', 'Did the object move left or right?', side, evidence)
    return Question('change', 'What moved?', f'the {new.name}', evidence)


def describe(rng: Random, scene: Scene) -> Question | None:
    """List the nearest things from left to right; not scored, it gives the stream some length."""
    nearest = sorted(scene.things, key=lambda t: t.depth)[:4]
    listed = sorted(nearest, key=lambda t: t.centre[0])
    words = ', '.join(f"{'an' if t.colour == 'orange' else 'a'} {t.name}" for t in listed)
    text = pick(rng, ('What do you see?', 'Describe the scene.'))
    return Question('describe', text, words + '.', _evidence(*listed))


#: Families that ask about one picture, by name.
STILL: dict[str, Callable[[Random, Scene], Question | None]] = {
    'attribute': attribute, 'count': count, 'relation': relation, 'pointing': pointing,
    'number': number, 'path': path, 'far': far, 'describe': describe}


def evidence_mask(question: Question, slices: int = 1) -> list[bool]:
    """Return the evidence as a keep mask over the units of all slices, raster order."""
    return [u in question.evidence for u in range(UNITS * slices)]


def answer_vocabulary() -> Sequence[str]:
    """Return every text that a question or an answer can contain, for the tokenizer."""
    lines = []
    for colour in COLOURS:
        for shape in SHAPES:
            name = f'{colour} {shape}'
            lines += [
                f'What colour is the {shape}?', f'What color is the {shape}?',
                f'What shape is the {colour} object?', colour, shape,
                f'How many {colour} {PLURALS[shape]} are there?',
                f'How many {PLURALS[shape]} do you see?',
                f'How many {colour} objects do you see?',
                f'Is the {name} left of the {name}?', f'Is the {name} right of the {name}?',
                f'Is the {name} nearer than the {name}?', f'Is the {name} behind the {name}?',
                f'Where is the {name}?', f'Point to the {name}.',
                f'What number is on the {name}?', f'Read the number on the {name}.',
                f'Is there a small {name} far away?', f'the {name}',
                f'What color is the small {shape} far away?',
                f'a {name}, an {name}, a {name}.']
    lines += ['Is the path blocked?', 'Is the path ahead free?', 'What moved?', 'yes', 'no',
              'What colour is the object that moved?', 'What shape is the object that moved?',
              'Did the object move left or right?', 'left', 'right', 'What do you see?',
              'Describe the scene.', 'You are a helpful assistant.', 'system\n', 'user\n',
              'assistant\n']
    return lines


assert GRID_W == 16 and GRID_H == 12  # the bins of pointing answers are tokens <x0>..<y11>
