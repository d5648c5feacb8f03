"""Pages as the servers' own clients of Prometheus write them, and what is read of each."""

from __future__ import annotations

import pytest

from loadtests.external.server_metrics import ServerLoad, load_of_page

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="llama"} 31.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="llama"} 4.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="llama",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="llama",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="llama"} 0.875
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="llama"} 7.0
# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="llama"} 1.7640e+09
"""
SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 12.0
sglang:num_running_reqs{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="1"} 12.0
# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 0.0
# HELP sglang:token_usage The token usage.
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 0.25
# HELP sglang:num_retracted_requests_total Total number of retracted requests.
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 2.0
"""
TGI = "# TYPE tgi_batch_current_size gauge\ntgi_batch_current_size 8\n# TYPE tgi_queue_size gauge\ntgi_queue_size 3\n"
TRITON = """\
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="ensemble",version="1"} 1
nv_inference_pending_request_count{model="llama",version="1"} 5
"""
LLAMA_CPP = """\
# HELP llamacpp:kv_cache_usage_ratio KV-cache usage. 1 means 100 percent usage.
# TYPE llamacpp:kv_cache_usage_ratio gauge
llamacpp:kv_cache_usage_ratio 0.5
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
"""


def load(running: float | None, waiting: float | None, cache: float | None, preemptions: float | None) -> ServerLoad:
    return ServerLoad(running=running, waiting=waiting, cache_pct=cache, preemptions=preemptions)


@pytest.mark.parametrize(
    ("page", "read"),
    [
        (VLLM, load(31, 4, 87.5, 7)),
        (VLLM.replace("kv_cache_usage", "gpu_cache_usage"), load(31, 4, 87.5, 7)),
        (SGLANG, load(12, 0, 25, 2)),
        (TGI, load(8, 3, None, None)),
        (TRITON, load(None, 6, None, None)),
        (LLAMA_CPP, load(2, 1, 50, None)),
    ],
    ids=["vllm", "older vllm", "sglang", "tgi", "triton", "llama.cpp"],
)
def test_the_load_is_read_of_each_server(page: str, read: ServerLoad) -> None:
    assert load_of_page(page) == read


def test_engines_beside_each_other_add_up_and_the_fullest_cache_counts() -> None:
    second = "".join(line + "\n" for line in VLLM.splitlines() if not line.startswith("#"))
    second = second.replace('engine="0"', 'engine="1"').replace("0.875", "0.125")
    assert load_of_page(VLLM + second) == load(62, 8, 87.5, 14)


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("", "shows no load of vLLM, SGLang"),
        ("up 1\n", "shows no load"),
        ("<html><body>Not Found</body></html>", "not in Prometheus' text format"),
        ("vllm:num_requests_running{ 3", "not in Prometheus' text format"),
    ],
)
def test_a_page_without_a_load_is_refused(page: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_of_page(page)
