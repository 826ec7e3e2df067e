"""Guards the idle share of a GPU: what counts is time between the work of steps, by the device's own clock."""

from __future__ import annotations

import pytest

from cbatch.runtime.tracing import span
from scripts.gpu.idle import StepEvents


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


def run(device: Device, events: StepEvents, steps: int, *, late: float, before_sample: float) -> None:
    """Steps whose host needs `late` ms before it launches the model, and then does not wait for the device."""
    with events.recorded():
        for _ in range(steps):
            with span("step"), span("build"):
                device.host += late
            with span("forward"):
                for _ in range(10):
                    device.launch(1)
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
