"""
Scenes as data: a camera over a floor, three to twelve objects, light, haze and sensor.

Everything is drawn from one ``random.Random``: the same seed gives the same scene on every
machine. Placement is by rejection on projected bounding boxes: an object stays visible for at
least :data:`MIN_VISIBLE` of its box, whatever stands before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

from qwen_vl_ros.roboscene.geometry import HEIGHT, WIDTH, Camera, bounding_box

COLOURS: dict[str, tuple[float, float, float]] = {
    'red': (0.80, 0.10, 0.09),
    'orange': (0.95, 0.47, 0.06),
    'yellow': (0.93, 0.83, 0.12),
    'green': (0.13, 0.58, 0.18),
    'blue': (0.10, 0.25, 0.75),
    'purple': (0.48, 0.16, 0.60),
    'white': (0.93, 0.93, 0.92),
    'black': (0.07, 0.07, 0.08),
}
SHAPES = ('box', 'cylinder', 'cone', 'ball', 'pallet', 'barrel')
PLURALS = {'box': 'boxes', 'cylinder': 'cylinders', 'cone': 'cones', 'ball': 'balls',
           'pallet': 'pallets', 'barrel': 'barrels'}
#: Pairs that no training scene contains; the ``heldout`` split asks about them.
HELD_OUT = frozenset({('purple', 'barrel'), ('orange', 'ball'), ('green', 'pallet'),
                      ('white', 'cone'), ('blue', 'cylinder'), ('red', 'box')})
SPLITS = ('train', 'test', 'heldout', 'shift')

MAX_OBJECTS = 12
MIN_VISIBLE = 0.5
#: The robot's half width and the length of its path, in camera heights. Scale-free: both can be
#: judged from the picture alone, whatever the height of the camera.
CORRIDOR_HALF = 0.6
CORRIDOR_LENGTH = 5.0
#: Objects between these bounds are neither clearly in the path nor clearly beside it.
CORRIDOR_CLEAR = (0.45, 0.8, 4.2, 6.0)


@dataclass
class Thing:
    """
    One object: what it is, where it stands (metres), and where it appears (pixels).

    :param sx: half width of boxes and pallets, radius of the others.
    :param tall: height.
    :param sz: half depth of boxes and pallets, radius of the others.
    :param box: projected bounding box (u0, v0, u1, v1), not clipped to the picture.
    :param depth: distance along the optical axis.
    :param hidden: pixels of its box covered by nearer boxes (an upper bound).
    """

    shape: str
    colour: str
    x: float
    z: float
    sx: float
    tall: float
    sz: float
    yaw: float
    rgb: tuple[float, float, float] = (0.0, 0.0, 0.0)
    grain: float = 0.0
    number: str = ''
    decal: tuple[float, float, float] = (0.0, 0.0, 0.0)
    box: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    depth: float = 0.0
    hidden: float = 0.0

    @property
    def name(self) -> str:
        """Return colour and shape as a person says them."""
        return f'{self.colour} {self.shape}'

    @property
    def area(self) -> float:
        """Return the area of the whole bounding box in square pixels."""
        return (self.box[2] - self.box[0]) * (self.box[3] - self.box[1])

    @property
    def centre(self) -> tuple[float, float]:
        """Return the centre of the bounding box in pixels."""
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    @property
    def size(self) -> float:
        """Return the longer side of the bounding box in pixels."""
        return max(self.box[2] - self.box[0], self.box[3] - self.box[1])

    @property
    def visible(self) -> float:
        """Return a lower bound of the share of the box that is inside the picture and free."""
        u0, v0, u1, v1 = self.box
        inside = (max(0.0, min(u1, WIDTH) - max(u0, 0.0))
                  * max(0.0, min(v1, HEIGHT) - max(v0, 0.0)))
        return (inside - self.hidden) / self.area


@dataclass
class Scene:
    """A camera, a room and its things; ``env`` holds the renderer's remaining numbers."""

    camera: Camera
    env: dict[str, float]
    things: list[Thing] = field(default_factory=list)

    def in_corridor(self, thing: Thing) -> int:
        """Return 1 when the thing clearly blocks the path, 0 when clearly not, else -1."""
        inner, outer, near, far = CORRIDOR_CLEAR
        h = self.camera.height
        # A bounding circle decides "outside", an inscribed one "inside".
        reach = math.hypot(thing.sx, thing.sz) if thing.shape in ('box', 'pallet') else thing.sx
        core = min(thing.sx, thing.sz)
        if abs(thing.x) - core < inner * h and thing.z - core < near * h:
            return 1
        if abs(thing.x) - reach > outer * h or thing.z - reach > far * h:
            return 0
        return -1

    def unique(self, thing: Thing) -> bool:
        """Return whether no other thing has this colour and shape."""
        return sum(t.colour == thing.colour and t.shape == thing.shape for t in self.things) == 1


