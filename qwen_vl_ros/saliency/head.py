"""
The light head: a small convolutional net that guesses the teacher's map before the encoder runs.

It sees the picture at seven samples a unit and the question through FiLM (Perez et al. 2018): the
words' embeddings scale and shift its channels. It is distilled from what the model's own answers
lean on (``tools/distil_head``), so it belongs to one checkpoint and lies beside its weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Samples along a side of a unit (28 pixels of the resized picture).
SAMPLES = 7
_FORM = 'qwen_vl_ros saliency head 2'


class SaliencyHead(nn.Module):
    """
    Scores units; larger matters more.

    :param text_width: of the model's token embeddings.
    :param width: channels at unit resolution.
    :param stem: channels at sample resolution.
    :param blocks: residual blocks, each modulated by the question.
    """

    def __init__(self, text_width: int, width: int = 96, stem: int = 24, blocks: int = 2) -> None:
        super().__init__()
        self.shape = {'text_width': text_width, 'width': width, 'stem': stem, 'blocks': blocks}
        self.first = nn.Conv2d(6, stem, 3, padding=1)
        self.units = nn.Conv2d(stem, width, SAMPLES, stride=SAMPLES)
        self.place = nn.Conv2d(5, width, 1)
        self.word = nn.Linear(text_width, width)
        self.phrase = nn.Conv1d(width, width, 3, padding=1)
        self.film = nn.Linear(2 * width, blocks * 2 * width)
        self.inner = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.outer = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.score = nn.Conv2d(width, 1, 1)

    def words(self, embedded: Tensor, mask: Tensor) -> Tensor:
        """
        Summarise a question.

        :param embedded: token embeddings [B, L, text_width].
        :param mask: bool [B, L], true at tokens of the question.
        :return: [B, 2 * width]: largest and mean value of its phrases.
        """
        keep = mask[:, None]
        x = self.word(F.layer_norm(embedded, embedded.shape[-1:])).transpose(1, 2) * keep
        x = F.relu(self.phrase(x)) * keep
        mean = x.sum(-1) / keep.sum(-1).clamp(min=1)
        return torch.cat((x.amax(-1), mean), dim=1)

    def forward(self, samples: Tensor, question: Tensor) -> Tensor:
        """
        Score the units of pictures.

        :param samples: [B, 6, 7 * rows, 7 * columns] of :func:`channels`.
        :param question: [B, 2 * width] of :meth:`words`.
        :return: [B, rows, columns].
        """
        x = self.units(F.relu(self.first(samples)))
        x = F.relu(x + self.place(places(x.shape[2], x.shape[3], x)))
        films = self.film(question)[:, :, None, None].chunk(2 * len(self.inner), dim=1)
        for i, (inner, outer) in enumerate(zip(self.inner, self.outer)):
            y = F.relu(inner(x) * (1 + films[2 * i]) + films[2 * i + 1])
            x = F.relu(x + outer(y))
        return self.score(x)[:, 0]

    def flops(self, rows: int, columns: int, words: int) -> int:
        """Return the operations of one picture and question (a multiply-add counts two)."""
        unit = rows * columns
        convs = (SAMPLES ** 2 * self.first.weight.numel() + self.units.weight.numel()
                 + self.place.weight.numel() + self.score.weight.numel()
                 + sum(c.weight.numel() for c in (*self.inner, *self.outer)))
        text = words * (self.word.weight.numel() + self.phrase.weight.numel())
        return 2 * (unit * convs + text + self.film.weight.numel())

    def save(self, path: Path, about: dict[str, str]) -> None:
        """Write int8 weights; ``about`` (how it was made) goes into the file's header."""
        from safetensors.torch import save_file
        tensors = {}
        for name, value in self.state_dict().items():
            value = value.detach().float().cpu()
            if value.dim() > 1:
                tensors[name], tensors[f'{name}.scale'] = to_int8(value)
            else:
                tensors[name] = value.contiguous()
        save_file(tensors, path, metadata={
            'format': 'pt', 'form': _FORM, 'shape': json.dumps(self.shape), **about})

    @classmethod
    def load(cls, path: Path) -> SaliencyHead:
        """
        Read a head.

        :raises ValueError: one sentence: the path and what is wrong with it.
        """
        from safetensors import SafetensorError, safe_open
        try:
            with safe_open(path, 'pt') as file:
                about = file.metadata() or {}
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f'{path} cannot be read as a saliency head: {error}') from None
        if about.get('form') != _FORM:
            raise ValueError(f"{path} is no saliency head (form '{about.get('form')}')")
        try:
            shape = json.loads(about['shape'])
            # Without memory first: a damaged header may announce anything.
            with torch.device('meta'):
                wanted = {name: tuple(value.shape)
                          for name, value in cls(**shape).state_dict().items()}
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise ValueError(f"{path}: its header gives the shape {about.get('shape')}; expected "
                             'text_width, width, stem and blocks') from None
        _check(path, stored, wanted)
        head = cls(**shape)
        head.load_state_dict({
            name: from_int8(stored[name], stored[f'{name}.scale'])
            if f'{name}.scale' in stored else stored[name].float() for name in wanted})
        return head.eval().requires_grad_(False)


