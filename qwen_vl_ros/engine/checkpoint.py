"""A Hugging Face folder to config, tokenizer and tensors; strict, and safetensors only."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_vl_ros.engine.config import ModelConfig, load_config, read_json
from qwen_vl_ros.engine.device import memory_available
from qwen_vl_ros.engine.errors import CheckpointError, one_line
from qwen_vl_ros.engine.finite import check_finite
from qwen_vl_ros.engine.quant_files import INTEGERS, QuantFormat, is_gptq_bias
from qwen_vl_ros.engine.quant_files import shapes as quantised_shapes

#: Old key prefixes (before transformers 4.52) and new ones, to the names used here.
PREFIXES = (
    ('model.language_model.', 'language.'),
    ('model.visual.', 'visual.'),
    ('visual.', 'visual.'),
    ('lm_head.', 'lm_head.'),
    ('model.', 'language.'),
)

#: What loading and running takes beyond weights and cache: a share of the weights, and at least.
MARGIN_SHARE, MARGIN_MIN = 0.15, 128 << 20


@dataclass(frozen=True)
class Checkpoint:
    """
    What a model folder held.

    :param config: its shape.
    :param tokenizer: transformers' fast tokenizer.
    :param chat_template: Jinja text of the chat template.
    :param tensors: canonical name to weight, on the device and in the dtype asked for.
    :param name: the folder's name, or the repository's for a hub snapshot.
    :param revision: commit of a hub snapshot, else a digest of config and weight files.
    """

    config: ModelConfig
    tokenizer: Any
    chat_template: str
    tensors: dict[str, Tensor]
    name: str
    revision: str


def find_folder(path: str, allow_download: bool) -> Path:
    """
    Return the model folder for a path, or for a hub name that was downloaded before.

    :param path: a folder, or ``owner/name`` of the Hugging Face hub.
    :param allow_download: fetch ``owner/name`` when it is not on this machine yet.
    :raises CheckpointError: when there is no such folder.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not path:
        raise CheckpointError('no model path given; expected a folder with config.json')
    parts = path.split('/')
    if folder.exists() or len(parts) != 2 or not all(parts) or path.startswith(('.', '~')):
        raise CheckpointError(f'{folder} is not a folder; expected one with config.json, '
                              'tokenizer files and safetensors')
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(
            path, local_files_only=not allow_download,
            allow_patterns=['*.json', '*.safetensors', '*.txt', '*.jinja']))
    except Exception as error:
        if not allow_download:
            raise CheckpointError(
                f"'{path}' is neither a folder nor a model downloaded before, and downloads are "
                f"off: 'hf download {path}', or set model.allow_download to true") from error
        raise CheckpointError(f"downloading '{path}' failed: {one_line(error)}") from error


def load_checkpoint(
    folder: Path, device: torch.device, dtype: torch.dtype, cache_bytes: int = 0,
) -> Checkpoint:
    """
    Load a folder.

    :param folder: holds config.json, tokenizer files and model.safetensors or its shards.
    :param device: where the tensors go.
    :param dtype: float dtype of the tensors.
    :param cache_bytes: what the caller will allocate beside the weights; counted in the check of
        free memory.
    :raises CheckpointError: one sentence that names the path and what was expected.
    """
    config = load_config(folder)
    tokenizer, template = load_tokenizer(folder, config)
    files = weight_files(folder)
    headers = {file: read_header(file) for file in files}
    names = check_names(folder, config, headers)
    size = torch.empty(0, dtype=dtype).element_size()
    weights = sum(
        _count(info['shape']) * (4 if info['dtype'] == 'I32' else size)
        for header in headers.values() for info in header.values())
    check_memory(folder, weights, cache_bytes, device)
    tensors = {}
    for file in files:
        for name, tensor in read_tensors(file):
            if is_gptq_bias(canonical(name)) and name not in names[file] and tensor.any():
                raise CheckpointError(
                    f'{file}: {name} is not zero; expected no bias, or the zeros that AutoGPTQ '
                    'writes')
            if name in names[file]:
                # Codes are integers, and their scales stay as exact as they were stored.
                kept = name.endswith((*INTEGERS, '.scales'))
                tensors[names[file][name]] = tensor.to(
                    device, tensor.dtype if kept else dtype, copy=True)
    check_finite(folder, {key: tensors[ours] for keys in names.values()
                          for key, ours in keys.items()})
    if config.tied:
        drop_tied_head(folder, tensors)
    name, revision = identity(folder, files)
    return Checkpoint(config, tokenizer, template, tensors, name, revision)


