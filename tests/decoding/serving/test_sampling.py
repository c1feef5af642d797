"""Temperatures spread over drafted positions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.serving.vllm.sampling import expand


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.5, 2.0]), st.integers(0, 4)), max_size=6), st.integers(0, 2))
def test_each_request_s_value_as_often_as_it_has_tokens(requests: list[tuple[float, int]], replaced: int) -> None:
    values = torch.tensor([value for value, _ in requests])
    ends = torch.tensor([count for _, count in requests], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    wanted = [7.0 if value == replaced else value for value, count in requests for _ in range(count)]
    output = torch.full((len(wanted),), -1.0)
    expand(output, values, ends, replaced, 7, 32)
    assert output.tolist() == wanted