@dataclass(frozen=True)
class Plan:
    """
    What a scene must contain.

    :param count: number of things; 0 draws it.
    :param matching: the first ``matching[2]`` things have colour ``matching[0]`` and shape
        ``matching[1]`` ('' is any) and no other thing has both.
    :param far: the first things stand far away (at most one unit large).
    :param numbers: the first things are near and carry a number.
    :param blocked: None draws freely; else whether a thing stands in the path.
    :param target: colour and shape of the first thing (held-out pairs).
    """

    count: int = 0
    matching: tuple[str, str, int] | None = None
    far: int = 0
    numbers: int = 0
    blocked: bool | None = None
    target: tuple[str, str] | None = None


def uniform(rng: Random, low: float, high: float) -> float:
    """Draw from [low, high)."""
    return low + (high - low) * rng.random()


def pick(rng: Random, options):
    """Draw one element (stable over Python versions, unlike ``Random.choice``)."""
    return options[int(rng.random() * len(options))]


def sample_scene(rng: Random, split: str, plan: Plan = Plan()) -> Scene | None:
    """
    Draw a scene, or ``None`` when the plan did not fit into the picture (draw again).

    :param rng: source of everything random.
    :param split: 'train' and 'test' share distributions, 'heldout' allows the held-out pairs,
        'shift' has other cameras, textures and light, 'wide' is 'train' with more cameras.
    :param plan: what the scene must contain.
    """
    camera = _camera(rng, split)
    scene = Scene(camera, _environment(rng, split))
    count = plan.count or 3 + int(10 * rng.random() * rng.random())
    kinds = _kinds(rng, split, plan, count)
    misses = 0
    for index, (colour, shape) in enumerate(kinds):
        placed = False
        for _ in range(14):
            thing = _place(rng, scene, colour, shape,
                           far=index < plan.far, near=index < plan.numbers,
                           path=plan.blocked is True and index == 0)
            if thing is not None and _fits(scene, thing, plan, index):
                scene.things.append(thing)
                placed = True
                break
        needed = (index < plan.far or index < plan.numbers or (plan.blocked is True and index == 0)
                  or (plan.matching is not None and index < plan.matching[2])
                  or (plan.target is not None and index == 0))
        if not placed:
            misses += 1
            if needed:
                return None
    if len(scene.things) < 2:
        return None
    for index, thing in enumerate(scene.things):
        if index < plan.numbers or (rng.random() < 0.35):
            _number(rng, thing)
    return scene


def _camera(rng: Random, split: str) -> Camera:
    if split == 'shift':
        height, pitch, view = uniform(rng, 0.95, 1.25), uniform(rng, 14, 21), uniform(rng, 56, 62)
    elif split == 'wide':
        height, pitch, view = uniform(rng, 0.4, 1.1), uniform(rng, 5, 19), uniform(rng, 58, 84)
    else:
        height, pitch, view = uniform(rng, 0.5, 0.95), uniform(rng, 7, 18), uniform(rng, 62, 80)
    focal = WIDTH / 2 / math.tan(math.radians(view) / 2)
    return Camera(height, math.radians(pitch), focal, WIDTH / 2 + uniform(rng, -6, 6),
                  HEIGHT / 2 + uniform(rng, -6, 6))


#: Grey photographs in the texture bank by split; -1 is value noise.
TEXTURES = {'train': (-1, -1, 0, 1, 2, 3), 'shift': (4, 5)}


