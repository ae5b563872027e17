"""
The node's parameters: one table, one frozen :class:`Settings`, validated as a whole.

A field of ``Settings`` is a parameter. Its metadata is what ROS tools show, what is checked, and
what ``docs/interfaces.md`` is held against.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from rcl_interfaces.msg import SetParametersResult
from rclpy.parameter import Parameter

from qwen_vl_ros.node.parameter import (
    ACTIVATE,
    CONFIGURE,
    LIVE,
    checked,
    descriptor,
    parameter,
)
from qwen_vl_ros.saliency.answering import Fewer
from qwen_vl_ros.saliency.region import parse_region
from qwen_vl_ros.saliency.selectors import AFTER, NAMES
from qwen_vl_ros.saliency.weights import HEAD_DTYPES, parse_weights

#: The longest deadline of a question; action results are kept a little longer than that.
MAX_DEADLINE_S = 300.0

#: A topic's name: absolute, private or relative (ros2/design, topic and service names).
TOPIC = re.compile(r'(~/|/)?[A-Za-z_]\w*(/[A-Za-z_]\w*)*', re.ASCII)


@dataclass(frozen=True)
class Settings:
    """All parameters at one moment. Swapped as a whole between questions."""

    model_path: str = parameter(
        'model.path', '', CONFIGURE,
        'Folder of a Qwen2-VL checkpoint (config.json, tokenizer, *.safetensors). Empty: the '
        'small checkpoint that ships with the package, which knows rendered scenes only.')
    model_device: str = parameter(
        'model.device', 'auto', CONFIGURE,
        'auto, cpu, cuda or cuda:N. auto takes CUDA where it works; cuda never falls back.')
    model_dtype: str = parameter(
        'model.dtype', 'auto', CONFIGURE, 'Type of the activations.',
        choices=('auto', 'float32', 'bfloat16', 'float16'))
    model_quantization: str = parameter(
        'model.quantization', 'none', CONFIGURE,
        'Type of the decoder\'s weights; none keeps the checkpoint\'s. Approximate: can change '
        'answers.', choices=('none', 'int8', 'int4'))
    model_max_context: int = parameter(
        'model.max_context', 4096, CONFIGURE, 'Tokens of prompt and answer together.',
        low=128, high=32768)
    model_allow_download: bool = parameter(
        'model.allow_download', False, CONFIGURE,
        'Let model.path name a repository that is fetched. Robots are offline: off.')
    preprocess_device: str = parameter(
        'preprocess.device', 'auto', CONFIGURE,
        'Where pictures become patch embeddings. auto measures both for every size of picture, '
        'and says in the log which it takes. gpu needs model.device cuda.',
        choices=('auto', 'cpu', 'gpu'))
    vision_engine: str = parameter(
        'vision.engine', 'native', CONFIGURE,
        'What the encoder runs in. native: the package\'s kernels where there are any. tensorrt: '
        'an engine built once for this GPU and vision.max_pixels; without TensorRT, native.',
        choices=('native', 'torch', 'tensorrt'))
    vision_quantization: str = parameter(
        'vision.quantization', 'none', CONFIGURE,
        'Type of the encoder\'s arithmetic. int8 is given up at load where it changes too much. '
        'Approximate: can change answers.', choices=('none', 'int8'))
    vision_min_pixels: int = parameter(
        'vision.min_pixels', 3136, LIVE,
        'Smaller pictures are scaled up to this many pixels; pixels / 784 = tokens.',
        low=784, high=12845056)
    vision_max_pixels: int = parameter(
        'vision.max_pixels', 401408, LIVE,
        'Larger pictures are scaled down to this many pixels; pixels / 784 = tokens. A lower '
        'limit of the checkpoint wins.',
        low=784, high=12845056)
    cameras: tuple[str, ...] = parameter(
        'cameras', ('camera',), ACTIVATE,
        'One entry a camera: NAME reads NAME/image_raw, /NAME reads /NAME/image_raw, NAME=TOPIC '
        'any topic. A question that names no camera is about the first.')
    image_transport: str = parameter(
        'image_transport', 'raw', ACTIVATE,
        'raw, or compressed to read TOPIC/compressed. A topic that already ends in /compressed '
        'or /compressedDepth is read as it is.', choices=('raw', 'compressed'))
    image_qos: str = parameter(
        'image_qos', 'AUTO', ACTIVATE,
        'AUTO fits each camera\'s publishers; SENSOR_DATA is best effort; DEFAULT is reliable.',
        choices=('AUTO', 'SENSOR_DATA', 'DEFAULT'))
    clip_length: int = parameter(
        'clip.length', 4, ACTIVATE, 'Newest frames kept a camera, for questions about clips.',
        low=1, high=32)
    max_image_age_s: float = parameter(
        'max_image_age_s', 2.0, LIVE,
        'A question is refused when the newest picture is older. 0 takes any.',
        low=0.0, high=3600.0)
    queue_size: int = parameter(
        'queue.size', 4, ACTIVATE, 'Questions that may wait; one more is refused at once.',
        low=1, high=64)
    service_max_deadline: float = parameter(
        'service.max_deadline', 10.0, LIVE, 'Longest time that ~/ask may take, seconds.',
        low=0.1, high=MAX_DEADLINE_S)
    generation_max_new_tokens: int = parameter(
        'generation.max_new_tokens', 64, LIVE, 'Most tokens of an answer.', low=1, high=4096)
    generation_temperature: float = parameter(
        'generation.temperature', 0.0, LIVE, '0 is greedy.', low=0.0, high=5.0)
    generation_deadline_s: float = parameter(
        'generation.deadline_s', 30.0, LIVE,
        'Time for a whole answer, waiting included, where the question brings none.',
        low=0.1, high=MAX_DEADLINE_S)
    prompt_system: str = parameter(
        'prompt.system', '', LIVE, 'System prompt. Empty: the chat template\'s own.')
    prompt_template_file: str = parameter(
        'prompt.template_file', '', CONFIGURE,
        'Text file that holds {question} once; every question is put into it. Empty: none.')
    scheduler_overlap: bool = parameter(
        'scheduler.overlap', True, ACTIVATE,
        'Questions run beside each other: one is looked at while another is decoded, decode steps '
        'are shared. Off: one after the other.')
    scheduler_max_sequences: int = parameter(
        'scheduler.max_sequences', 4, CONFIGURE,
        'Questions under way at a time; each takes a cache of model.max_context tokens. One place '
        'is kept free of standing questions.', low=1, high=8)
    scheduler_micro_batch: float = parameter(
        'scheduler.micro_batch', 1.0, ACTIVATE,
        'Pictures, or slices of a clip, that are encoded and handed to the language model '
        'together. Below 1 the share of one, an experiment. Approximate then: can change answers.',
        low=0.05, high=64.0)
    scheduler_cache_mb: int = parameter(
        'scheduler.cache_mb', 0, CONFIGURE,
        'Most memory of all caches, MB (1e6 bytes); fewer questions then run beside each other. '
        '0: as much as scheduler.max_sequences needs.', low=0, high=1_000_000)
    pruning_enable: bool = parameter(
        'pruning.enable', False, LIVE, 'Drop vision tokens. Approximate: can change answers.')
    pruning_keep_ratio: float = parameter(
        'pruning.keep_ratio', 0.5, LIVE, 'Share of vision tokens kept.', low=0.1, high=1.0)
    pruning_selector: str = parameter(
        'pruning.selector', 'auto', CONFIGURE,
        'What chooses the vision tokens that are kept. auto is head where the checkpoint has one, '
        'else saliency. motion, entropy, grad_cam, and next_frame, which combines signals, go by '
        'the frames before. The last three choose after the encoder, and questions are then '
        'answered one after the other.', choices=NAMES)
    pruning_weights: str = parameter(
        'pruning.weights', '', CONFIGURE,
        'Signals that pruning.selector saliency or next_frame combine, such as '
        'gradient=1,contrast=0.3. Both take gradient, colour, contrast and head, next_frame also '
        'motion, entropy and grad_cam. Empty: those fitted.')
    pruning_gradient_layers: int = parameter(
        'pruning.gradient_layers', 0, CONFIGURE,
        'Decoder layers that the gradient of grad_cam passes: the first so many, which is faster. '
        '0 is all.', low=0, high=1024)
    pruning_generic_every: int = parameter(
        'pruning.generic_every', 0, CONFIGURE,
        'Divide the map of grad_cam by that of a generic prompt, which is taken anew for so many '
        'maps, and where the camera has turned. 0 never divides.', low=0, high=1_000_000)
    pruning_head_file: str = parameter(
        'pruning.head_file', '', CONFIGURE,
        'File of the light head. Empty: saliency_head.safetensors beside the checkpoint.')
    pruning_head_dtype: str = parameter(
        'pruning.head_dtype', 'auto', CONFIGURE,
        'Type of the light head\'s arithmetic. auto is float16 on CUDA and float32 on a CPU; int8 '
        'is for a CPU.', choices=HEAD_DTYPES)
    pruning_keep_region: str = parameter(
        'pruning.keep_region', '', CONFIGURE,
        'Part of the picture that is always kept: corridor (the floor ahead), or the corners of a '
        'polygon as "x,y x,y x,y" in shares of width and height. Empty: none.')
    pruning_least_margin: float = parameter(
        'pruning.least_margin', 0.0, ACTIVATE,
        'Ask again about all tokens where the first token of the answer stands less than this '
        'many logits above the next best. 0 never does. Questions are then answered one after '
        'the other.', low=0.0, high=100.0)
    pruning_roi: float = parameter(
        'pruning.roi', 0.0, ACTIVATE,
        'Show this share of a still at full resolution beside a small overview; places in answers '
        'are mapped back. 0 is off. Approximate: can change answers. Questions are then answered '
        'one after the other, and told when they are whole.', low=0.0, high=0.9)
    pruning_min_units: int = parameter(
        'pruning.min_units', 64, LIVE, 'Never keep fewer units (vision tokens) of a picture.',
        low=1, high=16384)
    target_latency_ms: float = parameter(
        'target_latency_ms', 0.0, LIVE,
        'Choose resolution and share of vision tokens, within the limits above, so that the '
        'median answer takes no longer, milliseconds. 0 is off. Approximate: can change answers.',
        low=0.0, high=1e6)
    continuous_enable: bool = parameter(
        'continuous.enable', False, LIVE, 'Ask continuous.question again and again.')
    continuous_question: str = parameter(
        'continuous.question', 'What do you see?', LIVE, 'The standing question.')
    continuous_cameras: str = parameter(
        'continuous.cameras', '', LIVE,
        'Cameras that the standing question is about, one after the other: names with commas '
        'between, or all. Empty: the first.')
    continuous_rate_hz: float = parameter(
        'continuous.rate_hz', 1.0, LIVE,
        'Standing questions a second and camera; one is put off while the last is not yet being '
        'decoded, or without scheduler.overlap while the engine is busy. Cameras take turns.',
        low=0.01, high=60.0)
    continuous_num_frames: int = parameter(
        'continuous.num_frames', 1, LIVE, 'Frames that the standing question looks at.',
        low=1, high=32)
    overlay_enable: bool = parameter(
        'overlay.enable', True, LIVE, 'Publish ~/overlay and ~/saliency where somebody listens.')
    diagnostics_period: float = parameter(
        'diagnostic_updater.period', 1.0, CONFIGURE, 'Seconds between diagnostics.',
        low=0.1, high=10.0)
    diagnostics_max_latency_ms: float = parameter(
        'diagnostics.max_latency_ms', 0.0, LIVE,
        'Warn when the median answer takes longer, milliseconds. 0 never warns.',
        low=0.0, high=1e6)
    diagnostics_min_bandwidth_utilization: float = parameter(
        'diagnostics.min_bandwidth_utilization', 0.0, LIVE,
        'Warn when decoding uses a smaller share of the memory bandwidth. 0 never warns.',
        low=0.0, high=1.0)
    diagnostics_max_temperature_c: float = parameter(
        'diagnostics.max_temperature_c', 95.0, LIVE,
        'Warn from this junction temperature on, until it is 5 degrees lower. 0 never warns.',
        low=0.0, high=150.0)
    diagnostics_stale_after_s: float = parameter(
        'diagnostics.stale_after_s', 3.0, LIVE,
        'A camera without a frame for this long is STALE.', low=0.1, high=3600.0)
    diagnostics_expected_hz: float = parameter(
        'diagnostics.expected_hz', 0.0, LIVE,
        'Frame rate that cameras should have; fewer than 80 % of it is a warning. 0: any.',
        low=0.0, high=1000.0)
    export_otel: bool = parameter(
        'export.otel', False, CONFIGURE,
        'Send traces and metrics by OpenTelemetry (OTLP over HTTP) to the collector that the '
        'variables OTEL_EXPORTER_OTLP_* name. Needs the opentelemetry packages.')
    export_prometheus_port: int = parameter(
        'export.prometheus_port', 0, CONFIGURE,
        'Port of 127.0.0.1 that shows counters to Prometheus. 0 is off. Needs prometheus-client.',
        low=0, high=65535)
    autostart: bool = parameter(
        'autostart', True, CONFIGURE, 'Configure and activate by itself at start.')

    @classmethod
    def table(cls) -> tuple[Field[Any], ...]:
        """Return the fields; ``field.metadata`` is what :func:`parameter` was given."""
        return fields(cls)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """
        Make settings from ROS parameter values by name; names that are not ours are passed over.

        :raises ValueError: one sentence with every reason.
        """
        own: dict[str, Any] = {}
        reasons: list[str] = []
        for spec in cls.table():
            name = spec.metadata['name']
            if name not in values:
                continue
            try:
                own[spec.name] = checked(spec, values[name])
            except ValueError as error:
                reasons.append(str(error))
        if not reasons:
            settings = cls(**own)
            reasons = settings._contradictions()
            if not reasons:
                return settings
        raise ValueError('; '.join(reasons))

    def _contradictions(self) -> list[str]:
        """Return what is wrong with values that are each in range."""
        reasons = []
        if self.vision_min_pixels > self.vision_max_pixels:
            reasons.append(f'vision.min_pixels {self.vision_min_pixels} is above '
                           f'vision.max_pixels {self.vision_max_pixels}')
        if self.continuous_num_frames > self.clip_length:
            reasons.append(f'continuous.num_frames {self.continuous_num_frames} is above '
                           f'clip.length {self.clip_length}')
        if self.continuous_enable and not self.continuous_question.strip():
            reasons.append('continuous.enable needs a continuous.question')
        try:
            self.camera_topics()
            self.standing_cameras()
            parse_region(self.pruning_keep_region)
        except ValueError as error:
            reasons.append(str(error))
        try:
            parse_weights(self.pruning_weights, self.pruning_selector)
        except ValueError as error:
            reasons.append(f'pruning.weights: {error}')
        return reasons

    def fewer(self) -> Fewer:
        """Return how tokens are saved beside the engine's selector."""
        dropper = self.pruning_selector if self.pruning_selector in AFTER else ''
        return Fewer(dropper, self.pruning_least_margin, self.pruning_roi)

    def standing_cameras(self) -> tuple[str, ...]:
        """
        Return the names of the cameras that the standing question is about.

        :raises ValueError: for one that there is not.
        """
        names = tuple(self.camera_topics())
        wanted = [name.strip().strip('/') for name in self.continuous_cameras.split(',')]
        if wanted == ['']:
            return names[:1]
        if wanted == ['all']:
            return names
        for name in wanted:
            if name not in names:
                raise ValueError(f"continuous.cameras: there is no camera '{name}'; there are "
                                 f"{', '.join(names)}")
        return tuple(dict.fromkeys(wanted))

    def camera_topics(self) -> dict[str, str]:
        """
        Return the base topic of each camera by its name, in order.

        :raises ValueError: for an entry that is empty, lacks a topic, or comes twice.
        """
        topics: dict[str, str] = {}
        for entry in self.cameras:
            name, given, topic = entry.partition('=')
            name, topic = name.strip(), topic.strip()
            if not name.lstrip('/') or (given and not topic):
                raise ValueError(f"cameras: '{entry}' is neither NAME nor NAME=TOPIC")
            topic = topic or f'{name}/image_raw'
            if not TOPIC.fullmatch(topic):
                raise ValueError(f"cameras: '{topic}' of '{entry}' cannot be the name of a topic: "
                                 'letters, digits, _ and / only, no digit first')
            name = name.strip('/')
            if name in topics:
                raise ValueError(f"cameras: '{name}' comes twice")
            topics[name] = topic
        return topics

    def template(self) -> str:
        """
        Return the text that questions are put into.

        :raises ValueError: for a file that cannot be read or does not hold {question} once.
        """
        if not self.prompt_template_file:
            return '{question}'
        try:
            text = Path(self.prompt_template_file).read_text(encoding='utf-8')
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f'prompt.template_file cannot be read: {error}') from None
        if text.count('{question}') != 1:
            raise ValueError(f'prompt.template_file {self.prompt_template_file} must hold '
                             f'{{question}} once, it does {text.count("{question}")} times')
        return text


