"""What a server's page for Prometheus says of its load, in tailgate's words.

Names and meanings are those of the servers' sources: vLLM 0.32 (`v1/metrics/loggers.py`; `gpu_cache_usage_perc` is of
older releases), SGLang 0.5 (`observability/metrics_collector.py`). Those of text-generation-inference, Triton and
llama.cpp's server are as other programs read them. Nothing here opens a connection.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from prometheus_client.parser import text_string_to_metric_families

from loadtests.external.openai_wire import shortened

# Each in the order in which they are looked for.
_RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "tgi_batch_current_size",
    "llamacpp:requests_processing",
)
_WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "tgi_queue_size",
    "nv_inference_pending_request_count",
    "llamacpp:requests_deferred",
)
_CACHE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
# Requests that lost their place in the cache and start over.
_PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")

# Ranks of one engine show the same load each; engines beside each other have loads of their own.
_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The load at one moment; None for what the page does not say. `cache_pct` is of the fullest engine."""

    running: float | None
    waiting: float | None
    cache_pct: float | None
    preemptions: float | None  # since the server started


def load_of_page(page: str) -> ServerLoad:
    """The load on the page of any known server. Raises ValueError for a page that shows none, or is none."""
    try:
        families = list(text_string_to_metric_families(page))
    except Exception as error:  # whatever the parser stumbles over
        raise ValueError(f"the page is not in Prometheus' text format ({shortened(str(error))})") from None
    samples: dict[str, list[float]] = {}
    for family in families:
        for sample in family.samples:
            if all(sample.labels.get(rank, "0") == "0" for rank in _RANKS) and not sample.labels.get("priority"):
                samples.setdefault(sample.name, []).append(sample.value)

    def values(names: tuple[str, ...]) -> list[float]:
        return next((samples[name] for name in names if name in samples), [])

    running, waiting, cache, preemptions = (values(names) for names in (_RUNNING, _WAITING, _CACHE, _PREEMPTIONS))
    load = ServerLoad(
        running=sum(running) if running else None,
        waiting=sum(waiting) if waiting else None,
        cache_pct=100.0 * max(cache) if cache else None,
        preemptions=sum(preemptions) if preemptions else None,
    )
    if all(value is None for value in astuple(load)):
        raise ValueError("the page shows no load of vLLM, SGLang, TGI, Triton or llama.cpp")
    return load
