"""What an engine is told at load, and what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.patches import smart_resize, uniform_keep
from qwen_vl_ros.engine.request import Selector

#: What the encoder can run in.
ENGINES = ('native', 'torch', 'tensorrt')


@dataclass(frozen=True)
class ModelInfo:
    """
    What is loaded.

    :param name: of the folder or hub repository.
    :param revision: commit of a hub snapshot, else a digest of config and weights.
    :param dtype: of weights and activations.
    :param quantization: 'none'.
    :param device: 'cpu' or 'cuda:N'.
    :param weight_bytes: that one decoded token reads (decoder and output matrix).
    :param vision_weight_bytes: that one picture reads.
    :param min_pixels: least pixels of a resized picture.
    :param max_pixels: most pixels of a resized picture; 784 make one token.
    :param max_context: most tokens of prompt and answer together.
    :param image_processor: the resampler in use; others give slightly different bytes.
    :param engine_version: of this package.
    :param load_time_s: seconds that loading took.
    :param approximate: options of loading in force that can change answers beyond rounding, by
        name.
    """

    name: str
    revision: str
    dtype: str
    quantization: str
    device: str
    weight_bytes: int
    vision_weight_bytes: int
    min_pixels: int
    max_pixels: int
    max_context: int
    image_processor: str
    engine_version: str
    load_time_s: float
    approximate: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """
    How an engine behaves; all can stay as they are.

    :param max_context: tokens of prompt and answer together.
    :param min_pixels: of a resized picture.
    :param max_pixels: of a resized picture.
    :param prefill_chunk: tokens between two looks at cancel and deadline at most; fewer where
        those would keep a cancel waiting.
    :param repetition_window: see :func:`qwen_vl_ros.engine.generate.repeats`; 0 is off.
    :param cache_slots: sequences kept for prefix reuse.
    :param max_sequences: requests that run beside each other (see schedule.py); each needs a cache
        of ``max_context`` tokens, which afterwards serves prefix reuse.
    :param cache_bytes: most memory of all caches; 0 is no limit. Fewer requests then run beside
        each other.
    :param selector: chooses units where a request's keep_ratio is under 1.
    :param preprocess: where pictures become patch embeddings: cpu, gpu, or auto, which measures
        both for every size of picture (see offload.py).
    :param encoder_device: of the encoder, where it is not the decoder's: cpu or cuda:N.
    :param interconnect: file of ``qwen_vl interconnect --json``: how bytes go between the two;
        empty is one direct copy.
    :param vision_quantization: of the encoder, none or int8; approximate, and given up at load
        where it changes merged tokens too much (see quantize_vision.py).
    :param vision_engine: what the encoder runs in: native (kernels where there are any), torch or
        tensorrt (see tensorrt.py).
    """

    max_context: int = 4096
    min_pixels: int = 56 * 56
    max_pixels: int = 1280 * 28 * 28
    prefill_chunk: int = 1536
    repetition_window: int = 48
    cache_slots: int = 2
    max_sequences: int = 1
    cache_bytes: int = 0
    selector: Selector = uniform_keep
    preprocess: str = 'auto'
    encoder_device: str = ''
    interconnect: str = ''
    vision_quantization: str = 'none'
    vision_engine: str = 'native'


def cache_count(options: Options, one: int) -> int:
    """
    Return how many caches there may be.

    :param one: bytes of a cache.
    :raises EngineError: BAD_REQUEST when the memory allowed does not hold one.
    """
    wanted = max(options.cache_slots, options.max_sequences)
    if not options.cache_bytes:
        return wanted
    if options.cache_bytes < one:
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f'cache_bytes {options.cache_bytes} does not hold one cache of {one} bytes '
            f'({options.max_context} tokens); lower max_context or allow more')
    return min(wanted, options.cache_bytes // one)


def check_options(options: Options, factor: int, max_positions: int) -> None:
    """:raises EngineError: BAD_REQUEST that names the option and its range."""
    unit = factor * factor
    if not 0 < options.min_pixels <= options.max_pixels or options.max_pixels < unit:
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f'min_pixels {options.min_pixels} and max_pixels {options.max_pixels}: expected '
            f'0 < min_pixels <= max_pixels and max_pixels >= {unit}')
    if not 16 <= options.max_context <= max_positions:
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f'max_context {options.max_context} lies outside 16 to {max_positions}')
    if (min(options.prefill_chunk, options.cache_slots, options.max_sequences) < 1
            or min(options.repetition_window, options.cache_bytes) < 0):
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            'prefill_chunk, cache_slots and max_sequences must be at least 1, repetition_window '
            'and cache_bytes at least 0')
    if options.vision_engine not in ENGINES:
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f"vision_engine '{options.vision_engine}' is not one of {', '.join(ENGINES)}")
    h, w = smart_resize(3000, 4000, options.min_pixels, options.max_pixels, factor)
    if h * w > options.max_pixels:
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f'a picture of 4000x3000 is resized to {w}x{h}, over max_pixels {options.max_pixels}')
