"""
Frames to uint8 patches in the order in which the encoder merges them.

The resampler is Pillow's bicubic (a = -0.5, antialiased, 8-bit), which is what transformers' PIL
image processor uses; torchvision's differs from it by up to 2 of 255. The native kernel gives the
same bytes as the installed Pillow, and is taken where it is built.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from PIL import Image

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.kernels.patches import PATCH, accepts, default_patcher

#: OpenAI CLIP's channel statistics; :mod:`qwen_vl_ros.engine.vision` folds them into the weights.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)

#: Longest side over shortest side that the resize accepts, as in transformers.
MAX_ASPECT = 200

#: Pillow before 9.1 (Ubuntu 22.04 has 9.0) knows the filter by this name only.
BICUBIC = getattr(Image, 'Resampling', Image).BICUBIC

Grid = tuple[int, int, int]


def smart_resize(
    height: int, width: int, min_pixels: int, max_pixels: int, factor: int = 28,
) -> tuple[int, int]:
    """
    Return the size that a picture is resized to before it is cut into patches.

    Each side is the nearest multiple of ``factor`` (ties to even); where the area leaves
    [min_pixels, max_pixels] both sides are scaled alike, rounding inwards.

    :return: (height, width), multiples of ``factor``.
    :raises EngineError: BAD_REQUEST for a side ratio above :data:`MAX_ASPECT`.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f'a picture of {width}x{height} is too narrow: sides may differ by a factor of '
            f'{MAX_ASPECT} at most')
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        h = max(factor, math.floor(height / scale / factor) * factor)
        w = max(factor, math.floor(width / scale / factor) * factor)
    elif h * w < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        h = math.ceil(height * scale / factor) * factor
        w = math.ceil(width * scale / factor) * factor
    return h, w


def resize_rgb(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    """
    Resize with antialiased bicubic interpolation.

    :param rgb: uint8 [H, W, 3].
    :return: uint8 [height, width, 3]; the input itself where the size already fits.
    """
    if rgb.shape[:2] == (height, width):
        return rgb
    picture = Image.fromarray(np.ascontiguousarray(rgb))
    return np.asarray(picture.resize((width, height), BICUBIC))


def grid_of(
    frames: Sequence[Frame], min_pixels: int, max_pixels: int, factor: int = 28,
) -> Grid:
    """
    Return (t, h, w) in patches; a clip takes the size of its first frame.

    :raises EngineError: BAD_REQUEST where no size within the pixel limit fits the picture.
    """
    first = frames[0]
    h, w = smart_resize(first.height, first.width, min_pixels, max_pixels, factor)
    if h * w > max_pixels:
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f'a picture of {first.width}x{first.height} needs {w}x{h} = {w * h} pixels, '
            f'more than the limit of {max_pixels}')
    t = 1 if len(frames) == 1 else (len(frames) + 1) // 2
    return t, h * 2 // factor, w * 2 // factor


def extract_patches(
    frames: Sequence[Frame], grid: Grid, patch: int = PATCH, out: np.ndarray | None = None,
) -> np.ndarray:
    """
    Resize frames and cut them into patches in unit order.

    Tokens run over (slice, unit row, unit column, row in unit, column in unit), features over
    (channel, row, column) for a still and (channel, frame of the pair, row, column) for a clip.

    :param frames: one frame (a still) or several (a clip; an odd one repeats its last frame).
    :param grid: (t, h, w) of :func:`grid_of`.
    :param out: of a still: uint8 [h*w, 3*patch*patch] to write into, such as pinned memory.
    :return: uint8 [t*h*w, 3*patch*patch] or, for a clip, [t*h*w, 2*3*patch*patch].
    """
    native = native_patches(frames, grid, out) if patch == PATCH else None
    if native is not None:
        return native
    made = pillow_patches(frames, grid, patch)
    if out is None:
        return made
    out[:] = made
    return out


