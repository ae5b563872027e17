"""Scenes as the flat float arrays that ``kernels/roboscene/render.h`` reads."""

from __future__ import annotations

import math

import numpy as np

from qwen_vl_ros.roboscene.scene import MAX_OBJECTS, SHAPES, Scene

ENV_FLOATS, OBJECT_FLOATS = 40, 24
_NAMES = ('light_x', 'light_y', 'light_z', 'ambient', 'haze', 'haze_r', 'haze_g', 'haze_b',
          'wall_z', 'wall_x', 'ceiling', 'floor_tex', 'floor_scale', 'floor_r', 'floor_g',
          'floor_b', 'floor_contrast', 'wall_tex', 'wall_scale', 'wall_r', 'wall_g', 'wall_b',
          'wall_contrast', 'blur', 'noise', 'quality', 'exposure', 'gain_r', 'gain_g', 'gain_b',
          'seed')


def pack(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """
    Pack one scene for the renderer.

    :return: (float32 [40] environment, float32 [12, 24] objects).
    """
    env = np.zeros(ENV_FLOATS, np.float32)
    camera = scene.camera
    env[:6] = (camera.height, math.cos(camera.pitch), math.sin(camera.pitch), camera.focal,
               camera.cx, camera.cy)
    values = [scene.env[name] for name in _NAMES]
    env[6:6 + len(values)] = values
    env[6 + len(values)] = len(scene.things)
    # Noise of its own for another picture of the same room; textures follow 'seed'.
    env[7 + len(values)] = scene.env.get('noise_seed', scene.env['seed'])
    objects = np.zeros((MAX_OBJECTS, OBJECT_FLOATS), np.float32)
    for row, t in zip(objects, scene.things):
        digits = [int(d) for d in t.number] + [0] * (3 - len(t.number))
        # Two pixels of slack: the box of round shapes comes from a ring of sixteen points.
        row[:23] = (SHAPES.index(t.shape), t.x, t.z, t.sx, t.tall, t.sz, math.cos(t.yaw),
                    math.sin(t.yaw), *t.rgb, t.grain, len(t.number), *digits, *t.decal,
                    t.box[0] - 2, t.box[1] - 2, t.box[2] + 2, t.box[3] + 2)
    return env, objects
