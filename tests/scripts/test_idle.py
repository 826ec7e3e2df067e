"""Guards the idle share of a GPU: what counts is time between the work of steps, by the device's own clock."""

from __future__ import annotations

import pytest

from cbatch.runtime.tracing import TraceSummary, span
from scripts.gpu.idle import Idle, StepEvents, gap_share


class Device:
    """A queue: work and events are done in order, and not before the host has given them. Times are in ms."""

    def __init__(self) -> None:
        self.host = self.done = 0.0

    def launch(self, takes: float) -> None:
        self.done = max(self.done, self.host) + takes

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = float("nan")

    def record(self) -> None:
        self.device.launch(0)
        self.at = self.device.done

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def run(
    device: Device, events: StepEvents, steps: int, *, late: float, model: float = 10, before_sample: float = 0
) -> None:
    """Steps whose host needs `late` ms before it launches the model, and then does not wait for the device."""
    with events.recorded():
        for _ in range(steps):
            with span("step"), span("build"):
                device.host += late
            with span("forward"):
                for _ in range(10):
                    device.launch(model / 10)
            device.host += before_sample
            with span("sample"):
                device.launch(1)


@pytest.mark.parametrize(
    ("late", "before_sample", "share"),
    [
        pytest.param(3, 0, 0.0, id="a host that is ahead: what it does meanwhile is not the device's time"),
        pytest.param(20, 0, 99 * 9 / (99 * 20 + 11), id="a host that is late: 11 ms of work are given every 20 ms"),
        pytest.param(0, 30, (20 + 99 * 19) / 3001, id="a host that needs tokens before it samples"),
    ],
)
def test_the_device_waits_for_a_late_host(late: float, before_sample: float, share: float) -> None:
    """Guards the figure itself, with a model of 10 ms and a sampler of 1 ms."""
    device = Device()
    events = StepEvents(device.event)
    run(device, events, 100, late=late, before_sample=before_sample)
    idle = events.idle()
    assert idle is not None and idle.num_steps == 100 and idle.share == pytest.approx(share)
    if not share:
        assert idle.share == 0 and idle.seconds == pytest.approx(100 * 11e-3)


def test_steps_at_both_ends_do_not_count() -> None:
    """Guards the steady state: prompts at the beginning, and requests that have gone at the end."""
    device = Device()
    events = StepEvents(device.event, skip=10)
    run(device, events, 10, late=500)
    run(device, events, 20, late=1)
    device.host = device.done
    run(device, events, 5, late=500)
    idle = events.idle(last=5)
    assert idle is not None and idle.num_steps == 20 and idle.share == 0
    assert idle.seconds == pytest.approx(20 * 11e-3)
    assert StepEvents(device.event).idle() is None


def test_gaps_between_kernels_are_what_is_left() -> None:
    """Guards the two shares against each other: tracing makes steps longer, and kernels stay as they are."""
    idle = Idle(num_steps=100, seconds=1.0, share=0.02)
    trace = TraceSummary(num_steps=10, seconds=0.2, waited_s=0.0, idle_share=0.55, on_device=True)  # 9 ms of kernels
    assert gap_share(idle, trace) == pytest.approx(1 - 0.02 - 0.9)
    assert gap_share(idle, TraceSummary(10, 0.2, 0.0, None, True)) is None
    assert gap_share(idle, TraceSummary(10, 0.2, 0.0, 0.55, False)) is None
