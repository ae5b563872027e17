"""What everybody can listen to: answers, their pieces, their costs, their pictures."""

from __future__ import annotations

import time

from qwen_vl_msgs.msg import Answer, AnswerChunk, InferenceMetrics, ModelInfo
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from std_msgs.msg import String

from qwen_vl_ros.engine.errors import ErrorCode
from qwen_vl_ros.engine.types import Delta, Stage
from qwen_vl_ros.measure.export import Exports, Finished, open_exports
from qwen_vl_ros.node.messages import answer_message, chunk_message
from qwen_vl_ros.node.parameters import Settings
from qwen_vl_ros.node.pictures import Pictures
from qwen_vl_ros.node.requests import Job, Outcome, Queued


class Publications:
    """
    The node's output topics.

    :param node: owns the publishers.
    :param peak_gb_s: the device's memory bandwidth, 1e9 bytes/s; NaN when unknown.
    """

    def __init__(self, node: Node, peak_gb_s: float) -> None:
        self._peak_gb_s = peak_gb_s
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._answer = node.create_publisher(Answer, '~/answer', 10)
        self._text = node.create_publisher(String, '~/answer_text', 10)
        self._stream = node.create_publisher(AnswerChunk, '~/answer_stream', 100)
        self._metrics = node.create_publisher(InferenceMetrics, '~/metrics', 10)
        self._model_info = node.create_publisher(ModelInfo, '~/model_info', latched)
        self._pictures = Pictures(node)
        self._numbers: dict[Job, int] = {}
        self._exports = Exports(())
        self._model = ''

    def model_info(self, message: ModelInfo) -> None:
        """Publish the facts about the model, also for those who come later."""
        self._model_info.publish(message)

    def cameras(self, settings: Settings) -> None:
        """Have topics for the pictures of the cameras in the settings."""
        self._pictures.serve(tuple(settings.camera_topics()))

    def export(self, settings: Settings | None, model: str = '') -> None:
        """
        Open the exports that the settings ask for; those open before are closed.

        :param settings: ``None`` opens none.
        :param model: name of the model that answers.
        """
        self._exports.close()
        self._exports, self._model = Exports(()), model
        if settings is not None:
            self._exports = open_exports(
                otel=settings.export_otel, prometheus_port=settings.export_prometheus_port,
                ros2_tracing=True)

    def _tell_exports(self, job: Job, event: Stage | Outcome) -> None:
        if isinstance(event, Stage):
            self._exports.entered(job.question.question_id, event.name)
            return
        answer = event.answer
        cameras = ','.join(frame.camera for frame in job.frames if frame.camera)
        self._exports.finished(Finished(
            job.timeline, event.code.name.lower(), answer.finish_reason if answer else '',
            answer.prompt_tokens if answer else 0, len(answer.token_ids) if answer else 0,
            answer.vision_tokens_in if answer else 0, answer.vision_tokens_kept if answer else 0,
            self._model, {'source': job.question.source, 'camera': cameras}))

    def event(self, job: Job, event: Queued | Stage | Delta | Outcome, *, pictures: bool) -> None:
        """
        Publish what a listener of topics should know of an event.

        :param pictures: draw those of an answer where somebody listens.
        """
        if isinstance(event, Delta):
            self._chunk(job, event.text)
        elif isinstance(event, Outcome):
            self._chunk(job, '', done=True)
            self._numbers.pop(job, None)
            start_ns = time.monotonic_ns()
            try:
                self._outcome(job, event)
                if pictures and event.answer is not None:
                    self._pictures.show(job, event.answer)
            finally:
                job.timeline.add('publish', start_ns, time.monotonic_ns())
                self._tell_exports(job, event)
        elif isinstance(event, Stage):
            self._tell_exports(job, event)

    def _chunk(self, job: Job, delta: str, done: bool = False) -> None:
        number = self._numbers.get(job, 0)
        self._numbers[job] = number + 1
        self._stream.publish(chunk_message(job, number, delta, done))

    def _outcome(self, job: Job, outcome: Outcome) -> None:
        """A failed question is announced where it came from; only a topic has no other way."""
        if outcome.code == ErrorCode.NONE or job.question.source == 'topic':
            message = answer_message(job, outcome, self._peak_gb_s)
            self._answer.publish(message)
            if outcome.code == ErrorCode.NONE:
                self._text.publish(String(data=message.text))
                self._metrics.publish(message.metrics)

    def refused(self, job: Job, outcome: Outcome) -> None:
        """Announce a question from a topic that was not taken."""
        self._outcome(job, outcome)
