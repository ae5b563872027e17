"""
Figures that others published for Orin boards: the projection is fitted to half of them.

A figure's work is computed from the model's public configuration. Nobody published a Qwen2-VL
figure for an Orin; these are its nearest neighbours. Where a source does not name the number of
cached tokens, 300 are assumed (they matter below 4 % at that length).
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen_vl_ros.engine.costs import attention_flops, causal_pairs, linear_flops
from qwen_vl_ros.measure.roofline import W4


@dataclass(frozen=True)
class Decoder:
    """Shape of a decoder. :param q: channels of all query heads; ``kv`` of all key heads."""

    layers: int
    width: int
    mlp: int
    q: int
    kv: int
    vocab: int

    @property
    def body(self) -> int:
        """Return the weights of the matrices in all layers."""
        c = self.width
        return self.layers * (2 * c * self.q + 2 * c * self.kv + 3 * c * self.mlp)

    def prefill_flops(self, tokens: int) -> int:
        """Return the FLOPs of a prompt, logits of its last position included."""
        return (2 * tokens * self.body + self.layers * attention_flops(
            causal_pairs(tokens, 0), self.q) + 2 * self.width * self.vocab)

    def token_bytes(self, weight_format: str, cached: int) -> float:
        """Return the bytes that a decoded token reads; output matrix and cache are 16 bits."""
        body = {'fp16': 2.0, 'w8': 1.0, 'w4': W4, 'gguf': 4.85 / 8}[weight_format]
        head = 6.56 / 8 if weight_format == 'gguf' else 2.0
        return (self.body * body + self.width * self.vocab * head
                + 4 * self.layers * self.kv * cached)


@dataclass(frozen=True)
class Encoder:
    """
    Shape of a vision encoder.

    :param matrices: of an MLP: 2, or 3 where it is gated.
    :param out: channels of a merged token.
    :param mergers: 1, or more where middle layers are merged too.
    :param full: layers that attend to the whole picture; the others to ``window`` patches.
    """

    depth: int
    width: int
    mlp: int
    out: int
    matrices: int = 2
    mergers: int = 1
    full: int | None = None
    window: int = 64

    def flops(self, patches: int) -> int:
        """Return the FLOPs of a picture without the patch embedding."""
        c, merged = self.width, 4 * self.width
        full = self.depth if self.full is None else self.full
        block = linear_flops(patches, *[(c, c)] * 4, *[(c, self.mlp)] * self.matrices)
        pairs = full * patches ** 2 + (self.depth - full) * patches * self.window
        merge = linear_flops(patches // 4, (merged, merged), (merged, self.out))
        return self.depth * block + attention_flops(pairs, c) + self.mergers * merge


DECODERS = {
    'Qwen3-0.6B': Decoder(28, 1024, 3072, 2048, 1024, 151936),
    'Qwen3-1.7B': Decoder(28, 2048, 6144, 2048, 1024, 151936),
    'Qwen3-4B': Decoder(36, 2560, 9728, 4096, 1024, 151936),
    'Qwen3-8B': Decoder(36, 4096, 12288, 4096, 1024, 151936),
    'Qwen2-1.5B': Decoder(28, 1536, 8960, 1536, 256, 151936),
    'Qwen2.5-3B': Decoder(36, 2048, 11008, 2048, 256, 151936),
    'Qwen2.5-7B': Decoder(28, 3584, 18944, 3584, 512, 152064),
    'Llama-3.2-1B': Decoder(16, 2048, 8192, 2048, 512, 128256),
    'Llama-3.2-3B': Decoder(28, 3072, 8192, 3072, 1024, 128256),
    'Llama-3.1-8B': Decoder(32, 4096, 14336, 4096, 1024, 128256),
    'Llama-2-7B': Decoder(32, 4096, 11008, 4096, 4096, 32000),
}

ENCODERS = {
    'Qwen3-VL-2B': Encoder(24, 1024, 4096, 2048, mergers=4),
    'Qwen3-VL-4B': Encoder(24, 1024, 4096, 2560, mergers=4),
    'Qwen3-VL-8B': Encoder(27, 1152, 4304, 4096, mergers=4),
    'Qwen2.5-VL-7B': Encoder(32, 1280, 3420, 3584, matrices=3, full=4),
}


@dataclass(frozen=True)
class Peer:
    """
    One published figure.

    :param stage: encode, prefill, encode+prefill or token.
    :param weight_format: of the decoder: fp16, w8, w4 or gguf; of an encoder fp16.
    :param ms: what the source says, as milliseconds.
    :param device: and ``mode``: of :data:`qwen_vl_ros.measure.devices.DEVICES`.
    :param decoder: of :data:`DECODERS`; ``encoder`` of :data:`ENCODERS`.
    :param patches: that an encoder takes; ``tokens`` of a prompt, or cached ones.
    :param bytes: of a token where the source says them itself.
    :param note: what had to be assumed.
    :param excluded: why it is not used; only for figures that contradict themselves.
    """

    source: str
    stage: str
    weight_format: str
    ms: float
    decoder: str = ''
    encoder: str = ''
    patches: int = 0
    tokens: int = 300
    device: str = 'orin-agx-64'
    mode: str = 'maxn'
    bytes: float = 0.0
    note: str = ''
    excluded: str = ''

    @property
    def name(self) -> str:
        """Return what a table calls it."""
        model = ' + '.join(part for part in (self.encoder, self.decoder) if part)
        work = f'{self.patches} patches' if self.stage == 'encode' else f'{self.tokens} tokens'
        return f'{self.source}: {model or "4B"}, {work}'


def _rates(source: str, weight_format: str, rates: dict[str, float], **more: object) -> list[Peer]:
    return [Peer(source, 'token', weight_format, 1e3 / rate, decoder=name,
                 **more)  # type: ignore[arg-type]
            for name, rate in rates.items()]


TRT = 'TensorRT-Edge-LLM 0.10'
TRT_USER = 'TensorRT-Edge-LLM#60'
HEAD16 = 'output matrix taken as 16 bits: this stack quantises it to no 8-bit integer form'
NX = 'the source names no mode; MAXN_SUPER (JetPack 6.2 on), which its encoder time implies'
WARM = 'vllm bench serve, 2048 tokens in (cached) and 128 out, says the tutorial of this table'
BENT = ('the source measures 97 GB/s of memory bandwidth in the same run (clocks not locked), '
        'but this rate needs 133 to 142 GB/s')
NVILA = ('fp16 and int4 of the same model differ by 1.97 ms, though their weights differ by '
         '1.9 GB: that would be 984 GB/s on a board of 204.8')

PEERS: tuple[Peer, ...] = (
    # Encoders, fp16.
    Peer(TRT, 'encode', 'fp16', 36.2, encoder='Qwen3-VL-2B', patches=1060),
    Peer(TRT, 'encode', 'fp16', 36.5, encoder='Qwen3-VL-4B', patches=1060),
    Peer(TRT, 'encode', 'fp16', 53.0, encoder='Qwen3-VL-8B', patches=1060),
    Peer('TensorRT-Edge-LLM 0.9.1', 'encode', 'fp16', 89.2, encoder='Qwen2.5-VL-7B', patches=1396),
    Peer(TRT, 'encode', 'fp16', 77.1, encoder='Qwen3-VL-2B', patches=1060, device='orin-nx-16',
         mode='maxn-super', note=NX),
    Peer('jetson-orin-nano-benchmarks', 'encode', 'fp16', 208.0, encoder='Qwen3-VL-2B',
         patches=1976, device='orin-nano-8', mode='maxn-super'),
    # Prefill.
    Peer(TRT, 'prefill', 'w4', 45.7, decoder='Qwen3-1.7B', tokens=292),
    Peer(TRT, 'prefill', 'w4', 105.7, decoder='Qwen3-4B', tokens=292),
    Peer(TRT, 'prefill', 'w4', 178.3, decoder='Qwen3-8B', tokens=292),
    Peer('TensorRT-Edge-LLM 0.9.1', 'prefill', 'w4', 260.9, decoder='Qwen2.5-7B', tokens=376),
    Peer(TRT, 'prefill', 'w4', 93.5, decoder='Qwen3-1.7B', tokens=292, device='orin-nx-16',
         mode='maxn-super', note=NX),
    Peer('jetson-orin-nano-benchmarks', 'prefill', 'w4', 211.0, decoder='Qwen3-1.7B', tokens=512,
         device='orin-nano-8', mode='maxn-super'),
    *(Peer('FlashRT', 'encode+prefill', 'fp16', ms, decoder='Qwen3-1.7B', encoder='Qwen3-VL-2B',
           patches=patches, tokens=tokens, device='orin-agx-32')
      for ms, patches, tokens in ((127, 972, 260), (216, 1824, 473), (504, 3888, 989),
                                  (928, 6256, 1581))),
    # Decoding, 16-bit weights.
    *_rates(TRT_USER, 'fp16', {'Qwen2.5-3B': 27.2, 'Qwen3-4B': 20.2}),
    Peer('ApxInf', 'token', 'fp16', 55.2, bytes=8.41e9, decoder='Qwen3-4B'),
    *_rates('vLLM (embedl)', 'fp16', {
        'Llama-3.2-1B': 65.0, 'Llama-3.2-3B': 25.6, 'Qwen3-1.7B': 45.8}),
    Peer('vLLM (embedl), Cosmos-Reason2-2B', 'token', 'fp16', 23.6, decoder='Qwen3-1.7B'),
    Peer('TinyChat', 'token', 'fp16', 96.0, decoder='Llama-3.1-8B'),
    Peer('TinyChat', 'token', 'fp16', 83.95, decoder='Llama-2-7B'),
    Peer('TinyChat, VILA-7B', 'token', 'fp16', 86.95, decoder='Llama-2-7B'),
    Peer('TinyChat, NVILA-8B', 'token', 'fp16', 86.24, decoder='Qwen2.5-7B'),
    Peer('TinyChat, NVILA-2B', 'token', 'fp16', 24.22, decoder='Qwen2-1.5B', excluded=NVILA),
    *_rates('FlashRT, slow end', 'fp16', {'Qwen3-1.7B': 36.8}, device='orin-agx-32',
            excluded=BENT),
    *_rates('FlashRT, fast end', 'fp16', {'Qwen3-1.7B': 41.4}, device='orin-agx-32',
            excluded=BENT),
    # Decoding, 8-bit weights.
    *_rates(TRT_USER, 'w8', {'Qwen2.5-3B': 45.2, 'Qwen3-4B': 35.5}, note=HEAD16),
    # Decoding, 4-bit weights.
    *_rates(TRT, 'w4', {'Qwen3-0.6B': 200.5, 'Qwen3-1.7B': 99.8, 'Qwen3-4B': 55.3,
                        'Qwen3-8B': 32.2}),
    *_rates(f'{TRT}, Qwen3-VL', 'w4', {'Qwen3-1.7B': 98.9, 'Qwen3-4B': 54.7, 'Qwen3-8B': 32.1}),
    *_rates(f'{TRT}, Qwen3-VL', 'w4', {'Qwen3-1.7B': 58.5}, device='orin-nx-16',
            mode='maxn-super', note=NX),
    *_rates('TensorRT-Edge-LLM 0.9.1, Qwen3-VL', 'w4', {'Qwen3-4B': 52.4}),
    *_rates(TRT_USER, 'w4', {'Qwen2.5-3B': 71.8, 'Qwen3-4B': 52.2}),
    *_rates('vLLM (embedl)', 'w4', {'Llama-3.2-3B': 61.2, 'Qwen3-1.7B': 101.0}),
    *_rates('vLLM (embedl), Cosmos-Reason2-2B Edge2', 'w4', {'Qwen3-1.7B': 111.9}),
    *_rates('vLLM (Jetson AI Lab)', 'w4', {
        'Llama-3.2-3B': 52.6, 'Llama-3.1-8B': 28.1, 'Qwen3-4B': 42.2, 'Qwen3-8B': 26.5},
        tokens=2112, note=WARM),
    Peer('TinyChat', 'token', 'w4', 32.5, decoder='Llama-3.1-8B'),
    Peer('TinyChat', 'token', 'w4', 25.94, decoder='Llama-2-7B'),
    Peer('TinyChat, VILA-7B', 'token', 'w4', 28.09, decoder='Llama-2-7B'),
    Peer('TinyChat, NVILA-8B', 'token', 'w4', 30.48, decoder='Qwen2.5-7B'),
    Peer('TinyChat, NVILA-2B', 'token', 'w4', 22.25, decoder='Qwen2-1.5B', excluded=NVILA),
    *(peer for source, rate in (('TensorRT-Edge-LLM (Nano)', 60.0), ('vLLM (Nano)', 56.0))
      for peer in _rates(source, 'w4', {'Qwen3-1.7B': rate}, device='orin-nano-8',
                         mode='maxn-super')),
    # llama.cpp's mixed 4-bit files: a format that this package does not run.
    *_rates('llama.cpp (holohub#170)', 'gguf', {'Llama-2-7B': 22.5}),
    *_rates('llama.cpp (MiniCPM#331)', 'gguf', {'Llama-3.1-8B': 25.0}),
    *_rates('llama.cpp (Nano)', 'gguf', {'Qwen3-1.7B': 38.0}, device='orin-nano-8',
            mode='maxn-super'),
)

#: Published figures that this model has no formula for.
NOT_COMPARABLE = {
    'Qwen3.5-2B VLM (TensorRT-Edge-LLM)': 'linear-attention layers',
    'EAGLE3 (TensorRT-Edge-LLM), FlashHead (embedl)':
        'several tokens a pass, or another output layer',
    'MLC and llama.cpp on Qwen3.6-35B-A3B': 'mixture of experts',
    'NanoLLM frames/s, Pi0.5': 'end-to-end rates whose token counts are not published',
    'TTFT of Cosmos-Reason2-2B (embedl)': 'the encoder was skipped (cached picture)',
}