def native_patches(
    frames: Sequence[Frame], grid: Grid, out: np.ndarray | None = None,
) -> np.ndarray | None:
    """
    Do what :func:`extract_patches` says in one pass over the cameras' own buffers.

    :param out: of a still, see there.
    :return: ``None`` where the kernel is not built, and for frames that it does not take (a side
        under 28 pixels).
    """
    patcher = default_patcher()
    if patcher is None or not all(map(accepts, frames)):
        return None
    t, h, w = grid
    if len(frames) == 1:
        return patcher.patches(frames[0], h * PATCH, w * PATCH, out)
    out = np.empty((t, h * w, 3, 2, PATCH * PATCH), np.uint8)
    for i, frame in enumerate(frames):
        patcher.patches(frame, h * PATCH, w * PATCH, out[i // 2, :, :, i % 2])
    if len(frames) % 2:
        out[-1, :, :, 1] = out[-1, :, :, 0]
    return out.reshape(t * h * w, -1)


def pillow_patches(frames: Sequence[Frame], grid: Grid, patch: int = PATCH) -> np.ndarray:
    """Do what :func:`extract_patches` says with Pillow and numpy."""
    t, h, w = grid
    pictures = [resize_rgb(frame.rgb(), h * patch, w * patch) for frame in frames]
    if len(pictures) == 1:
        # [H, W, C] -> unit row, row, y | unit column, column, x | channel
        cut = pictures[0].reshape(h // 2, 2, patch, w // 2, 2, patch, 3)
        return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(h * w, -1)
    if len(pictures) % 2:
        pictures.append(pictures[-1])
    cut = np.stack(pictures).reshape(t, 2, h // 2, 2, patch, w // 2, 2, patch, 3)
    return np.ascontiguousarray(cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)).reshape(t * h * w, -1)


def uniform_keep(
    frames: Sequence[Frame], grid: Grid, ratio: float, question: str = '',
) -> np.ndarray:
    """
    Choose units spread evenly over every slice, whatever the picture shows.

    Units are ranked by the bit-reversed interleaving of row and column (the order in which an
    ordered-dither matrix of Bayer fills), so that the kept ones of any ratio lie far apart.

    :param frames: not looked at, nor is the question; selectors that look share this signature.
    :param grid: (t, h, w) in patches.
    :param ratio: share to keep, (0, 1].
    :return: bool [t * h/2 * w/2], the same for every slice, at least one unit each.
    """
    t, rows, cols = grid[0], grid[1] // 2, grid[2] // 2
    keep = np.zeros(rows * cols, bool)
    keep[_spread_order(rows, cols)[:max(1, round(ratio * rows * cols))]] = True
    return np.tile(keep, t)


@lru_cache(32)
def _spread_order(rows: int, cols: int) -> np.ndarray:
    """Return the units in the order of :func:`spread_rank`; cameras keep their size."""
    order = np.argsort(spread_rank(rows, cols), kind='stable')
    order.flags.writeable = False
    return order


def spread_rank(rows: int, cols: int) -> np.ndarray:
    """Return int64 [rows * cols]: the units of the lowest ranks lie evenly spread."""
    bits = max(rows - 1, cols - 1, 1).bit_length()
    r, c = np.divmod(np.arange(rows * cols), cols)
    rank = np.zeros(rows * cols, np.int64)
    for bit in range(bits):
        pair = ((r ^ c) >> bit & 1) * 2 + (r >> bit & 1)
        rank |= pair << 2 * (bits - 1 - bit)
    return rank


def content_key(frames: Sequence[Frame], grid: Grid, keep: np.ndarray | None) -> int:
    """
    Return a positive 62-bit digest of pixels, size and kept units; equal keys, equal features.

    A frame is hashed once, however many clips of a window it is part of.

    :param keep: bool mask of the units or ``None``.
    """
    digest = hashlib.blake2b(repr((grid, len(frames))).encode(), digest_size=8)
    for frame in frames:
        digest.update(frame.digest)
    if keep is not None:
        digest.update(np.packbits(keep).tobytes())
    return int.from_bytes(digest.digest(), 'little') >> 2
