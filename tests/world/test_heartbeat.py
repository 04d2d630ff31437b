"""A heartbeat says where a process is, and whether it still lives if it is on this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from math import inf

from surogate.world.heartbeat import Heartbeat, Peer, _state, ranks_at
from surogate_core.api import World
from surogate_core.api.world import Position


def test_a_heartbeat_is_read_as_it_was_written() -> None:
    position = Position()
    position.micro_step(2, 0)
    with position.collective("the sum of loss", 0):
        ranks = [*ranks_at(World(), [position], still=False)]
    beat = Heartbeat(count=3, at="step 5", limit=inf, ranks=ranks)
    assert Heartbeat.decoded(beat.encoded()) == beat
    assert (ranks[0].micro_step, ranks[0].name, ranks[0].inside) == (2, "the sum of loss", True)
    assert beat.fate == "running"


def test_a_process_of_this_machine_is_running_stopped_or_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    beat = Heartbeat(count=1, at="", limit=1, pid=child.pid, born=_state(child.pid)[1])
    fates = []
    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
        before, deadline = beat.fate, time.monotonic() + 10
        child.send_signal(number)
        while beat.fate == before and time.monotonic() < deadline:
            time.sleep(0.01)
        fates.append(beat.fate)
    assert fates == ["stopped", "running", "gone"]
    child.wait()
    assert beat.fate == "gone"
    assert Heartbeat(count=1, at="", limit=1, born="another").fate == "gone", "the id is another process's by now"
    assert Heartbeat(count=1, at="", limit=1, machine="another").fate == ""


def test_a_silent_process_is_gone_elsewhere_but_has_the_time_of_its_section_here() -> None:
    for machine, gone in (({"machine": "another"}, True), ({}, False)):
        peer = Peer()
        peer.hear(Heartbeat(count=1, at="the start", limit=600, **machine).encoded(), 0)
        peer.hear(None, 7)
        assert peer.is_gone(6) is gone
        peer.hear(None, 600)
        assert peer.is_gone(6)


def test_a_process_that_has_left_the_run_is_not_missed() -> None:
    peer = Peer()
    peer.hear(Heartbeat(count=1, at="", limit=1, ended=True, machine="another").encoded(), 0)
    peer.hear(None, 100)
    assert not peer.is_gone(6)


def test_a_rank_that_stands_still_says_in_which_function() -> None:
    def stand(event: threading.Event) -> None:
        started.set()
        event.wait()

    started, event = threading.Event(), threading.Event()
    thread = threading.Thread(target=stand, args=(event,), name="surogate-rank-77", daemon=True)
    thread.start()
    started.wait()
    (rank,) = ranks_at(World(size=78, ranks=range(77, 78)), [Position()], still=True)
    event.set()
    assert rank.host.startswith("stand (test_heartbeat.py:")