def _environment(rng: Random, split: str) -> dict[str, float]:
    bank = TEXTURES['shift' if split == 'shift' else 'train']
    elevation, azimuth = uniform(rng, 0.6, 1.3), uniform(rng, 0.0, 2 * math.pi)
    floor, wall = uniform(rng, 0.28, 0.75), uniform(rng, 0.35, 0.85)
    haze = uniform(rng, 0.55, 0.85)
    env = {
        'light_x': math.cos(elevation) * math.cos(azimuth), 'light_y': math.sin(elevation),
        'light_z': math.cos(elevation) * math.sin(azimuth), 'ambient': uniform(rng, 0.4, 0.7),
        'haze': uniform(rng, 0.0, 0.05), 'wall_z': uniform(rng, 12.5, 18.0),
        'wall_x': uniform(rng, 4.0, 9.0), 'ceiling': uniform(rng, 2.6, 4.5),
        'floor_tex': float(pick(rng, bank)), 'floor_scale': uniform(rng, 0.4, 1.3),
        'floor_contrast': uniform(rng, 0.1, 0.9), 'wall_tex': float(pick(rng, bank)),
        'wall_scale': uniform(rng, 0.2, 0.8), 'wall_contrast': uniform(rng, 0.0, 0.7),
        'blur': uniform(rng, 0.0, 0.2), 'noise': uniform(rng, 1.5, 6.0),
        'quality': uniform(rng, 60.0, 95.0) if rng.random() < 0.6 else 0.0,
        'exposure': uniform(rng, 0.85, 1.15), 'seed': float(int(rng.random() * (1 << 23))),
    }
    for name, level, spread in (('floor', floor, 0.06), ('wall', wall, 0.06),
                                ('haze', haze, 0.03), ('gain', 1.0, 0.06)):
        for channel in 'rgb':
            env[f'{name}_{channel}'] = level + uniform(rng, -spread, spread)
    return env


def _kinds(rng: Random, split: str, plan: Plan, count: int) -> list[tuple[str, str]]:
    colours = tuple(COLOURS)
    kinds: list[tuple[str, str]] = []
    colour, shape, wanted = plan.matching or ('', '', 0)
    while len(kinds) < min(count, MAX_OBJECTS):
        index = len(kinds)
        if plan.target is not None and index == 0:
            kinds.append(plan.target)
            continue
        pair = (pick(rng, colours), pick(rng, SHAPES))
        if plan.matching is not None:
            if index < wanted:
                pair = (colour or pair[0], shape or pair[1])
            else:
                # Distractors share one of the two attributes half of the time.
                share = rng.random()
                if colour and shape and share < 0.5:
                    pair = (colour, pair[1]) if share < 0.25 else (pair[0], shape)
                if (not colour or pair[0] == colour) and (not shape or pair[1] == shape):
                    continue
        if split != 'heldout' and pair in HELD_OUT:
            if plan.matching is not None and (colour, shape) in HELD_OUT:
                return []
            continue
        if plan.target is not None and pair == plan.target:
            continue
        kinds.append(pair)
    return kinds


_SIZES = {  # half width or radius, height, half depth (metres)
    'box': ((0.16, 0.38), (0.28, 0.75), (0.16, 0.38)),
    'cylinder': ((0.10, 0.22), (0.45, 1.05), None),
    'cone': ((0.16, 0.32), (0.40, 0.85), None),
    'ball': ((0.13, 0.33), None, None),
    'pallet': ((0.42, 0.62), (0.12, 0.17), (0.36, 0.52)),
    'barrel': ((0.24, 0.36), (0.65, 1.0), None),
}


