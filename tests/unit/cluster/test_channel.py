"""Messages from one rank to another: order, several threads, what is not as expected, waits that are ended."""

import threading

import numpy as np
import pytest

from hvdtrain.cluster.control import SoloControl
from hvdtrain.cluster.messages.channel import ChannelClosed, Mail, MailChannel
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.core.errors import WaitTimeout


def test_messages_of_one_tag_come_in_order_and_tags_do_not_mix():
    def work(control, wire):
        channel, to = control.channel(), (control.rank + 1) % 3
        for i in range(4):
            channel.send(np.full((2, i), i, np.float32), to, tag=i % 2)
        source = (control.rank - 1) % 3
        late = [channel.receive(np.empty((2, i), np.float32), source, tag=1).wait() for i in (1, 3)]
        soon = [channel.receive(np.empty((2, i), np.float32), source, tag=0).wait() for i in (0, 2)]
        return [int(x.shape[1]) for x in soon + late], all((x == x.shape[1]).all() for x in soon + late)

    assert LockstepWorld(3).run(work) == [([0, 2, 1, 3], True)] * 3


def test_a_message_is_sent_as_it_was_and_received_in_place():
    channel, memory = SoloControl().channel(), np.zeros(5)
    values = np.arange(5.0)
    handle = channel.send(values, 0, 3)
    assert handle.done() and handle.wait() is values
    values[:] = 9
    assert channel.receive(memory, 0, 3).wait() is memory and memory.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("sent", [np.zeros(4), np.zeros((1, 3)), np.zeros(3, np.int64)])
def test_a_message_that_is_not_what_was_expected_is_an_error(sent):
    channel = SoloControl().channel()
    channel.send(sent, 0, 7)
    with pytest.raises(RuntimeError, match=r"rank 0 sent a message of tag 7 with . dimensions .* where float64\[3\]"):
        channel.receive(np.zeros(3), 0, 7).wait()


def test_a_wait_is_bounded_and_named():
    channel = MailChannel(Mail(), 1, 2, timeout_s=0.05)
    with pytest.raises(WaitTimeout, match="rank 1 .* waited 0.05 s in a message of tag 2 from rank 0"):
        channel.receive(np.zeros(3), 0, 2).wait()


def test_closing_ends_a_wait_in_another_thread():
    channel, ended = MailChannel(Mail(), 0, 2, timeout_s=30), []

    def wait():
        try:
            channel.receive(np.zeros(1), 1, 0).wait()
        except ChannelClosed as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    channel.close()
    thread.join(10)
    assert ended == ["the channel was closed in a message of tag 0 from rank 1"]
