"""The lifecycle node ``qwen_vl``: wiring of parameters, cameras, questions and answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from qwen_vl_msgs.action import AnswerQuestion
from qwen_vl_msgs.srv import Ask
from rcl_interfaces.msg import SetParametersResult
from rclpy.action import ActionServer, CancelResponse
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.task import Future
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.types import Delta, Stage
from qwen_vl_ros.node import diagnostics, messages
from qwen_vl_ros.node.cameras import CameraInput
from qwen_vl_ros.node.continuous import ContinuousMode, Watch
from qwen_vl_ros.node.device import explain_failed_load, hardware_id, peak_bandwidth_gb_s
from qwen_vl_ros.node.parameters import MAX_DEADLINE_S, Settings, declarations, refusal
from qwen_vl_ros.node.perception import EngineLike, Perception
from qwen_vl_ros.node.publish import Publications
from qwen_vl_ros.node.requests import Job, Outcome, Question, Queued

SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE

#: Makes an engine from settings; raises EngineError or anything else.
Loader = Callable[[Settings], EngineLike]


class QwenVlNode(LifecycleNode):
    """
    Answers questions about camera topics.

    *configure* loads and warms up the model, *activate* subscribes and takes questions,
    *deactivate* stops both and drops all frames, *cleanup* frees the model's memory.

    Callbacks never wait: they store a frame, queue a question, or await a future that the engine's
    thread completes. Times are measured on a steady clock, ages of pictures on ROS time.

    :param load: makes the engine.
    :raises ValueError: parameters that cannot be used; one sentence.
    """

    def __init__(self, load: Loader, **options: Any) -> None:
        super().__init__('qwen_vl', **options)
        self.declare_parameters('', declarations())
        self.settings = Settings.of(self._values())
        self.state = 'unconfigured'
        self._load = load
        self._load_failure = ''
        self._load_time_s = 0.0
        self._perception: Perception | None = None
        self._cameras: list[CameraInput] = []
        room = self.create_guard_condition(self._ask_due)
        self._continuous = ContinuousMode(self._start, self.get_logger().debug, room.trigger)
        self._goals: dict[bytes, Job] = {}
        #: Goals and calls of services that have no result yet.
        self.asking = 0
        self._numbers = itertools.count(1)
        self._run_id = f'{time.time_ns() // 10**6 & 0xFFFFFF:06x}'
        self._statistics = diagnostics.Statistics()
        board = hardware_id()
        self._peak_gb_s = peak_bandwidth_gb_s(board)
        self._reporter = diagnostics.Reporter(
            self.get_name(), board, self._statistics, self._peak_gb_s)
        self._switching = threading.RLock()
        self._steady = Clock(clock_type=ClockType.STEADY_TIME)
        self.publications = Publications(self, self._peak_gb_s)
        self._diagnostics = self.create_publisher(DiagnosticArray, '/diagnostics', 10)
        group = ReentrantCallbackGroup()
        self.create_service(Ask, '~/ask', self._on_ask, callback_group=group)
        self.create_service(SetBool, '~/enable', self._on_enable, callback_group=group)
        self.create_service(
            Trigger, '~/reset_session', self._on_reset_session, callback_group=group)
        self.create_subscription(String, '~/question', self._on_question, 10, callback_group=group)
        self._actions = ActionServer(
            self, AnswerQuestion, '~/answer_question', self._on_goal, callback_group=group,
            cancel_callback=self._on_cancel, result_timeout=int(MAX_DEADLINE_S) + 30)
        self._period_timer(0.1, self._tick)
        self._period_timer(0.5, self._match_cameras)
        self._diagnostics_timer: Any = None
        self._continuous_timer: Any = None
        self._restart_timers()
        self.add_on_set_parameters_callback(self._on_parameters)

    # Parameters and timers

    def _values(self) -> dict[str, Any]:
        return {name: self.get_parameter(name).value for name, _, _ in declarations()}

    def _on_parameters(self, changes: list[Parameter]) -> SetParametersResult:
        settings, result = refusal(
            changes, self._values(), active=self.state == 'active',
            unconfigured=self.state == 'unconfigured')
        if settings is not None:
            before, self.settings = self.settings, settings
            if self._perception is not None:
                self._perception.settings = settings
            if (before.continuous_rate_hz, before.diagnostics_period) != (
                    settings.continuous_rate_hz, settings.diagnostics_period):
                self._restart_timers()
        return result

    def _period_timer(self, period_s: float, callback: Callable[[], None]) -> Any:
        """Return a timer on the steady clock: it also ticks where /clock stands still."""
        return self.create_timer(period_s, callback, clock=self._steady)

    def _restart_timers(self) -> None:
        for timer in (self._diagnostics_timer, self._continuous_timer):
            if timer is not None:
                self.destroy_timer(timer)
        self._diagnostics_timer = self._period_timer(
            self.settings.diagnostics_period, self._publish_diagnostics)
        self._continuous_timer = self._period_timer(
            1.0 / self.settings.continuous_rate_hz, self._ask_standing_question)

    # Life cycle

    def on_configure(self, state: Any) -> TransitionCallbackReturn:
        """Load the model; on failure the node stays unconfigured and says why."""
        del state
        with self._switching:
            started = time.monotonic()
            self._load_failure = ''
            try:
                engine = self._load(self.settings)
                self._perception = Perception(
                    engine, self.settings, self._ros_now_ns, self._publish_model_info)
                self._publish_model_info()
            except Exception as error:
                self._load_failure = explain_failed_load(error)
                self._perception = None
                self.get_logger().error(f'configuration failed: {self._load_failure}')
                return FAILURE
            self._load_time_s = time.monotonic() - started
            self.state = 'inactive'
            info = engine.info
            self.publications.export(self.settings, info.name)
            self.get_logger().info(
                f'model {info.name} on {info.device} in {info.dtype}, {info.weight_bytes >> 20} '
                f'MiB of weights, loaded in {self._load_time_s:.1f} s')
            return SUCCESS

    def _publish_model_info(self) -> None:
        assert self._perception is not None
        self.publications.model_info(
            messages.model_info_message(self._perception.engine.info))

    def on_activate(self, state: Any) -> TransitionCallbackReturn:
        """Subscribe to the cameras and take questions."""
        with self._switching:
            assert self._perception is not None
            try:
                self._perception.settings = self.settings
                self._perception.start()
                self.publications.cameras(self.settings)
                self._cameras = [
                    CameraInput(self, name, topic, self.settings.image_transport,
                                self.settings.image_qos, self._perception.receive)
                    for name, topic in self.settings.camera_topics().items()]
            except Exception as error:
                self.get_logger().error(f'activation failed: {error}')
                self._close()
                return FAILURE
            self._continuous.restart()
            self.state = 'active'
            topics = ', '.join(camera.topic for camera in self._cameras) or 'no camera'
            self.get_logger().info(f'ready for questions about {topics}')
            return super().on_activate(state)

    def on_deactivate(self, state: Any) -> TransitionCallbackReturn:
        """End all questions, drop subscriptions and frames."""
        with self._switching:
            self._close()
            self.state = 'inactive'
            return super().on_deactivate(state)

    def on_cleanup(self, state: Any) -> TransitionCallbackReturn:
        """Free the model's memory."""
        del state
        with self._switching:
            self._free()
            return SUCCESS

    def on_shutdown(self, state: Any) -> TransitionCallbackReturn:
        """Stop everything, from whatever state."""
        del state
        with self._switching:
            self._close()
            self._free()
            self.state = 'finalized'
            return SUCCESS

    def on_error(self, state: Any) -> TransitionCallbackReturn:
        """Go back to unconfigured after a fault in a transition."""
        return self.on_cleanup(state)

    def _close(self) -> None:
        for camera in self._cameras:
            camera.destroy()
        self._cameras = []
        if self._perception is not None and not self._perception.stop():
            self.get_logger().error('the engine has not let go of its question yet')

    def _free(self) -> None:
        if self._perception is not None:
            self._perception.engine.close()
            self._perception = None
        self.state = 'unconfigured'

    def end_questions(self, timeout_s: float = 0.5) -> None:
        """End all questions for good; the executor still has to tell their askers."""
        with self._switching:
            self.state = 'finalized'
            if self._perception is not None:
                self._perception.stop('the node was shut down', timeout_s)

    def close(self) -> None:
        """End questions and cameras for good; the last call before the node is destroyed."""
        with self._switching:
            self._close()
            self._actions.destroy()
            self.publications.export(None)

    # Questions

    def _start(self, make: Callable[[str], Question], watch: Watch) -> Job:
        """
        Queue a question.

        :param make: makes it, given its id.
        :raises EngineError: why it is refused.
        """
        if self._perception is None or self.state != 'active':
            raise EngineError(ErrorCode.INACTIVE, f'the node is {self.state}; activate it first')
        job = Job(make(f'{self._run_id}-{next(self._numbers)}'),
                  lambda job, event: self._on_event(job, event, watch))
        self._perception.requests.submit(job)
        return job

    def _on_event(self, job: Job, event: Queued | Stage | Delta | Outcome, watch: Watch) -> None:
        """Tell the asker, then everybody, mostly on the engine's thread."""
        if isinstance(event, Outcome):
            self._statistics.count(job, event)
            if self._perception is not None:
                self._perception.count(job, event)
            line = f'request {job.question.question_id}: {event.code.name} {event.message}'.strip()
            if event.code == ErrorCode.NONE:
                self.get_logger().info(f'{line} in {job.timeline.total_ms():.1f} ms')
            else:
                self.get_logger().warning(line)
        for tell in (lambda: watch(job, event), lambda: self.publications.event(
                job, event, pictures=self.settings.overlay_enable)):
            try:
                tell()
            except Exception as error:
                text = f'could not publish: {type(error).__name__}: {error}'
                self._statistics.note_publish_error(text)
                self.get_logger().error(text, throttle_duration_sec=10.0)

    async def _answer(self, make: Callable[[str], Question], watch: Watch | None = None,
                      started: Callable[[Job], None] | None = None) -> tuple[Any, Outcome]:
        """Queue a question and await its outcome without holding the executor."""
        ended: Any = Future(executor=self.executor)

        def both(job: Job, event: Queued | Stage | Delta | Outcome) -> None:
            if watch is not None:
                watch(job, event)
            if isinstance(event, Outcome) and self.executor is not None:
                # Setting the result here would leave the executor asleep.
                self.executor.create_task(ended.set_result, event)

        try:
            job = self._start(make, both)
        except EngineError as error:
            self._statistics.refused()
            return None, Outcome(error.code, error.message)
        self.asking += 1
        try:
            if started is not None:
                started(job)
            return job, await ended
        finally:
            self.asking -= 1

    async def _on_ask(self, request: Ask.Request, response: Ask.Response) -> Ask.Response:
        job, outcome = await self._answer(
            lambda name: messages.question_from_ask(request, self.settings, name))
        response.answer = messages.answer_message(job, outcome, self._peak_gb_s)
        response.error_code, response.error_msg = int(outcome.code), outcome.message
        return response

    async def _on_goal(self, handle: Any) -> AnswerQuestion.Result:
        goal_id = bytes(handle.goal_id.uuid)

        def feedback(job: Job, event: Queued | Stage | Delta | Outcome) -> None:
            if not isinstance(event, Outcome):
                handle.publish_feedback(messages.feedback_message(event))

        def started(job: Job) -> None:
            self._goals[goal_id] = job
            if handle.is_cancel_requested:
                self._cancel(job)

        job, outcome = await self._answer(
            lambda name: messages.question_from_goal(handle.request, self.settings, name),
            feedback, started)
        self._goals.pop(goal_id, None)
        result = AnswerQuestion.Result()
        result.answer = messages.answer_message(job, outcome, self._peak_gb_s)
        result.error_code, result.error_msg = int(outcome.code), outcome.message
        if outcome.code == ErrorCode.NONE:
            handle.succeed()
        elif outcome.code == ErrorCode.CANCELLED and handle.is_cancel_requested:
            handle.canceled()
        else:
            handle.abort()
        return result

    def _on_cancel(self, handle: Any) -> CancelResponse:
        job = self._goals.get(bytes(handle.goal_id.uuid))
        if job is not None:
            self._cancel(job)
        return CancelResponse.ACCEPT

    def _cancel(self, job: Job) -> None:
        if self._perception is not None:
            self._perception.requests.cancel(job)

    def _on_question(self, message: String) -> None:
        def make(name: str) -> Question:
            return Question(message.data, deadline_s=self.settings.generation_deadline_s,
                            source='topic', question_id=name)

        try:
            self._start(make, lambda job, event: None)
        except EngineError as error:
            self._statistics.refused()
            refused = Job(make(''), lambda job, event: None)
            self.publications.refused(refused, Outcome(error.code, error.message))

    def _ask_standing_question(self) -> None:
        if self.state == 'active' and self._perception is not None:
            self._continuous.tick(self.settings, self._perception)

    def _ask_due(self) -> None:
        if self.state == 'active' and self._perception is not None:
            self._continuous.pump(self.settings, self._perception)

    def _on_enable(self, request: SetBool.Request, response: SetBool.Response) -> Any:
        result = self.set_parameters([Parameter('continuous.enable', value=request.data)])[0]
        response.success, response.message = result.successful, result.reason
        return response

    def _on_reset_session(self, request: Trigger.Request, response: Trigger.Response) -> Any:
        del request
        response.success = self._perception is not None
        response.message = '' if response.success else 'no model is loaded'
        if self._perception is not None:
            self._perception.forget_sessions()
        return response

    # Periodic work

    def _ros_now_ns(self) -> int:
        return self.get_clock().now().nanoseconds

    def _tick(self) -> None:
        if self._perception is not None:
            self._perception.requests.tick()
        self._ask_due()

    def _match_cameras(self) -> None:
        for camera in tuple(self._cameras):
            camera.match()

    def _publish_diagnostics(self) -> None:
        perception = self._perception
        facts = diagnostics.Facts(
            state=self.state, load_failure=self._load_failure, load_time_s=self._load_time_s,
            info=perception.engine.info if perception is not None else None,
            queue_depth=perception.requests.depth if perception is not None else 0,
            cameras=tuple(self._cameras),
            store=perception.store if perception is not None else None,
            overlap=perception.overlap if perception is not None else None)
        array = self._reporter.report(facts, self.settings)
        array.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(array)
