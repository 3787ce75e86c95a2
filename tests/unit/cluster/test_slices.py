"""A thread may ask for a short time slice; only that thread's, and nothing else of it changes."""

import os
import threading

from hvdtrain.cluster.messages import progress as slices


def test_a_thread_asks_without_changing_its_priority():
    found = {}

    def work():
        before = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
        found["taken"] = slices.shorten()
        found["same"] = before == (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found["same"] and isinstance(found["taken"], bool)


def test_an_unknown_processor_is_left_alone(monkeypatch):
    monkeypatch.setattr(slices, "_SETATTR", {})
    assert slices.shorten() is False
