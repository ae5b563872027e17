"""
FLOPs, bytes and what bounds them, stage by stage, for any picture, model and device.

The roofline model (Williams, Waterman, Patterson 2009) with a third roof: a stage cannot be faster
than its arithmetic at the peak rate, its bytes at the peak bandwidth, or its kernels at the time
that a kernel takes however little it does. Bytes are those that must cross memory once: weights,
inputs, results and the cache; what a kernel spills or re-reads comes on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qwen_vl_ros.engine import costs
from qwen_vl_ros.engine.config import LanguageConfig, VisionConfig
from qwen_vl_ros.engine.patches import smart_resize
from qwen_vl_ros.measure.devices import Mode

#: Text around a picture: chat template and a short question.
TEXT_TOKENS = 37

#: Kernels of one block when norms, biases, rotations and activations are fused into their
#: neighbours; the rest of a stage is a handful.
KERNELS_PER_BLOCK = {'encode': 7, 'prefill': 8, 'token': 8}


@dataclass(frozen=True)
class Shape:
    """A model's shape. :param tied: the output matrix is the embedding."""

    name: str
    vision: VisionConfig
    language: LanguageConfig
    tied: bool


def _official(name: str, width: int, mlp: int, heads: int, kv: int, vocab: int,
              tied: bool) -> Shape:
    return Shape(name, VisionConfig(32, 1280, 16, 5120, width, 'quick_gelu'), LanguageConfig(
        vocab, width, mlp, 28, heads, kv, 1e-6, 1e6, (16, 24, 24), 'silu', 32768), tied)


#: Qwen2-VL as published: config.json of Qwen/Qwen2-VL-2B-Instruct and -7B-Instruct.
SHAPES = {
    '2b': _official('2b', 1536, 8960, 12, 2, 151936, True),
    '7b': _official('7b', 3584, 18944, 28, 4, 152064, False),
    # models/tiny/config.json, the checkpoint that ships with the package.
    'tiny': Shape('tiny', VisionConfig(6, 256, 4, 1024, 256, 'quick_gelu'), LanguageConfig(
        512, 256, 448, 6, 4, 2, 1e-6, 100.0, (8, 12, 12), 'silu', 4096), True),
}


def find_shape(name: str) -> Shape:
    """
    Return a shape: 2b, 7b, tiny, or that of a folder or its config.json.

    :raises ValueError: for another name.
    :raises CheckpointError: for a config that is not Qwen2-VL's.
    """
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name)
    folder = path.parent if path.name == 'config.json' else path
    if not folder.is_dir():
        raise ValueError(f"model '{name}' is not one of {', '.join(SHAPES)}, and no folder")
    from qwen_vl_ros.engine.config import load_config

    config = load_config(folder)
    return Shape(folder.resolve().name, config.vision, config.language, config.tied)


@dataclass(frozen=True)
class Format:
    """
    How weights lie in memory.

    :param body: bytes of a weight of the decoder's layers.
    :param head: bytes of a weight of the output matrix.
    :param kind: whose kernels' efficiency it has: fp16, w8 or w4.
    """

    body: float
    head: float
    kind: str


#: 4 bits in groups of 128 with a 16-bit scale and a 4-bit zero point.
W4 = (4 + 20 / 128) / 8

#: The encoder, activations and cache are 16 bits wide in all but ``fp32``.
FORMATS = {
    'fp32': Format(4, 4, 'fp32'),
    'fp16': Format(2, 2, 'fp16'),
    'bf16': Format(2, 2, 'fp16'),
    'w8': Format(1, 1, 'w8'),
    'w8-head16': Format(1, 2, 'w8'),
    'w4': Format(W4, 2, 'w4'),
    'w4-head8': Format(W4, 1, 'w4'),
    'w4-all': Format(W4, W4, 'w4'),
}


