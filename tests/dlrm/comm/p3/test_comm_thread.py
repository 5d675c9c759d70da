"""The exchange thread keeps one order, reports failures, and ends when closed."""

import threading

import pytest

from dlrm.comm.p3.comm_thread import MEASURED_ROUNDS, CommThread, ExchangeError

NAMES = ["first", "second", "third"]


@pytest.fixture
def make_thread():
    made = []

    def work(send, agree=lambda ready_s, takes_s: range(len(NAMES)), parts=(1, 1, 1)):
        made.append(CommThread(NAMES, parts, send, agree))
        return made[-1]

    yield work
    for each in made:
        each.close()


def send_round(thread, rounds, marks=(2, 1, 0)):
    for index in marks:
        thread.mark(index)
    for index in range(len(NAMES)):
        thread.wait(index, rounds)


def test_slices_are_sent_in_the_agreed_order_when_all_their_parts_are_ready(make_thread):
    sent, calls = [], []

    def agree(ready_s, takes_s):
        calls.append((list(ready_s), list(takes_s)))
        return [2, 0, 1]

    thread = make_thread(sent.append, agree, parts=(2, 1, 1))
    for index in (2, 1, 0):
        thread.mark(index)
    assert not sent
    thread.mark(0)
    for rounds in range(1, MEASURED_ROUNDS + 3):
        send_round(thread, rounds, marks=() if rounds == 1 else (1, 2, 0, 0))
    assert sent == [0, 1, 2] * MEASURED_ROUNDS + [2, 0, 1] * 2
    ((ready_s, takes_s),) = calls
    assert ready_s[1] <= ready_s[2] <= ready_s[0]
    assert all(0 <= each < float("inf") for each in takes_s)
    assert not thread.is_measuring


def test_an_error_is_raised_in_all_waiting_calls(make_thread):
    def send(index):
        if index == 1:
            raise ConnectionError("the cable is out")

    thread = make_thread(send)
    for index in range(3):
        thread.mark(index)
    thread.wait(0, 1)  # was sent before
    with pytest.raises(ExchangeError, match=r"second in step 1 .* failed: the cable is out") as caught:
        thread.wait(1, 1)
    assert isinstance(caught.value.__cause__, ConnectionError)
    with pytest.raises(ExchangeError, match="second"):
        thread.wait(2, 1)  # will never be sent
    with pytest.raises(ExchangeError, match="second"):
        thread.check()


def test_a_failed_agreement_on_the_order_is_reported(make_thread):
    def agree(ready_s, takes_s):
        raise ConnectionError("no answer")

    thread = make_thread(lambda index: None, agree)
    for rounds in range(1, MEASURED_ROUNDS + 1):
        send_round(thread, rounds)
    thread.mark(0)
    with pytest.raises(ExchangeError, match=r"the order of slices .* no answer"):
        thread.wait(0, MEASURED_ROUNDS + 1)


def test_closing_ends_the_thread_and_waiting_calls(make_thread):
    thread = make_thread(lambda index: None)
    thread.mark(1)
    closing = threading.Timer(0.05, thread.close)
    closing.start()
    with pytest.raises(ExchangeError, match="second was not exchanged before"):
        thread.wait(1, 1)
    closing.join()
    assert not thread._thread.is_alive()
