"""A service call always gets an answer, also when its handler raises."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def guard_services(node: Any, failed: Callable[[str, Exception], None]) -> None:
    """
    Wrap the handlers of a node's services, those that rclpy made itself included.

    rclpy's own handlers raise for what a client got wrong (a life-cycle transition that is not
    possible now, a parameter of a type that does not exist); the executor drops the reply then,
    and the client waits for ever. A guarded handler answers with the response's defaults (success
    false); parameter services name the reason for each parameter.

    :param failed: gets the service's name and the exception.
    """
    for service in node.services:
        service.callback = _guarded(service.callback, service.srv_name, failed)


def _guarded(handler: Callable[..., Any], name: str, failed: Callable[[str, Exception], None]
             ) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(handler):
        async def waiting(request: Any, response: Any) -> Any:
            try:
                return await handler(request, response)
            except Exception as error:
                failed(name, error)
                return refusal(request, response, error)
        return waiting

    def direct(request: Any, response: Any) -> Any:
        try:
            return handler(request, response)
        except Exception as error:
            failed(name, error)
            return refusal(request, response, error)
    return direct


def refusal(request: Any, response: Any, error: Exception) -> Any:
    """Return a fresh response that says no, with the reason where its type has room for it."""
    answer = type(response)()
    reason = f'{type(error).__name__}: {error}'
    if hasattr(answer, 'results') and hasattr(request, 'parameters'):
        from rcl_interfaces.msg import SetParametersResult
        answer.results = [SetParametersResult(successful=False, reason=reason)
                          for _ in request.parameters]
    elif hasattr(answer, 'result') and hasattr(answer.result, 'reason'):
        answer.result.successful = False
        answer.result.reason = reason
    return answer