def load_tokenizer(folder: Path, config: ModelConfig) -> tuple[Any, str]:
    """
    Return the tokenizer and the chat template.

    :raises CheckpointError: when either is missing or does not fit the config.
    """
    if not (folder / 'tokenizer.json').exists() and not (folder / 'vocab.json').exists():
        raise CheckpointError(
            f'{folder} has no tokenizer; expected tokenizer.json (or vocab.json and merges.txt)')
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(
            f'the tokenizer in {folder} cannot be loaded: {one_line(error)}') from error
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get('default')
    if not template and (folder / 'chat_template.json').exists():
        template = read_json(folder / 'chat_template.json').get('chat_template')
    if not template:
        raise CheckpointError(
            f'{folder} has no chat template; expected one in tokenizer_config.json, '
            'chat_template.jinja or chat_template.json')
    for token, expected in (
            ('<|image_pad|>', config.image_token), ('<|video_pad|>', config.video_token),
            ('<|vision_start|>', config.vision_start_token),
            ('<|vision_end|>', config.vision_end_token)):
        found = tokenizer.convert_tokens_to_ids(token)
        if found != expected:
            raise CheckpointError(
                f"the tokenizer in {folder} gives '{token}' the id {found}; "
                f'config.json expects {expected}')
    if len(tokenizer) > config.language.vocab:
        raise CheckpointError(
            f'the tokenizer in {folder} has {len(tokenizer)} tokens, the model only '
            f'{config.language.vocab} embeddings')
    return tokenizer, template


def weight_files(folder: Path) -> list[Path]:
    """
    Return the safetensors files of a folder, sorted.

    :raises CheckpointError: when there are none, or a shard is missing.
    """
    index = folder / 'model.safetensors.index.json'
    if index.exists():
        shards = sorted(set(read_json(index).get('weight_map', {}).values()))
        gone = [shard for shard in shards if not (folder / shard).exists()]
        if gone or not shards:
            raise CheckpointError(
                f'{index} lists {len(shards)} files, of which {_some(gone)} are missing'
                if gone else f'{index} has no weight_map')
        return [folder / shard for shard in shards]
    single = folder / 'model.safetensors'
    if single.exists():
        return [single]
    pickled = any(folder.glob('pytorch_model*.bin'))
    raise CheckpointError(
        f'{folder} has no model.safetensors and no model.safetensors.index.json'
        + ('; pickled pytorch_model*.bin files are not read: convert them' if pickled else ''))


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """
    Read a safetensors header: tensor name to dtype, shape and data_offsets.

    :raises CheckpointError: cut or broken file, or weights that are not floats.
    """
    size = file.stat().st_size
    try:
        with file.open('rb') as stream:
            length = struct.unpack('<Q', stream.read(8))[0]
            if length > size - 8:
                raise ValueError(f'a header of {length} bytes in a file of {size}')
            header = json.loads(stream.read(length))
        header.pop('__metadata__', None)
        end = 8 + length + max((info['data_offsets'][1] for info in header.values()), default=0)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f'{file} is not a readable safetensors file: {one_line(error)}') from error
    if size != end:
        raise CheckpointError(
            f'{file} has {size} bytes, but its header announces {end}: '
            'it was cut or damaged, copy it again')
    odd = [name for name, info in header.items() if info['dtype'] not in (
        ('I32',) if name.endswith(INTEGERS) else ('F32', 'F16', 'BF16'))]
    if odd:
        raise CheckpointError(
            f"{file} holds {_some(odd)} as {header[odd[0]]['dtype']}; "
            'expected F32, F16 or BF16')
    return header


