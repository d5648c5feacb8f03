"""Which card a process sees."""

import pytest

from servers.visible_card import only_card


@pytest.mark.parametrize(
    ("device", "environment", "expected"),
    [
        ("cuda:1", {}, ("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"})),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "2, 3"}, ("cuda:0", {"CUDA_VISIBLE_DEVICES": "3"})),
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, ("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-a"})),
        ("cuda:1", {"HIP_VISIBLE_DEVICES": "4,5"}, ("cuda:0", {"HIP_VISIBLE_DEVICES": "5"})),
        (
            "cuda:1",
            {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "2,3"},
            ("cuda:0", {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "3"}),
        ),
        (
            "cuda:1",
            {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "2,3"},
            ("cuda:0", {"CUDA_VISIBLE_DEVICES": "3"}),
        ),
    ],
)
def test_a_process_sees_its_card_alone_and_calls_it_the_first(
    device: str, environment: dict[str, str], expected: tuple[str, dict[str, str]]
) -> None:
    assert only_card(device, environment) == expected


@pytest.mark.parametrize(
    ("device", "environment"),
    [
        ("auto", {}),
        ("cuda", {}),
        ("cuda:2", {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_what_names_no_visible_card_stays_as_it_is(device: str, environment: dict[str, str]) -> None:
    assert only_card(device, environment) == (device, {})


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": "2,3"}])
def test_a_process_on_the_processor_sees_no_card(environment: dict[str, str]) -> None:
    assert only_card("cpu", environment) == ("cpu", {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""})
