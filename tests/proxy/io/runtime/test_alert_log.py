"""An alert is said when it begins and when it is over, and not in between."""

from __future__ import annotations

import logging

import pytest

from ajet_proxy.io.runtime.alert_log import Alarm


def test_each_alert_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    alarm = Alarm()
    for alerts in ({}, {"a": "a is 6 %"}, {"a": "a is 7 %"}, {"a": "a is 7 %", "b": "b is 9 %"}, {"b": "b is 9 %"}):
        alarm.look(alerts)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [("WARNING", "alert: a is 6 %"), ("WARNING", "alert: b is 9 %"), ("INFO", "alert over: a")]
