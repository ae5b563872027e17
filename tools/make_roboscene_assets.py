"""Make RoboScene's textures and digits (qwen_vl_ros/roboscene/data) from scikit-image's pictures.

Needs scikit-image, Pillow and the DejaVu fonts; run once, the result is committed.
All pictures used are CC0 or public domain: gravel, grass and brick (CC0Textures), chelsea and
coffee (CC0 by their photographers), moon (public domain).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from skimage import data

OUT = Path(__file__).parents[1] / 'qwen_vl_ros' / 'roboscene' / 'data'


def tile(picture: np.ndarray, box: tuple[int, int, int, int]) -> np.ndarray:
    """Crop, shrink to 128x128 grey and stretch to mean 128, deviation 40."""
    grey = Image.fromarray(picture).convert('L').crop(box).resize((128, 128), Image.LANCZOS)
    values = np.asarray(grey, np.float32)
    values = (values - values.mean()) / (values.std() + 1e-6) * 40 + 128
    return np.clip(values, 0, 255).astype(np.uint8)


def main() -> None:
    """Write textures.png and digits.png."""
    OUT.mkdir(parents=True, exist_ok=True)
    tiles = [tile(data.gravel(), (0, 0, 384, 384)), tile(data.grass(), (0, 0, 384, 384)),
             tile(data.chelsea(), (120, 60, 360, 300)), tile(data.coffee(), (0, 0, 400, 400)),
             tile(data.brick(), (0, 0, 384, 384)), tile(data.moon(), (0, 0, 384, 384))]
    Image.fromarray(np.concatenate(tiles)).save(OUT / 'textures.png', optimize=True)
    font = ImageFont.truetype('DejaVuSans-Bold.ttf', 32)
    glyphs = []
    for digit in '0123456789':
        image = Image.new('L', (20, 28))
        left, top, right, bottom = font.getbbox(digit)
        ImageDraw.Draw(image).text(((20 - right - left) / 2, (28 - bottom - top) / 2), digit,
                                   font=font, fill=255)
        glyphs.append(np.asarray(image))
    Image.fromarray(np.concatenate(glyphs)).save(OUT / 'digits.png', optimize=True)


if __name__ == '__main__':
    main()