def _check(path: Path, stored: dict[str, Tensor], wanted: dict[str, tuple[int, ...]]) -> None:
    """
    Hold the tensors of a file against the net that its header announces.

    :raises ValueError: the file, the tensor, what was found and what was expected.
    """
    shapes = dict(wanted)
    for name in wanted:
        if f'{name}.scale' in stored:
            shapes[f'{name}.scale'] = wanted[name][:1]
    for name, shape in shapes.items():
        value = stored.get(name)
        if value is None:
            raise ValueError(f'{path}: tensor {name} is missing; expected one of {list(shape)}')
        if tuple(value.shape) != shape:
            raise ValueError(f'{path}: tensor {name} is {list(value.shape)}; its header makes it '
                             f'{list(shape)}')
        kinds = (torch.int8,) if f'{name}.scale' in stored else (
            torch.float32, torch.float16, torch.bfloat16)
        if value.dtype not in kinds:
            raise ValueError(f'{path}: tensor {name} is {value.dtype}; expected '
                             f'{" or ".join(str(kind) for kind in kinds)}')
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f'{path}: tensor {name} holds values that are not finite')
    extra = sorted(set(stored) - set(shapes))
    if extra:
        raise ValueError(f'{path}: tensor {extra[0]} is not expected')


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """
    Round a weight to int8, symmetrically, with one scale an output channel.

    :param weight: [outputs, ...].
    :return: int8 of the same shape, float32 [outputs].
    """
    flat = weight.flatten(1)
    scale = flat.abs().amax(1).clamp(min=1e-12) / 127
    return (flat / scale[:, None]).round().to(torch.int8).view_as(weight).contiguous(), scale


def from_int8(rounded: Tensor, scale: Tensor) -> Tensor:
    """Undo :func:`to_int8` up to its rounding; float32."""
    return rounded.float() * scale.view(-1, *[1] * (rounded.dim() - 1))


def channels(newest: Tensor, other: Tensor | None = None) -> Tensor:
    """
    Make the input of the net.

    :param newest: samples in RGB, 0 to 255, [B, 3, h, w], of any dtype.
    :param other: what the same camera showed in the neighbouring slice of a clip, alike; ``None``
        for a still.
    :return: [B, 6, h, w]: colour, and the difference to the other (0 for a still).
    """
    if not newest.is_floating_point():
        newest, other = newest.float(), None if other is None else other.float()
    change = torch.zeros_like(newest) if other is None else (newest - other) / 64
    return torch.cat(((newest - 118) / 64, change), dim=1)


def places(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return [1, 5, rows, columns]: where a unit lies, -1 to 1, with the squares and product."""
    y = torch.linspace(-1, 1, rows, device=like.device, dtype=like.dtype)[:, None]
    x = torch.linspace(-1, 1, columns, device=like.device, dtype=like.dtype)[None]
    y, x = y.expand(rows, columns), x.expand(rows, columns)
    return torch.stack((y, x, y * y, x * x, x * y))[None]
