"""Messages between the ranks of a job over MPI, from threads, beside the control plane's collectives."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hvdtrain.cluster.messages import channel as channels
from hvdtrain.core.errors import WaitTimeout

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


def test_threads_send_while_the_ranks_meet_in_collectives(control, monkeypatch):
    monkeypatch.setattr(channels, "CHUNK", 1 << 16)  # so that a message is cut
    channel, got = control.channel(), []
    values = np.arange(50_000, dtype=np.float64).reshape(2, -1) + control.rank

    def exchange():
        for i in range(5):
            for other in range(control.size):
                if other != control.rank:
                    sent = channel.send(values + i, other, tag=i)
                    got.append((i, other, channel.receive(np.empty_like(values), other, tag=i).wait()))
                    sent.wait()

    thread = threading.Thread(target=exchange)
    thread.start()
    sums = [control.sum(np.ones(3))[0] for _ in range(200)]
    thread.join(60)
    assert set(sums) == {control.size} and len(got) == 5 * (control.size - 1)
    for i, other, x in got:
        assert (x == values - control.rank + other + i).all()
    control.barrier("all through")
    channel.free()


def test_what_is_longer_or_other_than_expected_is_an_error_and_not_a_mix(control):
    channel, other = control.channel(), (control.rank + 1) % control.size
    handles = [channel.send(np.zeros(400), other, 1), channel.send(np.zeros(4, np.int64), other, 2)]
    for tag in (1, 2):
        with pytest.raises(RuntimeError, match=f"sent a message of tag {tag} with 1 dimensions and "):
            channel.receive(np.zeros(4), (control.rank - 1) % control.size, tag).wait()
    control.barrier("all have seen it")
    assert all(handle.done() for handle in handles)
    control.barrier("all through")
    channel.free()


def test_a_message_that_does_not_come_is_named(control):
    channel = control.channel()
    channel.timeout_s = 0.1
    late = channel.receive(np.zeros(4), (control.rank + 1) % control.size, 5)
    with pytest.raises(WaitTimeout, match=rf"rank {control.rank} .* waited 0.1 s in a message of tag 5 from rank"):
        late.wait()
    control.barrier("all have waited")
    channel.timeout_s = 30.0
    sent = channel.send(np.full(4, float(control.rank)), (control.rank - 1) % control.size, 5)
    assert late.wait().tolist() == [(control.rank + 1) % control.size] * 4  # it still comes
    sent.wait()
    control.barrier("all through")
    channel.free()