def _place(rng: Random, scene: Scene, colour: str, shape: str, *, far: bool, near: bool,
           path: bool) -> Thing | None:
    width, height, depth = _SIZES[shape]
    sx = uniform(rng, *width)
    tall = uniform(rng, *height) if height else 2 * sx
    sz = uniform(rng, *depth) if depth else sx
    camera = scene.camera
    if far:
        z = uniform(rng, 6.5, 12.0)
    elif path:
        z = uniform(rng, 1.3, 4.0 * camera.height)
    elif near:
        z = math.exp(uniform(rng, math.log(1.5), math.log(4.5)))
    else:
        z = math.exp(uniform(rng, math.log(1.4), math.log(12.0)))
    if path:
        x = uniform(rng, -0.4, 0.4) * camera.height
    else:
        u = uniform(rng, 4.0, WIDTH - 4.0)
        x = (u - camera.cx) / camera.focal * z * math.cos(camera.pitch)
    if abs(x) > scene.env['wall_x'] - 0.6:
        return None
    base = COLOURS[colour]
    gain = uniform(rng, 0.85, 1.1)
    rgb = tuple(min(0.98, max(0.03, c * gain + uniform(rng, -0.03, 0.03))) for c in base)
    thing = Thing(shape, colour, x, z, sx, tall, sz, uniform(rng, -0.8, 0.8),
                  rgb, uniform(rng, 0.0, 0.25))  # type: ignore[arg-type]
    placed = bounding_box(camera, shape, x, z, sx, tall, sz, thing.yaw)
    if placed is None:
        return None
    thing.box, thing.depth = placed
    return thing


def _fits(scene: Scene, thing: Thing, plan: Plan, index: int) -> bool:
    u0, v0, u1, v1 = thing.box
    if v1 - v0 < 9 or u1 - u0 < 8 or u1 - u0 > 0.55 * WIDTH or v1 - v0 > 0.8 * HEIGHT:
        return False
    if index < plan.far and not 9 <= thing.size <= 28:
        return False
    if index < plan.numbers and (thing.shape == 'pallet' or v1 - v0 < 34 or u1 - u0 < 26):
        return False
    wanted = 0.9 if index < max(plan.far, plan.numbers) else 0.65
    if thing.visible < wanted:
        return False
    # With a stated path every thing must be clearly in it or clearly beside it.
    if plan.blocked is not None:
        lies = scene.in_corridor(thing)
        if lies == -1 or (lies == 1 and plan.blocked is False):
            return False
        if plan.blocked and index == 0 and lies != 1:
            return False
    changes: list[tuple[Thing, float]] = []
    own = 0.0
    for other in scene.things:
        gap = math.hypot(thing.x - other.x, thing.z - other.z)
        if gap < max(thing.sx, thing.sz) + max(other.sx, other.sz) + 0.05:
            return False
        w = min(u1, other.box[2]) - max(u0, other.box[0])
        h = min(v1, other.box[3]) - max(v0, other.box[1])
        if w <= 0 or h <= 0:
            continue
        if thing.depth < other.depth:
            if (other.visible * other.area - w * h) / other.area < MIN_VISIBLE:
                return False
            changes.append((other, w * h))
        else:
            own += w * h
    if thing.visible - own / thing.area < (0.85 if index < max(plan.far, plan.numbers)
                                           else MIN_VISIBLE):
        return False
    for other, covered in changes:
        other.hidden += covered
    thing.hidden = own
    return True


def _number(rng: Random, thing: Thing) -> None:
    """Put a number on the thing when a digit of at least ten pixels fits on it."""
    u0, v0, u1, v1 = thing.box
    if thing.shape == 'pallet' or thing.visible < 0.85:
        return
    digits = 1 + int(3 * rng.random())
    part = {'box': 0.62, 'cylinder': 0.86, 'cone': 0.42, 'ball': 0.7, 'barrel': 0.72}[thing.shape]
    for n in range(digits, 0, -1):
        height = min(40.0, (u1 - u0) * part / (0.68 * n + 0.32), (v1 - v0) * 0.42)
        if height >= 10:
            first = 1 + int(9 * rng.random()) if n > 1 else int(10 * rng.random())
            rest = [int(10 * rng.random()) for _ in range(n - 1)]
            thing.number = ''.join(map(str, [first, *rest]))
            low = {'cone': 0.72, 'box': 0.58}.get(thing.shape, 0.52)
            height *= uniform(rng, 0.85, 1.0) if height > 12 else 1.0
            thing.decal = ((u0 + u1) / 2, v0 + low * (v1 - v0), height)
            return