def declarations() -> list[Any]:
    """Return (name, default, descriptor) of each, as ``Node.declare_parameters`` takes them."""
    return [(s.metadata['name'],
             list(s.default) if isinstance(s.default, tuple) else s.default, descriptor(s))
            for s in Settings.table()]


def refusal(changes: Iterable[Parameter], current: Mapping[str, Any], *, active: bool,
            unconfigured: bool) -> tuple[Settings | None, SetParametersResult]:
    """
    Judge a set of changes: all are taken or none.

    :param changes: what somebody wants to set.
    :param current: values now, by name.
    :param active: the node answers questions.
    :param unconfigured: the node holds no model.
    :return: the settings that would hold, or ``None``, and the answer to the caller.
    """
    wanted = dict(current)
    reasons = []
    when = {spec.metadata['name']: spec.metadata['when'] for spec in Settings.table()}
    for change in changes:
        if change.name in when and change.value != current.get(change.name):
            if when[change.name] == CONFIGURE and not unconfigured:
                reasons.append(f'{change.name} can be changed only while the node is unconfigured')
            elif when[change.name] == ACTIVATE and active:
                reasons.append(f'{change.name} can be changed only while the node is not active')
        wanted[change.name] = change.value
    settings = None
    try:
        settings = Settings.of(wanted)
    except ValueError as error:
        reasons.append(str(error))
    if reasons:
        return None, SetParametersResult(successful=False, reason='; '.join(reasons))
    return settings, SetParametersResult(successful=True)
