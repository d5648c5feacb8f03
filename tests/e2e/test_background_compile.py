from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from servers import program
from servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig

_SERVES = """
import json, os, sys, time
from concurrent.futures import Future
from servers.config import ArmConfig
from servers.program import isolate_compiler

arm = ArmConfig.from_dict(json.loads(sys.argv[1]))
isolate_compiler(os.environ, sys.argv[2], arm)
import torch
from torch._inductor.compile_fx_async import _ProgressiveFxCompile as told
from torch._inductor.compile_fx_subproc import _SubprocessFxCompile as sender
from servers.compiler import internals
from servers.compiler.recorder import CompileRecorder
from servers.engine.runners import runner_for
from servers.engine.scheduler import Job, Scheduler

send, held = sender._send_to_child_async, []

def hold(scheme, job):
    held.append((Future(), send(scheme, job)))
    return held[-1][0]

sender._send_to_child_async = hold
recorder = CompileRecorder()
recorder.install()
runner = runner_for(arm, recorder)
runner.load()
runner.warm_up(lambda *_: None)

def serve(begun):
    scheduler, compiled = Scheduler(arm.engine), []
    scheduler.submit(Job(request_id="0", prompt=[5] * 9, max_tokens=4, recv_ns=0))
    while (step := scheduler.next_step()) is not None:
        launched = runner.launch(step, begun + len(compiled))
        compiled.append(launched.compiled)
        (token,) = runner.collect(launched)
        scheduler.record(step.jobs[0], token)
    events = [(event.kind, event.compile_id, event.phase, event.batch_id) for event in recorder.drain()]
    return {"compiled": compiled, "events": events, "runs": (told._stat_fast_runs, told._stat_optimized_runs)}

before = {**serve(0), "kernels": internals.counts().kernels}
for promised, sent in held:
    promised.set_result(sent.result(240))
print(json.dumps({"before": before, "after": serve(100), "blind": recorder.facts.blind_spots}))
"""


def test_an_arm_that_compiles_in_the_background_runs_compiled_code_until_then_and_tells_of_it(tmp_path: Path) -> None:
    # a graph of few kernels, with a change of dtype, which is no operator of aten
    policy = CompileConfig(enabled=True, dynamic=False, regions=("model.norm",), background=True)
    arm = ArmConfig(
        model=ModelConfig(device="cpu", dtype="bfloat16"),
        engine=EngineConfig(slots=2, max_prompt_tokens=20, max_new_tokens=6, threads=1),
        shapes=ShapeConfig(kind="pad"),
        compile=policy,
    )
    command = [sys.executable, "-c", _SERVES, json.dumps(arm.to_dict()), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(program.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    before, after = told["before"], told["after"]
    assert {kind for kind, *_ in before["events"]} == {"compile", "recompile"}, "nothing has ended elsewhere yet"
    assert all(before["compiled"])
    assert before["kernels"] > 0, "what ran was made by inductor here"
    assert before["runs"][0] > 0 == before["runs"][1]
    keys = {compile_id for _, compile_id, *_ in before["events"]}
    assert {tuple(event) for event in after["events"]} == {("background_compile", key, "serving", -1) for key in keys}
    assert all(after["compiled"])
    assert after["runs"][1] > 0, "steps went over to what came later"
    assert told["blind"] == []
