"""``config.json`` of a Qwen2-VL folder as two frozen records that the forward pass reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen_vl_ros.engine.errors import CheckpointError, one_line
from qwen_vl_ros.engine.quant_files import QuantFormat, parse

#: transformers releases whose classes are known to work: the lowest, and the first refused.
TRANSFORMERS_RANGE = ((4, 57), (6, 0))

ACTIVATIONS = ('quick_gelu', 'gelu', 'gelu_pytorch_tanh', 'silu')


@dataclass(frozen=True)
class VisionConfig:
    """
    Shape of the encoder.

    :param depth: number of blocks.
    :param width: channels of a patch token.
    :param heads: attention heads of ``width // heads`` channels.
    :param mlp_width: hidden channels of a block's MLP.
    :param out_width: channels of a merged token, those of the language model.
    :param activation: of the blocks' MLP, one of :data:`ACTIVATIONS`.
    :param theta: base of the 2-D rotary frequencies.
    :param patch: side of a patch in pixels.
    :param merge: patches along each side of a merge unit (2).
    """

    depth: int
    width: int
    heads: int
    mlp_width: int
    out_width: int
    activation: str
    theta: float = 10000.0
    patch: int = 14
    merge: int = 2

    @property
    def head_dim(self) -> int:
        """Return the channels of one head."""
        return self.width // self.heads

    @property
    def factor(self) -> int:
        """Return the pixels along a side of one merge unit; picture sides are multiples of it."""
        return self.patch * self.merge


@dataclass(frozen=True)
class LanguageConfig:
    """
    Shape of the decoder.

    :param mrope_section: how many rotary frequencies turn with time, row and column.
    """

    vocab: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    eps: float
    theta: float
    mrope_section: tuple[int, int, int]
    activation: str
    max_positions: int

    @property
    def head_dim(self) -> int:
        """Return the channels of one head."""
        return self.width // self.heads


@dataclass(frozen=True)
class ModelConfig:
    """
    Both halves, the ids of the placeholders, and whether the output shares the embedding.

    :param pixel_limit: ``max_pixels`` of ``preprocessor_config.json``, the largest picture that
        the checkpoint was made for; ``None`` where the folder does not say.
    :param quant: how the decoder's matrices are stored; ``None`` is in floats.
    """

    vision: VisionConfig
    language: LanguageConfig
    tied: bool
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int
    eos_tokens: tuple[int, ...]
    pixel_limit: int | None = None
    quant: QuantFormat | None = None


def check_transformers() -> None:
    """
    Hold the installed transformers against :data:`TRANSFORMERS_RANGE`.

    :raises CheckpointError: when it lies outside.
    """
    import transformers

    low, high = TRANSFORMERS_RANGE
    found = tuple(int(part) for part in transformers.__version__.split('.')[:2])
    if not low <= found < high:
        raise CheckpointError(
            f'transformers {transformers.__version__} is installed, but at least '
            f'{low[0]}.{low[1]} and below {high[0]}.{high[1]} is needed: '
            f"pip install 'transformers>={low[0]}.{low[1]},<{high[0]}'")


def read_json(path: Path) -> dict[str, Any]:
    """:raises CheckpointError: when ``path`` does not hold a JSON object."""
    try:
        data = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        raise CheckpointError(
            f'{path} is missing; a Qwen2-VL folder has it beside its safetensors') from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f'{path} does not hold JSON: {one_line(error)}') from error
    if not isinstance(data, dict):
        raise CheckpointError(f'{path} does not hold a JSON object')
    return data


def load_config(folder: Path) -> ModelConfig:
    """
    Read and check ``config.json`` (and ``generation_config.json`` for the end tokens).

    :param folder: a Hugging Face model folder.
    :raises CheckpointError: another architecture, a shape that the forward pass does not cover, or
        a transformers release outside the supported range.
    """
    check_transformers()
    path = folder / 'config.json'
    raw = read_json(path)
    kind = raw.get('model_type')
    names = raw.get('architectures') or []
    if kind != 'qwen2_vl' or (names and 'Qwen2VLForConditionalGeneration' not in names):
        raise CheckpointError(
            f"{path} describes model_type '{kind}' {names}; expected 'qwen2_vl' "
            "with architecture 'Qwen2VLForConditionalGeneration'")
    form = parse(raw.pop('quantization_config', None), path)

    from transformers import Qwen2VLConfig

    try:
        parsed = Qwen2VLConfig.from_dict(raw)
        # Where releases write it, and with which default, differs: either place counts.
        tied = any(part.get('tie_word_embeddings') for part in (raw, raw.get('text_config') or {}))
        config = replace(
            _convert(parsed, tied, _end_tokens(folder, parsed)), pixel_limit=_pixel_limit(folder),
            quant=form)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f'{path} is not a valid Qwen2-VL config: {one_line(error)}') from error
    fault = _fault(config)
    if fault:
        raise CheckpointError(f'{path}: {fault}')
    return config


def _pixel_limit(folder: Path) -> int | None:
    path = folder / 'preprocessor_config.json'
    if not path.exists():
        return None
    raw = read_json(path)
    # Newer releases write the two limits as the edges of 'size'.
    limit = raw.get('max_pixels') or (raw.get('size') or {}).get('longest_edge')
    if limit is not None and (not isinstance(limit, int) or limit < 28 * 28):
        raise CheckpointError(f'{path}: max_pixels is {limit!r}; expected at least {28 * 28}')
    return limit


def _convert(parsed: Any, tied: bool, eos: tuple[int, ...]) -> ModelConfig:
    vision, text = parsed.vision_config, parsed.text_config
    # transformers 5 keeps theta and the section in rope_parameters, 4.57 in two fields.
    rope = dict(
        getattr(text, 'rope_parameters', None) or getattr(text, 'rope_scaling', None) or {})
    kind = rope.get('rope_type', rope.get('type', 'default'))
    if kind not in ('default', 'mrope'):
        raise CheckpointError(
            f"rotary scaling '{kind}' is not supported; expected 'mrope' without scaling")
    if getattr(text, 'use_sliding_window', False) and 'sliding_attention' in (
            getattr(text, 'layer_types', None) or []):
        raise CheckpointError('sliding-window attention is not supported; expected full attention')
    vision_rope = getattr(vision, 'rope_parameters', None) or {}
    sizes = {name: _one(getattr(vision, name)) for name in (
        'patch_size', 'temporal_patch_size', 'spatial_merge_size')}
    if sizes['temporal_patch_size'] != 2 or sizes['spatial_merge_size'] != 2:
        raise CheckpointError(
            f"temporal patch {sizes['temporal_patch_size']} and merge "
            f"{sizes['spatial_merge_size']} found; expected 2 and 2")
    if vision.in_channels != 3:
        raise CheckpointError(f'{vision.in_channels} picture channels found; expected 3')
    theta = rope.get('rope_theta') or getattr(text, 'rope_theta', None) or 1000000.0
    section = tuple(int(n) for n in rope.get('mrope_section', (16, 24, 24)))
    return ModelConfig(
        VisionConfig(
            vision.depth, vision.embed_dim, vision.num_heads,
            int(vision.embed_dim * vision.mlp_ratio), vision.hidden_size, vision.hidden_act,
            float(vision_rope.get('rope_theta', 10000.0)), sizes['patch_size'],
            sizes['spatial_merge_size']),
        LanguageConfig(
            text.vocab_size, text.hidden_size, text.intermediate_size, text.num_hidden_layers,
            text.num_attention_heads, text.num_key_value_heads, float(text.rms_norm_eps),
            float(theta), section, text.hidden_act,  # type: ignore[arg-type]
            text.max_position_embeddings),
        tied, parsed.image_token_id, parsed.video_token_id,
        parsed.vision_start_token_id, parsed.vision_end_token_id, eos)


def _one(value: Any) -> int:
    """Return a size that newer configs may give once per axis."""
    if isinstance(value, (list, tuple)):
        if len(set(value)) != 1:
            raise CheckpointError(f'patch sides {value} differ; expected a square')
        value = value[0]
    return int(value)


def _end_tokens(folder: Path, parsed: Any) -> tuple[int, ...]:
    """Return the ids that end an answer: all that config and generation config name."""
    found: list[Any] = [getattr(parsed.text_config, 'eos_token_id', None)]
    path = folder / 'generation_config.json'
    if path.exists():
        found.append(read_json(path).get('eos_token_id'))
    ids: set[int] = set()
    for value in found:
        if value is not None:
            ids.update(int(v) for v in (value if isinstance(value, list) else [value]))
    return tuple(sorted(ids))


def _fault(config: ModelConfig) -> str:
    """Return what makes the shape impossible, or an empty string."""
    v, t = config.vision, config.language
    if v.width % v.heads or v.head_dim % 4:
        return f'encoder width {v.width} does not split into {v.heads} heads of a multiple of 4'
    if t.width % t.heads or t.head_dim % 2:
        return f'hidden size {t.width} does not split into {t.heads} heads of an even size'
    if t.heads % t.kv_heads:
        return f'{t.heads} query heads are not a multiple of {t.kv_heads} key heads'
    if v.out_width != t.width:
        return f'encoder output {v.out_width} differs from the hidden size {t.width}'
    if len(t.mrope_section) != 3 or sum(t.mrope_section) != t.head_dim // 2:
        return (f'mrope_section {list(t.mrope_section)} does not add up to half a head '
                f'({t.head_dim // 2})')
    for name in (v.activation, t.activation):
        if name not in ACTIVATIONS:
            return f"activation '{name}' is not one of {', '.join(ACTIVATIONS)}"
    for name in ('image_token', 'video_token', 'vision_start_token', 'vision_end_token'):
        if not 0 <= getattr(config, name) < t.vocab:
            return f'{name} {getattr(config, name)} lies outside the vocabulary of {t.vocab}'
    return ''
