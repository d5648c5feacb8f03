"""The glossary: every term of art of the reports and of the live page, in one sentence. Tooltips come from here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from markupsafe import Markup, escape

_QUANTILE: Final = "pN"
# Each term with its definition, one sentence.
GLOSSARY: Final[Mapping[str, str]] = {
    # Latency
    "TTFT": "Time to first token: from the instant when the request was due to its first token.",
    "TPOT": "Time per output token: (E2E − TTFT) / (output tokens − 1); undefined for one token.",
    "ITL": "Inter-token latency: the gaps between tokens of all requests, each in the block in which it ended.",
    "max ITL": "The longest gap between two tokens of one request.",
    "E2E": "End-to-end latency: from the instant when the request was due to its last token, or to its vector.",
    _QUANTILE: "The N-th percentile: N % of the values are no higher; p50 is the median, p99 the tail.",
    "SLO": "Service-level objective: a limit that [slo] sets on a quantile of latency or on the error rate.",
    "goodput": "Requests per second that meet every SLO.",
    "generator lag": "How late the load generator sent requests, compared with the schedule.",
    "in flight": "Requests that were sent and have not ended: the server runs them or queues them.",
    "open loop": "Requests follow a schedule and never wait for answers, so a slow server cannot slow the load.",
    "closed loop": "Each user waits for an answer before the next request, which hides stalls.",
    # The run
    "arm": "One variant of the server, such as eager or compiled-bucketed.",
    "external arm": "A server that already runs, such as vLLM, to which tailgate only sends requests.",
    "control": "The arm that the others are compared with.",
    "candidate": "The arm that may replace the control.",
    "replica": "One server process pair of an arm: a frontend and an engine.",
    "trial": "One start of all arms with its traffic; a run has one or more.",
    "block": "A stretch of the traffic, 30 s by default; blocks are the unit of the tests, because requests of one "
    "moment depend on each other.",
    "cold start": "The first seconds of traffic after an arm is ready (gates.cold_s).",
    "steady": "Traffic after the cold start, without the requests that a compile delayed.",
    "warm-up": "Requests that an arm answers before it serves, so that compiles happen before the traffic.",
    "mirrored": "Every arm gets a copy of each request.",
    "split": "Each session goes to one arm, by the weights of the splitter.",
    "switchback": "The arms take turns: each gets the traffic in its own stretches of a block.",
    # The verdict
    "PASS": "Every gate holds, error bars included, and no failed check forbids to believe it.",
    "FAIL": "At least one gate is broken, and a longer run cannot change that.",
    "INCONCLUSIVE": "No gate is broken, but the data cannot carry a PASS.",
    "gate": "One requirement on one arm; an arm passes when all its gates pass.",
    "check": "A condition without which the data cannot carry a verdict; a failed check keeps gates INCONCLUSIVE.",
    "non-inferiority": "The arm's latency is at most the control's times 1 + margin, error bars included.",
    "margin": "How much slower than the control an arm may be (gates.margin).",
    "interval": "The error bars of a value: with gates.alpha = 0.05 each end is wrong in at most 5 % of runs.",
    "typical block": "The ratio in which every block weighs the same, so one traffic jam does not decide it.",
    "surely": "With an error of at most gates.alpha, 5 % by default.",
    "allowed for": "A check found a disturbance of known size, and the intervals include it.",
    "interim analysis": "A judgement while the run goes on; the error rate is controlled over all of them.",
    "parity": "Whether the arm computes the same answers as the control.",
    "memory ratio": "The peak memory of one replica over that of one replica of the control.",
    # Compiles
    "compile": "torch.compile or a kernel compiler builds code; while an arm serves, requests wait for it.",
    "eager": "Plain PyTorch, without compiled code.",
    "guard": "A condition on the inputs under which compiled code is valid; when it fails, torch recompiles.",
    "recompile": "A compile of code that was compiled before, because a guard failed.",
    "graph capture": "Recording of a CUDA graph, which stalls the server like a compile.",
    "graph break": "A place where torch.compile cannot trace on, so the code runs in pieces.",
    "JIT compile": "A compile of one kernel at run time, such as by Triton, outside torch.compile.",
    "limit hit": "torch's recompile_limit was reached: unseen shapes run eagerly from then on.",
    "usable blocks": "Blocks after the cold start in which each arm has requests that no compile delayed.",
    "stall": "A stretch in which an arm had requests in flight and answered none.",
    "longest compile stall": "The longest time that compiles delayed one request.",
    "compile stall per minute": "Seconds of each minute in which a replica compiled while requests waited.",
    "requests hit": "Requests that a compile delayed.",
    "backlog": "Requests that arrived after a compile while its queue lasted: none of them counts as hit by it.",
    "spike": "A stretch in which requests took much longer than their lengths explain.",
    "padding": "Positions that an arm computes only to reach a compiled shape.",
    "prefill": "Reading prompts, which yields their first tokens and, in the same step, one of every running answer.",
    "decode": "The steps that yield the tokens after the first, one per request and step.",
    "artifact": "Compiled code in a file, which a start loads (tailgate precompile).",
    "KV cache": "The stored keys and values of all tokens of the running requests.",
    "CUDA graphs": "Recorded sequences of kernels that the GPU replays with one launch.",
    # Search and ramp
    "surely holds": "The highest load at which the arm meets every SLO, error bars included.",
    "surely not above": "The load above which the arm misses an SLO, error bars included.",
    "frontier": "Which arm to ship at which load.",
    "ramp": "Production traffic moves to the candidate in steps, and back when something goes wrong.",
}
# For Python and for JavaScript, without regard to case. Longer terms come first; the second group is a plural.
_NAMED: Final = sorted(GLOSSARY.keys() - {_QUANTILE}, key=lambda term: (-len(term), term))
PATTERN: Final = rf"\b(p\d+(?:\.\d+)?|{'|'.join(_NAMED)})(s?)\b"
# By the lower case of the first group; "pn" defines every quantile.
DEFINITIONS: Final = {term.lower(): definition for term, definition in GLOSSARY.items()}


def with_tooltips(text: str) -> Markup:
    """Return the text as HTML in which each term has its definition as its tooltip."""

    def shown(found: re.Match[str]) -> str:
        definition = DEFINITIONS.get(found[1].lower(), GLOSSARY[_QUANTILE])
        return Markup('<abbr title="{}">{}</abbr>').format(definition, found[0])

    return Markup(re.sub(PATTERN, shown, str(escape(text)), flags=re.IGNORECASE))
