"""ROS messages from and to the node's own types; pictures are :mod:`qwen_vl_ros.pipeline`'s."""

from __future__ import annotations

import math
from typing import Any

from builtin_interfaces.msg import Duration
from qwen_vl_msgs.action import AnswerQuestion
from qwen_vl_msgs.msg import Answer, AnswerChunk, InferenceMetrics, ModelInfo, StageCost
from qwen_vl_msgs.srv import Ask
from std_msgs.msg import Header

from qwen_vl_ros.engine import types
from qwen_vl_ros.engine.constrain import is_json
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import STAGES as TIMELINE_STAGES
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.node.parameters import MAX_DEADLINE_S, Settings
from qwen_vl_ros.node.requests import Job, Outcome, Question, Queued

STAGES = {
    'vision': AnswerQuestion.Feedback.VISION,
    'prefill': AnswerQuestion.Feedback.PREFILL,
    'decode': AnswerQuestion.Feedback.DECODE,
}

#: Places of the timeline's stages in an answer.
STAGE_ORDER = {name: place for place, name in enumerate(TIMELINE_STAGES)}


def seconds(duration: Duration) -> float:
    """Return a duration in seconds."""
    return duration.sec + duration.nanosec * 1e-9


def question_from_goal(
    goal: AnswerQuestion.Goal, settings: Settings, question_id: str,
) -> Question:
    """:raises EngineError: BAD_REQUEST that names the field."""
    _finite('temperature', goal.temperature)
    _finite('keep_ratio', goal.keep_ratio)
    options: dict[str, Any] = {'temperature': goal.temperature}
    if goal.system_prompt:
        options['system_prompt'] = goal.system_prompt
    if goal.max_new_tokens:
        options['max_new_tokens'] = goal.max_new_tokens
    if goal.keep_ratio:
        if not 0 < goal.keep_ratio <= 1:
            raise EngineError(
                ErrorCode.BAD_REQUEST,
                f'keep_ratio is {goal.keep_ratio}; expected in (0, 1], or 0 for the default')
        options['keep_ratio'] = goal.keep_ratio
    max_age_s = seconds(goal.max_image_age)
    if max_age_s < 0:
        raise EngineError(ErrorCode.BAD_REQUEST, f'max_image_age is {max_age_s} s; expected >= 0')
    return Question(
        text=goal.question, cameras=tuple(goal.cameras),
        messages=(*goal.images, *goal.compressed_images), num_frames=max(1, goal.num_frames),
        max_age_s=max_age_s or None,
        options={**options, 'session_id': goal.session_id, 'json_schema': goal.json_schema},
        deadline_s=_deadline(goal.deadline, settings.generation_deadline_s),
        source='action', question_id=question_id)


def question_from_ask(request: Ask.Request, settings: Settings, question_id: str) -> Question:
    """:raises EngineError: BAD_REQUEST that names the field."""
    longest = settings.service_max_deadline
    return Question(
        text=request.question, cameras=(request.camera,) if request.camera else (),
        options={'max_new_tokens': request.max_new_tokens} if request.max_new_tokens else {},
        deadline_s=min(_deadline(request.deadline, longest), longest),
        source='service', question_id=question_id)


def _deadline(duration: Duration, default_s: float) -> float:
    value = seconds(duration)
    if not 0 <= value <= MAX_DEADLINE_S:
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f'deadline is {value:g} s; expected 0 (the node\'s) to {MAX_DEADLINE_S:g} s')
    return value or default_s


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise EngineError(ErrorCode.BAD_REQUEST, f'{name} is {value}; expected a finite number')


def header_of(job: Job) -> Header:
    """Return stamp and frame_id of the newest picture that the question is about, unchanged."""
    return frame_header(max(job.frames, key=lambda f: f.stamp_ns)) if job.frames else Header()


def frame_header(frame: Frame) -> Header:
    """Return a picture's stamp and frame_id, unchanged."""
    header = Header(frame_id=frame.frame_id)
    header.stamp.sec, header.stamp.nanosec = divmod(frame.stamp_ns, 10**9)
    return header


