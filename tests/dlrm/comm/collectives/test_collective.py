import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.comm.collectives.collective import Buffers, kept_in_part, split_evenly


@given(st.integers(0, 1000), st.integers(1, 20))
def test_slices_cover_a_vector_once(num_values, num_ranks):
    found = split_evenly(num_values, num_ranks)
    assert len(found) == num_ranks
    covered = [index for each in found for index in range(num_values)[each]]
    assert covered == list(range(num_values))
    assert max(each.stop - each.start for each in found) == -(-num_values // num_ranks)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 20))
def test_shards_keep_their_share_and_no_less_in_all(num_kept, num_values, num_ranks):
    parts = [each.stop - each.start for each in split_evenly(num_values, num_ranks)]
    kept = [kept_in_part(num_kept, part, num_values) for part in parts]
    assert all(0 <= few <= part for few, part in zip(kept, parts, strict=True))
    assert min(num_kept, num_values) <= sum(kept) <= num_kept + num_ranks


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_messages_in_a_buffer_are_aligned_and_do_not_overlap(lengths):
    messages = Buffers().take_messages("any", lengths, torch.device("cpu"))
    assert [message.numel() for message in messages] == lengths
    assert all(message.storage_offset() % 4 == 0 for message in messages)
    for number, message in enumerate(messages):
        message.fill_(number)
    assert all((message == number).all() for number, message in enumerate(messages))