@dataclass(frozen=True)
class Case:
    """
    What is asked.

    :param size: (width, height) of the camera's picture.
    :param keep: share of the 2x2 units kept, (0, 1].
    :param answer: tokens of the answer.
    :param text: tokens of the prompt that are not visual.
    :param patch: side of a patch in pixels; ``None`` is the model's.
    :param fold: both frames of a still folded into one (K 588), else 1176.
    """

    shape: Shape
    format: str = 'fp16'
    size: tuple[int, int] = (640, 480)
    keep: float = 1.0
    answer: int = 33
    text: int = TEXT_TOKENS
    patch: int | None = None
    fold: bool = True
    min_pixels: int = 56 * 56
    max_pixels: int = 1280 * 28 * 28

    @property
    def grid(self) -> tuple[int, int]:
        """Return rows and columns of patches of the resized picture."""
        patch, merge = self.patch or self.shape.vision.patch, self.shape.vision.merge
        h, w = smart_resize(self.size[1], self.size[0], self.min_pixels, self.max_pixels,
                            patch * merge)
        return h // patch, w // patch

    @property
    def patches(self) -> int:
        """Return the patches of the whole picture."""
        rows, columns = self.grid
        return rows * columns

    @property
    def tokens(self) -> int:
        """Return the merged tokens of the whole picture."""
        return self.patches // self.shape.vision.merge ** 2

    @property
    def kept(self) -> int:
        """Return the merged tokens that are encoded."""
        return max(1, round(self.keep * self.tokens))

    @property
    def features(self) -> int:
        """Return the values of a patch that meet the projection."""
        patch = self.patch or self.shape.vision.patch
        return (1 if self.fold else 2) * 3 * patch * patch

    @property
    def element(self) -> int:
        """Return the bytes of an activation."""
        return 4 if self.format == 'fp32' else 2

    @property
    def token_bytes(self) -> int:
        """Return the weight bytes that one decoded token reads."""
        body, head = costs.language_weights(self.shape.language)
        kind = FORMATS[self.format]
        return round(body * kind.body + head * kind.head)


@dataclass(frozen=True)
class StageCost:
    """
    One stage of one answer.

    :param count: times that it runs in one answer.
    :param part_of: the stage that counts it already, or empty.
    """

    name: str
    flops: int
    bytes_read: int
    bytes_written: int
    kernels: int
    count: int = 1
    part_of: str = ''

    @property
    def bytes(self) -> int:
        """Return bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def density(self) -> float:
        """Return FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def stages(case: Case) -> list[StageCost]:
    """Return the stages of an answer about one new picture; ``token`` is the mean one."""
    shape, size = case.shape, case.element
    vision, language = shape.vision, shape.language
    n = case.kept * vision.merge ** 2
    weights = costs.vision_weights(vision, case.features) * size
    prompt = case.kept + case.text
    head = round(costs.language_weights(language)[1] * FORMATS[case.format].head)
    steps = max(0, case.answer - 1)
    patch_bytes = case.patches * case.features

    def stage(name: str, cost: costs.Cost, kernels: int, **more: object) -> StageCost:
        return StageCost(name, kernels=kernels, **cost, **more)  # type: ignore[arg-type]

    return [
        StageCost('patches', 0, 3 * case.size[0] * case.size[1], patch_bytes, 0),
        StageCost('upload', 0, patch_bytes, patch_bytes, 1),
        stage('projection', costs.projection_cost(vision, case.features, n, size), 1,
              part_of='encode'),
        stage('encode', costs.encode_cost(vision, case.features, [n], weights, size),
              KERNELS_PER_BLOCK['encode'] * vision.depth + 4),
        stage('prefill', costs.decoder_cost(
            language, prompt, 0, 0, case.token_bytes, size, head),
            KERNELS_PER_BLOCK['prefill'] * language.layers + 2),
        StageCost('first_token', 2 * language.width * language.vocab, head, 0, 2),
        stage('token', costs.decoder_cost(
            language, 1, prompt + steps // 2, 1, case.token_bytes, size, head),
            KERNELS_PER_BLOCK['token'] * language.layers + 3, count=steps),
    ]


@dataclass(frozen=True)
class Limit:
    """
    What a stage takes at least on a device, milliseconds.

    :param compute: its FLOPs at the peak rate.
    :param memory: its bytes at the peak bandwidth.
    :param launches: its kernels at the time of an empty one.
    """

    compute: float
    memory: float
    launches: float

    @property
    def ms(self) -> float:
        """Return the highest of the three roofs."""
        return max(self.compute, self.memory, self.launches)

    @property
    def bound(self) -> str:
        """Return what bounds the stage: compute, memory or launches."""
        if self.ms == self.compute:
            return 'compute'
        return 'memory' if self.ms == self.memory else 'launches'


def limit(stage: StageCost, mode: Mode, launch_us: float) -> Limit:
    """Return the roofs of one run of a stage on a device."""
    return Limit(stage.flops / mode.tflops / 1e9, stage.bytes / mode.gb_s / 1e6,
                 stage.kernels * launch_us / 1e3)


def decode_limit(case: Case, mode: Mode) -> float:
    """Return tokens/s if a token cost the weights' bytes alone (an empty cache)."""
    return mode.gb_s * 1e9 / case.token_bytes


def patch_table(sizes: tuple[int, ...] = (224, 448, 512, 768, 1024),
                patches: tuple[int, ...] = (14, 16, 28)) -> Iterator[tuple[int, int, int]]:
    """Yield (picture side, patch side, whole patches), as S1's table of the source has them."""
    for side in sizes:
        for patch in patches:
            yield side, patch, (side // patch) ** 2