def answer_message(
    job: Job | None, outcome: Outcome, peak_gb_s: float = math.nan,
) -> Answer:
    """
    Return the message for a question that ended, well or not.

    :param job: ``None`` for a question that was refused before it was one.
    :param peak_gb_s: the device's memory bandwidth, 1e9 bytes/s; NaN when unknown.
    """
    if job is None:
        message = Answer(finish_reason=outcome.code.name.lower(), confidence=math.nan)
        message.metrics.bandwidth_utilization = math.nan
        return message
    question, answer = job.question, outcome.answer
    message = Answer(
        header=header_of(job), question_id=question.question_id, question=question.text,
        camera=','.join(frame.camera for frame in job.frames if frame.camera),
        finish_reason=outcome.code.name.lower(), confidence=math.nan)
    if answer is None:
        message.metrics.bandwidth_utilization = math.nan
        message.metrics.image_age = job.image_age_ns / 1e6
        return message
    # Also a partial answer of a question that failed says why it failed.
    message.finish_reason = (
        answer.finish_reason if outcome.code in (
            ErrorCode.NONE, ErrorCode.CANCELLED, ErrorCode.DEADLINE)
        else outcome.code.name.lower())
    message.text = answer.text
    if question.options.get('json_schema') and is_json(answer.text):
        message.json = answer.text
    message.confidence = float(answer.confidence)
    message.approximate = list(answer.approximate)
    message.metrics = metrics_message(answer, peak_gb_s)
    return message



def metrics_message(answer: types.Answer, peak_gb_s: float = math.nan) -> InferenceMetrics:
    """Return the costs of an answer as its timeline has them."""
    line = answer.timeline
    rate, bandwidth = decode_rates(line)
    times = {
        'image_age': line.ms('image_age'), 'queue': line.ms('queue'),
        'preprocess': line.ms('decode_message') + line.ms('patches'), 'upload': line.ms('upload'),
        'vision': line.ms('encode'), 'saliency': line.ms('select'), 'prefill': line.ms('prefill'),
        'time_to_first_token': line.time_to_first_token_ms(), 'decode': line.ms('token'),
        'total': line.total_ms()}
    return InferenceMetrics(
        # A whole number in a float field ends the process in the generated C code.
        **{name: float(value) for name, value in times.items()},
        vision_tokens_in=answer.vision_tokens_in, vision_tokens_kept=answer.vision_tokens_kept,
        prompt_tokens=answer.prompt_tokens, output_tokens=len(answer.token_ids),
        decode_tokens_per_s=rate, decode_bandwidth_gb_s=bandwidth,
        bandwidth_utilization=bandwidth / peak_gb_s, stages=stage_messages(line))


def stage_messages(line: Timeline) -> list[StageCost]:
    """Return what each stage of a timeline took, moved and computed, in the order of stages."""
    found: dict[str, StageCost] = {}
    for span in line.spans:
        cost = found.setdefault(span.name, StageCost(name=span.name))
        cost.time += span.ms
        cost.calls += 1
        cost.bytes_read += int(span.bytes_read)
        cost.bytes_written += int(span.bytes_written)
        cost.flops += int(span.flops)
    return sorted(found.values(), key=lambda cost: STAGE_ORDER.get(cost.name, len(STAGE_ORDER)))


def decode_rates(line: Timeline) -> tuple[float, float]:
    """Return tokens/s and 1e9 bytes/s of the decode steps; 0 for an answer without any."""
    spans = [span for span in line.spans if span.name == 'token']
    spent_s = sum(span.ms for span in spans) / 1e3
    if not spent_s:
        return 0.0, 0.0
    # A step that several answers share moved its weights once for all of them.
    moved = sum(span.shared * (span.bytes_read + span.bytes_written) for span in spans)
    return len(spans) / spent_s, moved / spent_s / 1e9


def chunk_message(job: Job, number: int, delta: str, done: bool = False) -> AnswerChunk:
    """Return one piece of a streamed answer."""
    return AnswerChunk(header=header_of(job), question_id=job.question.question_id,
                       seq_no=number, delta=delta, done=done)


def model_info_message(info: Any) -> ModelInfo:
    """Return the facts of an engine's ``info``."""
    return ModelInfo(
        name=str(info.name), revision=str(info.revision), device=str(info.device),
        dtype=str(info.dtype), quantization=str(info.quantization),
        weight_bytes=int(info.weight_bytes), min_pixels=int(info.min_pixels),
        max_pixels=int(info.max_pixels), max_context=int(info.max_context),
        engine_version=str(info.engine_version))


def feedback_message(event: Queued | types.Stage | types.Delta) -> AnswerQuestion.Feedback:
    """Return the action's feedback for an event."""
    if isinstance(event, Queued):
        return AnswerQuestion.Feedback(
            stage=AnswerQuestion.Feedback.QUEUED, queue_position=event.position)
    if isinstance(event, types.Stage):
        return AnswerQuestion.Feedback(stage=STAGES[event.name])
    return AnswerQuestion.Feedback(
        stage=AnswerQuestion.Feedback.DECODE, delta=event.text, tokens=event.tokens)