def read_tensors(file: Path) -> Any:
    """Yield (name, tensor) of a file; tensors may share its mapping: copy them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), 'pt') as stream:
            for name in stream.keys():  # noqa: SIM118 - not a dictionary
                yield name, stream.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(
            f'{file} is not a readable safetensors file: {one_line(error)}') from error


def check_names(
    folder: Path, config: ModelConfig, headers: dict[Path, dict[str, dict[str, Any]]],
) -> dict[Path, dict[str, str]]:
    """
    Map file keys to canonical names and hold them against what the config needs.

    :return: for each file, its key to the canonical name.
    :raises CheckpointError: missing, left-over, doubled or misshapen tensors, by name.
    """
    need = expected_shapes(config)
    names: dict[Path, dict[str, str]] = {}
    seen: dict[str, str] = {}
    extra, wrong = [], []
    for file, header in headers.items():
        names[file] = {}
        for key, info in header.items():
            if key.endswith('.inv_freq'):
                continue  # computed, but saved by old releases
            name = canonical(key)
            if name in seen:
                raise CheckpointError(
                    f"{folder} holds one weight under two names, '{seen[name]}' and '{key}'")
            seen[name] = key
            if name not in need:
                if config.quant and config.quant.method == 'gptq' and is_gptq_bias(name):
                    continue  # zeros, which load_checkpoint looks at
                extra.append(key)
            elif tuple(info['shape']) != need[name]:
                wrong.append(f"{key} {info['shape']} instead of {list(need[name])}")
            names[file][key] = name
    optional = {'lm_head.weight'} if config.tied else set()
    missing = [as_saved(name, seen.values())
               for name in need if name not in seen and name not in optional]
    faults = [f'{what}: {_some(found)}' for what, found in (
        ('missing', missing), ('not expected', extra), ('misshapen', wrong)) if found]
    if faults:
        raise CheckpointError(
            f"the weights in {folder} do not fit its config.json; {'; '.join(faults)}")
    return names


def canonical(key: str) -> str:
    """Return the name used here for a key of any transformers release."""
    for prefix, ours in PREFIXES:
        if key.startswith(prefix):
            return ours + key[len(prefix):]
    return key


def as_saved(name: str, keys: Collection[str]) -> str:
    """Return the key that a canonical name would have among keys of a file."""
    for prefix, ours in PREFIXES:
        if name.startswith(ours) and any(key.startswith(prefix) for key in keys):
            return prefix + name[len(ours):]
    return name


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every canonical weight name with its shape."""
    v, t = config.vision, config.language
    shapes: dict[str, tuple[int, ...]] = {
        'visual.patch_embed.proj.weight': (v.width, 3, 2, v.patch, v.patch)}

    def linear(
        name: str, rows: int, cols: int, bias: bool = True, form: QuantFormat | None = None,
    ) -> None:
        shapes.update(quantised_shapes(name, rows, cols, form) if form is not None
                      else {f'{name}.weight': (rows, cols)})
        if bias:
            shapes[f'{name}.bias'] = (rows,)

    def norm(name: str, width: int, bias: bool = True) -> None:
        shapes[f'{name}.weight'] = (width,)
        if bias:
            shapes[f'{name}.bias'] = (width,)

    for i in range(v.depth):
        base = f'visual.blocks.{i}'
        norm(f'{base}.norm1', v.width)
        norm(f'{base}.norm2', v.width)
        linear(f'{base}.attn.qkv', 3 * v.width, v.width)
        linear(f'{base}.attn.proj', v.width, v.width)
        linear(f'{base}.mlp.fc1', v.mlp_width, v.width)
        linear(f'{base}.mlp.fc2', v.width, v.mlp_width)
    merged = v.width * v.merge ** 2
    norm('visual.merger.ln_q', v.width)
    linear('visual.merger.mlp.0', merged, merged)
    linear('visual.merger.mlp.2', v.out_width, merged)
    shapes['language.embed_tokens.weight'] = (t.vocab, t.width)
    kv = t.kv_heads * t.head_dim
    for i in range(t.layers):
        base = f'language.layers.{i}'
        norm(f'{base}.input_layernorm', t.width, bias=False)
        norm(f'{base}.post_attention_layernorm', t.width, bias=False)
        linear(f'{base}.self_attn.q_proj', t.width, t.width, form=config.quant)
        linear(f'{base}.self_attn.k_proj', kv, t.width, form=config.quant)
        linear(f'{base}.self_attn.v_proj', kv, t.width, form=config.quant)
        linear(f'{base}.self_attn.o_proj', t.width, t.width, bias=False, form=config.quant)
        linear(f'{base}.mlp.gate_proj', t.mlp_width, t.width, bias=False, form=config.quant)
        linear(f'{base}.mlp.up_proj', t.mlp_width, t.width, bias=False, form=config.quant)
        linear(f'{base}.mlp.down_proj', t.width, t.mlp_width, bias=False, form=config.quant)
    norm('language.norm', t.width, bias=False)
    linear('lm_head', t.vocab, t.width, bias=False)
    return shapes


def drop_tied_head(folder: Path, tensors: dict[str, Tensor]) -> None:
    """
    Take out a stored copy of a tied output matrix.

    :raises CheckpointError: when it is no copy: then config or weights are wrong.
    """
    head = tensors.pop('lm_head.weight', None)
    if head is not None and not torch.equal(head, tensors['language.embed_tokens.weight']):
        raise CheckpointError(
            f'{folder} has tie_word_embeddings true, but its lm_head.weight differs from '
            'embed_tokens.weight; expected equal tensors, or tie_word_embeddings false')


def check_memory(folder: Path, weights: int, cache: int, device: torch.device) -> None:
    """
    Hold what the model needs against what is free, before anything is allocated.

    A Jetson shares memory between CPU and GPU and its kernel ends processes when it runs out, so
    an estimate that refuses early is worth more than a load that dies late.

    :raises CheckpointError: with both numbers.
    """
    free = memory_available(device)
    need = weights + cache + max(int(weights * MARGIN_SHARE), MARGIN_MIN)
    if free is not None and need > free:
        mib = 1 << 20
        raise CheckpointError(
            f'{folder} needs {need // mib} MiB (weights {weights // mib}, cache {cache // mib}, '
            f'margin {(need - weights - cache) // mib}), but only {free // mib} MiB are free '
            f'on {device.type}')


def identity(folder: Path, files: list[Path]) -> tuple[str, str]:
    """Return name and revision: a hub snapshot's own, else the folder's name and a digest."""
    where = folder.resolve()
    if where.parent.name == 'snapshots':
        name = where.parent.parent.name.removeprefix('models--').replace('--', '/')
        return name, where.name
    digest = hashlib.sha256((folder / 'config.json').read_bytes())
    for file in files:
        digest.update(f'{file.name} {file.stat().st_size}'.encode())
        with file.open('rb') as stream:
            digest.update(stream.read(1 << 20))
    return where.name, digest.hexdigest()[:12]


def _count(shape: list[int]) -> int:
    total = 1
    for side in shape:
        total *= side
    return total


def _some(names: list[str], most: int = 5) -> str:
    """Return the first few names and how many more there are."""
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(names[:most]) + more
