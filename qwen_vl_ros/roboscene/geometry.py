"""Pinhole projection and the unit grid: where things appear and which 2x2 units they touch."""

from __future__ import annotations

import math
from dataclasses import dataclass

WIDTH, HEIGHT = 448, 336
UNIT = 28
GRID_W, GRID_H = WIDTH // UNIT, HEIGHT // UNIT
UNITS = GRID_W * GRID_H

_RING = tuple((math.cos(2 * math.pi * i / 16), math.sin(2 * math.pi * i / 16)) for i in range(16))


@dataclass(frozen=True)
class Camera:
    """
    A pinhole camera at (0, height, 0), looking along +z and pitched down.

    :param height: metres over the floor.
    :param pitch: radians, positive looks down.
    :param focal: pixels.
    :param cx: principal point, pixels.
    :param cy: principal point, pixels.
    """

    height: float
    pitch: float
    focal: float
    cx: float
    cy: float

    def project(self, x: float, y: float, z: float) -> tuple[float, float, float]:
        """Return (u, v, depth) of a point; the depth is along the optical axis."""
        cos, sin = math.cos(self.pitch), math.sin(self.pitch)
        down = y - self.height
        depth = z * cos - down * sin
        return (self.cx + self.focal * x / depth,
                self.cy - self.focal * (down * cos + z * sin) / depth, depth)


def bounding_box(camera: Camera, shape: str, x: float, z: float, sx: float, tall: float,
                 sz: float, yaw: float
                 ) -> tuple[tuple[float, float, float, float], float] | None:
    """
    Project an object's silhouette.

    :return: ((u0, v0, u1, v1) in pixels, depth of the centre), or ``None`` when a part of it is
        closer than 0.3 m to the camera plane.
    """
    cos, sin, f = math.cos(camera.pitch), math.sin(camera.pitch), camera.focal
    h = camera.height
    depth = z * cos - (tall / 2 - h) * sin
    if depth < 0.6:
        return None
    if shape == 'ball':
        up = (sx - h) * cos + z * sin
        centre = z * cos - (sx - h) * sin
        if centre < sx + 0.3:
            return None
        spread = centre * centre - sx * sx
        across = sx * math.sqrt(x * x + centre * centre - sx * sx)
        along = sx * math.sqrt(up * up + centre * centre - sx * sx)
        return ((camera.cx + f * (x * centre - across) / spread,
                 camera.cy - f * (up * centre + along) / spread,
                 camera.cx + f * (x * centre + across) / spread,
                 camera.cy - f * (up * centre - along) / spread), depth)
    c, s = math.cos(yaw), math.sin(yaw)
    points: list[tuple[float, float, float]]
    if shape in ('box', 'pallet'):
        points = [(x + px * c - pz * s, y, z + pz * c + px * s)
                  for px in (-sx, sx) for pz in (-sz, sz) for y in (0.0, tall)]
    elif shape == 'cone':
        points = [(x + sx * a, 0.0, z + sx * b) for a, b in _RING]
        points.append((x, tall, z))
    else:
        # A barrel is sqrt(0.55) as wide at its ends as in its middle (render.h: bulge 0.45).
        ends = sx * 0.7416 if shape == 'barrel' else sx
        points = [(x + ends * a, y, z + ends * b) for a, b in _RING for y in (0.0, tall)]
        if shape == 'barrel':
            points += [(x + sx * a, tall / 2, z + sx * b) for a, b in _RING]
    u0 = v0 = 1e9
    u1 = v1 = -1e9
    for px, py, pz in points:
        down = py - h
        d = pz * cos - down * sin
        if d < 0.3:
            return None
        u, v = f * px / d, -f * (down * cos + pz * sin) / d
        u0, u1 = min(u0, u), max(u1, u)
        v0, v1 = min(v0, v), max(v1, v)
    return (camera.cx + u0, camera.cy + v0, camera.cx + u1, camera.cy + v1), depth


def unit_of(u: float, v: float) -> int:
    """Return the raster index of the unit that holds pixel (u, v), clipped to the picture."""
    column = min(GRID_W - 1, max(0, int(u // UNIT)))
    row = min(GRID_H - 1, max(0, int(v // UNIT)))
    return row * GRID_W + column


def units_of_box(box: tuple[float, float, float, float], margin: float = 1.0) -> frozenset[int]:
    """
    Return the units that a bounding box touches by more than ``margin`` pixels.

    :param box: (u0, v0, u1, v1) in pixels; parts outside the picture are cut off.
    """
    u0, v0 = max(0.0, box[0] + margin), max(0.0, box[1] + margin)
    u1, v1 = min(WIDTH - 1.0, box[2] - margin), min(HEIGHT - 1.0, box[3] - margin)
    if u1 < u0 or v1 < v0:
        return frozenset()
    return frozenset(row * GRID_W + column
                     for row in range(int(v0 // UNIT), int(v1 // UNIT) + 1)
                     for column in range(int(u0 // UNIT), int(u1 // UNIT) + 1))
