"""The courier keeps to one order, tells what fails, and ends when it is asked to."""

import threading

import pytest

from dlrm.comm.p3.comm_thread import MEASURED_ROUNDS, CommThread, ExchangeError

NAMES = ["first", "second", "third"]


@pytest.fixture
def make_courier():
    made = []

    def work(send, agree=lambda ready_s, takes_s: range(len(NAMES)), parts=(1, 1, 1)):
        made.append(CommThread(NAMES, parts, send, agree))
        return made[-1]

    yield work
    for each in made:
        each.close()


def send_round(courier, rounds, marks=(2, 1, 0)):
    for index in marks:
        courier.mark(index)
    for index in range(len(NAMES)):
        courier.wait(index, rounds)


def test_the_order_is_fixed_whatever_is_ready_first(make_courier):
    sent = []
    courier = make_courier(sent.append)
    send_round(courier, 1, marks=(2, 1, 0))
    send_round(courier, 2, marks=(1, 2, 0))
    assert sent == [0, 1, 2] * 2


def test_the_agreed_order_follows_the_measured_rounds(make_courier):
    sent, told = [], []

    def agree(ready_s, takes_s):
        told.append((list(ready_s), list(takes_s)))
        return [2, 0, 1]

    courier = make_courier(sent.append, agree)
    for rounds in range(1, MEASURED_ROUNDS + 3):
        send_round(courier, rounds)
    assert sent == [0, 1, 2] * MEASURED_ROUNDS + [2, 0, 1] * 2
    ((ready_s, takes_s),) = told
    assert ready_s[2] <= ready_s[1] <= ready_s[0]
    assert all(0 <= each < float("inf") for each in takes_s)
    assert not courier.is_measuring


def test_a_slice_of_several_parts_waits_for_all_of_them(make_courier):
    sent = []
    courier = make_courier(sent.append, parts=(2, 1, 1))
    courier.mark(0)
    courier.mark(1)
    courier.mark(2)
    assert not sent
    courier.mark(0)
    courier.wait(2, 1)
    assert sent == [0, 1, 2]
    send_round(courier, 2, marks=(0, 0, 1, 2))
    assert sent == [0, 1, 2] * 2


def test_an_error_reaches_whoever_waits(make_courier):
    def send(index):
        if index == 1:
            raise ConnectionError("the cable is out")

    courier = make_courier(send)
    for index in range(3):
        courier.mark(index)
    courier.wait(0, 1)  # was sent before
    with pytest.raises(ExchangeError, match=r"second in step 1 .* failed: the cable is out") as caught:
        courier.wait(1, 1)
    assert isinstance(caught.value.__cause__, ConnectionError)
    with pytest.raises(ExchangeError, match="second"):
        courier.wait(2, 1)  # will never be sent
    with pytest.raises(ExchangeError, match="second"):
        courier.check()


def test_an_order_that_cannot_be_agreed_is_an_error_too(make_courier):
    def agree(ready_s, takes_s):
        raise ConnectionError("nobody answers")

    courier = make_courier(lambda index: None, agree)
    for rounds in range(1, MEASURED_ROUNDS + 1):
        send_round(courier, rounds)
    courier.mark(0)
    with pytest.raises(ExchangeError, match=r"the order of slices .* nobody answers"):
        courier.wait(0, MEASURED_ROUNDS + 1)


def test_closing_in_the_middle_ends_the_thread_and_who_waits(make_courier):
    courier = make_courier(lambda index: None)
    courier.mark(1)
    closing = threading.Timer(0.05, courier.close)
    closing.start()
    with pytest.raises(ExchangeError, match="second was not exchanged before"):
        courier.wait(1, 1)
    closing.join()
    assert not courier._thread.is_alive()
