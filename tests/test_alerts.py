"""Alerts: what is told, when, and to whom; a webhook that fails neither stops nor slows a run, and shows no secret."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from config.harness import config, load, message
from tracker_reports import step_report

from surogate.config.alerts import URL_VARIABLE, Alerts
from surogate.config.load import published, resolved
from surogate.reporting.alerts import AlertLogger, open_alerts
from surogate.reporting.webhook import Webhook
from surogate_core.api import EndReport, EvalReport
from surogate_core.errors import ConfigError

SECRET = "T0/B1/hunter2"


class Server(ThreadingHTTPServer):
    """A webhook that answers with `statuses`, the last one again and again, and keeps what it gets."""

    def __init__(self, statuses: list[int]) -> None:
        self.statuses, self.received = statuses, list[dict[str, Any]]()
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}/services/{SECRET}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = server.statuses.pop(0) if len(server.statuses) > 1 else server.statuses[0]
        server.received.append({**body, "status": status})
        self.send_response(status)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(*statuses: int) -> Server:
        servers.append(Server(list(statuses)))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Sent(Webhook):
    """A webhook that keeps the events that it is given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.texts: list[str] = []

    def send(self, message: Any) -> None:
        self.events.append((message["event"], message["step"]))
        self.texts.append(message["text"])

    def close(self, seconds: float = 0) -> None:
        pass


def told(losses: list[float], status: str = "done", **keys: Any) -> list[tuple[str, int]]:
    sent = Sent()
    logger = AlertLogger(Alerts(**keys), "run", sent)
    for number, loss in enumerate(losses, 1):
        logger.report(step_report(number, loss=loss, skipped=not math.isfinite(loss)))
    logger.close(status)
    return sent.events


def test_a_series_of_nan_is_one_alert_and_the_next_series_another() -> None:
    assert told([1.0, math.nan, math.inf, 1.0, math.nan]) == [("nan", 2), ("nan", 5)]
    assert told([1.0, math.nan], events=["spike"]) == []


def test_a_spike_is_a_loss_far_above_the_latest_ones() -> None:
    calm = [2.0 + 0.01 * (-1) ** n for n in range(30)]
    assert told([*calm, 5.0, 5.1, 2.0, 5.0]) == [("spike", 31), ("spike", 34)]
    assert told([*calm, 2.05, 2.09]) == [], "within 5 % of the median"
    assert told([5.0, 2.0, 9.0]) == [], "too few steps to compare with"
    assert told([10.0 - 0.1 * n for n in range(60)]) == [], "a falling loss"
    noisy = [2.0 + 0.5 * (-1) ** n for n in range(30)]
    assert told([*noisy, 4.0]) == [] and told([*noisy, 4.0], spike_deviations=1.0)[0][1] in range(20, 32)


def test_a_failure_is_told_and_the_end_only_if_asked_for() -> None:
    assert told([1.0], "failed") == [("failed", 1)] and told([1.0], "interrupted") == [("failed", 1)]
    assert told([1.0], "done") == [] and told([1.0], "done", events=["done"]) == [("done", 1)]


def test_a_failure_is_told_with_its_cause() -> None:
    sent = Sent()
    logger = AlertLogger(Alerts(), "run", sent)
    logger.report(EndReport(step=3, status="failed", message="RunLost: rank 1", time=1e9))
    logger.close("failed")
    assert sent.texts[-1].endswith(": ended: failed: RunLost: rank 1")


def test_a_stall_is_told_once_until_something_is_reported() -> None:
    now, sent = [0.0], Sent()
    logger = AlertLogger(Alerts(stall_seconds=60, events=("stall",)), "run", sent, clock=lambda: now[0])
    logger.report(step_report(7, loss=1.0))
    for seconds in (59.0, 61.0, 200.0):
        now[0] = seconds
        logger.look()
    assert sent.events == [("stall", 7)]
    logger.report(EvalReport(step=7, loss=1.0, valid_tokens=1, duration_ms=1.0, time=0.0))
    now[0] = 300.0
    logger.look()
    logger.close("done")
    assert sent.events == [("stall", 7)] * 2


def test_a_message_is_sent_again_until_the_server_takes_it(serve: Any) -> None:
    server, notices = serve(503, 500, 200), list[str]()
    hook = Webhook(server.address, notices.append, waits=(0.01, 0.01, 0.01))
    hook.send({"event": "nan", "text": "run: nan at step 3"})
    hook.close()
    assert [one["status"] for one in server.received] == [503, 500, 200] and not notices
    assert server.received[-1]["text"] == "run: nan at step 3" and server.received[-1]["time"] > 0


@pytest.mark.parametrize(("status", "says", "tries"), [(404, "answers 404", 1), (500, "answers 500 (3 tries)", 3)])
def test_a_server_that_refuses_is_told_of_without_its_address(serve: Any, status: int, says: str, tries: int) -> None:
    server, notices = serve(status), list[str]()
    hook = Webhook(server.address, notices.append, waits=(0.01, 0.01))
    hook.send({"event": "nan", "text": "x"})
    hook.close()
    assert len(server.received) == tries
    assert len(notices) == 1 and says in notices[0] and SECRET not in notices[0]


def test_a_server_that_does_not_answer_neither_stops_nor_slows_the_run() -> None:
    notices = list[str]()
    logger = AlertLogger(Alerts(), "run", Webhook(f"http://127.0.0.1:9/{SECRET}", notices.append, waits=(30.0,)))
    began = threading.active_count()
    for number in range(1, 200):
        logger.report(step_report(number, loss=math.nan, skipped=True))
    assert threading.active_count() <= began
    logger.close("failed")
    assert notices and all(SECRET not in line for line in notices)


def test_the_address_is_that_of_the_config_else_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"alerts: no address\. Set alerts\.url, or the variable SUROGATE_ALERT_URL"):
        open_alerts({}, "run", print)
    monkeypatch.setenv(URL_VARIABLE, f"ftp://host/{SECRET}")
    with pytest.raises(ConfigError, match="must be an address") as caught:
        open_alerts({}, "run", print)
    assert SECRET not in str(caught.value)
    monkeypatch.setenv(URL_VARIABLE, "https://host/a")
    assert Alerts().address() == "https://host/a" and Alerts(url="https://host/b").address() == "https://host/b"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (f"https://host/{SECRET}", "alerts: must be a mapping"),
        ([f"https://host/{SECRET}"], "alerts: must be a mapping"),
        ({"url": f"host/{SECRET}"}, "alerts.url: must be an address"),
        ({"url": ["https://host", SECRET]}, "alerts.url: must be an address"),
        ({"address": f"https://host/{SECRET}"}, "alerts.address: unknown key"),
        ({"events": ["nans"]}, "alerts.events"),
        ({"stall_seconds": 0}, "alerts.stall_seconds: must be more than 0"),
        ({"spike_deviations": True}, "alerts.spike_deviations: must be a number"),
    ],
    ids=str,
)
def test_what_is_no_alert_is_refused_without_showing_an_address(wrong: Any, says: str) -> None:
    text = message(alerts=wrong)
    assert says in text and SECRET not in text and len(text.splitlines()) == 1


def test_no_output_has_the_address() -> None:
    loaded = load(alerts={"url": f"https://host/{SECRET}", "events": "nan"})
    assert resolved(loaded)["alerts"]["url"].endswith(SECRET)
    assert SECRET not in json.dumps(published(loaded)) and published(loaded)["alerts"]["events"] == "nan"
    assert config(alerts=None).alerts is None and "alerts" in published(load())
