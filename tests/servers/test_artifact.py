"""Compiled code in a file: whole or refused, and refused wherever it does not belong."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servers import artifact
from servers.artifact import Artifact
from servers.compiler.artifacts import Loaded
from servers.config import ArmConfig, EngineConfig, ModelConfig
from servers.temporary_folder import TemporaryFolder
from tests.fakes.processes import wait_for
from tests.servers.test_config import refusal

ROOT = Path(__file__).resolve().parents[2]
BUCKETED = ArmConfig.from_preset("compiled-bucketed", engine=EngineConfig(slots=4))
HERE = "A processor (0123abcd)"
MAGIC = b"tailgate compiled code 1\n"


def facts(arm: ArmConfig = BUCKETED) -> dict[str, Any]:
    return {**artifact.facts_of(arm, device=HERE, threads=2, on_cpu=True), "graphs": 3}


def artifact_with(facts: dict[str, Any]) -> Artifact:
    return Artifact(path="arm.compiled", checksum="0" * 64, facts=facts)


def check(made: Artifact, arm: ArmConfig = BUCKETED) -> None:
    artifact.check(made, arm, on_cpu=True, devices=(HERE,), threads=2)


def cache_in(folder: Path) -> Path:
    """A compile cache as the compiler leaves it, with what only its own process may use."""
    for name, content in {
        "ab/kernel.so": b"\x7fELF" + bytes(range(256)) * 40,
        "fxgraph/xy/graph": b"a pickle",
        "triton/K1/__grp__kernel.json": json.dumps(
            {"child_paths": {"kernel.cubin": f"{folder}/triton/K1/kernel.cubin"}}
        ).encode(),
        "locks/kernel.lock": b"",
        "dynamo/profile.pkl.lock": b"",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def written(tmp_path: Path) -> Artifact:
    return artifact.write(str(tmp_path / "arm.compiled"), cache_in(tmp_path / "cache"), facts())


def test_a_library_that_is_loaded_is_replaced_and_not_written_over(written: Artifact, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    loaded = elsewhere / "ab" / "kernel.so"
    loaded.parent.mkdir(parents=True)
    loaded.write_bytes(b"loaded")
    with loaded.open("rb") as file:
        artifact.unpack(artifact.read(written.path), elsewhere)
        assert file.read() == b"loaded"
    assert loaded.read_bytes() == (tmp_path / "cache" / "ab" / "kernel.so").read_bytes()
    assert not list(elsewhere.rglob("*.partial"))


def test_unpacked_code_is_as_if_it_had_been_compiled_there(written: Artifact, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    artifact.unpack(artifact.read(written.path), elsewhere)
    files = {
        path.relative_to(elsewhere).as_posix(): path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()
    }
    group = json.loads(files.pop("triton/K1/__grp__kernel.json"))
    assert group["child_paths"] == {"kernel.cubin": f"{elsewhere}/triton/K1/kernel.cubin"}
    assert files == {name: (tmp_path / "cache" / name).read_bytes() for name in ("ab/kernel.so", "fxgraph/xy/graph")}
    again = artifact.write(str(tmp_path / "again"), cache_in(tmp_path / "cache"), facts())
    assert again.checksum == written.checksum
    assert artifact.read(again.path) == again
    assert list(tmp_path.glob("*.part")) == []


def test_a_byte_changed_or_missing_anywhere_is_damage(written: Artifact, tmp_path: Path) -> None:
    whole = Path(written.path).read_bytes()
    begin = whole.index(b"\n") + 1
    path = tmp_path / "damaged"
    for at in (begin, begin + 63, begin + 65, begin + 400, len(whole) // 2, len(whole) - 1):
        for content in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole[:at], whole + b"\0"):
            path.write_bytes(content)
            assert "is damaged" in refusal(artifact.read, str(path)), at


def signed(body: bytes) -> bytes:
    return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no file of compiled code"),
        (b"tailgate compiled code 2\nabc\n", "another format"),
        (MAGIC, "is damaged"),
        (signed(b"not json\n"), "not readable"),
        (signed(b"[1]\n"), "not readable"),
        (signed(b"[" * 5000 + b"\n"), "not readable"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_artifact_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    if content is not None:
        path.write_bytes(content)
    assert words in refusal(artifact.read, str(path))
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe" in refusal(artifact.read, str(tmp_path / "pipe"))
    assert "Is a directory" in refusal(artifact.read, str(tmp_path))


def test_a_name_that_leads_out_of_the_cache_is_refused(tmp_path: Path) -> None:
    """Although its checksum is right."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        entry = tarfile.TarInfo("../escaped")
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"bad"))
    path = tmp_path / "inner" / "made"
    path.parent.mkdir()
    path.write_bytes(signed(json.dumps(facts()).encode() + b"\n" + packed.getvalue()))
    assert "../escaped" in refusal(artifact.unpack, artifact.read(str(path)), tmp_path / "inner" / "cache")
    assert not (tmp_path / "inner" / "escaped").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"versions": {"torch": "2.11.0+cu130"}}, "torch 2.11.0+cu130"),
        ({"versions": {"transformers": "4.0.0"}}, "transformers 4.0.0"),
        ({"versions": {"python": "3.9"}}, "python 3.9"),
        ({"versions": {"triton": "3.6.0"}}, "triton 3.6.0 and here it is not set"),
        ({"device": "NVIDIA H200"}, "NVIDIA H200"),
        ({"threads": 64}, "threads 64 and here it is 2"),
        ({"architecture": {"hidden_size": 4096}}, "hidden_size 4096 and here it is 64"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype bfloat16 and here it is float32"),
        ({"engine": {"slots": 8}}, "engine.slots 8 and here it is 4"),
        ({"shapes": {"length_ladder": [64, 256]}}, "shapes.length_ladder [64, 256]"),
        ({"compile": {"mode": "max-autotune"}}, "compile.mode max-autotune"),
        ({"compile": {"options": {"combo_kernels": False}}}, "compile.options.combo_kernels False"),
    ],
)
def test_an_artifact_of_another_place_model_or_policy_is_refused(changed: dict[str, Any], words: str) -> None:
    def merged(base: Any, change: Any) -> Any:
        if not isinstance(change, dict):
            return change
        return {**base, **{key: merged(base.get(key, {}), value) for key, value in change.items()}}

    message = refusal(check, artifact_with(merged(facts(), changed)))
    assert all(word in message for word in (words, '"compiled-bucketed"', 'compile.artifact "arm.compiled"'))


def test_settings_that_no_graph_depends_on_may_differ() -> None:
    """Weights are a graph's inputs: a model of the same shape under another name uses the same code."""
    mine = replace(
        BUCKETED,
        name="other",
        model=replace(BUCKETED.model, seed=7, device="cpu", dtype="float32"),
        engine=replace(BUCKETED.engine, max_queue=1, drain_grace_s=1.0, decode_per_prefill=3),
        compile=replace(BUCKETED.compile, artifact="arm.compiled"),
    )
    check(artifact_with(facts()), mine)
    artifact.check(artifact_with(facts()), mine, on_cpu=True, devices=())  # before devices and threads are known
    unknown = replace(BUCKETED, model=ModelConfig(id="a-hub/model-that-is-not-here"))
    assert artifact.made_for(unknown, on_cpu=True)["architecture"] is None
    check(artifact_with(facts()), unknown)
    for on_cpu, dtype in ((True, "float32"), (False, "bfloat16")):  # auto is the dtype that it stands for
        named = replace(BUCKETED, model=replace(BUCKETED.model, dtype=dtype))  # type: ignore[arg-type]
        assert artifact.made_for(named, on_cpu=on_cpu) == artifact.made_for(BUCKETED, on_cpu=on_cpu)


def test_the_architecture_of_a_model_in_a_folder_is_its_configuration_under_any_name(tmp_path: Path) -> None:
    def config(name: str, hidden_size: int = 64) -> ArmConfig:
        (tmp_path / name).mkdir()
        table = {"hidden_size": hidden_size, "_name_or_path": name}
        (tmp_path / name / "config.json").write_text(json.dumps(table))
        return replace(BUCKETED, model=ModelConfig(id=str(tmp_path / name)))

    same = artifact_with(facts(config("base")))
    check(same, config("tuned"))
    assert "hidden_size" in refusal(check, same, config("wide", hidden_size=128))


ARM = ("--arm", "compiled-padded", "--slots", "1", "--max-prompt-tokens", "16", "--max-new-tokens", "4")


def tailgate(*words: str, code: int | None = 0, **environment: str) -> Any:
    """What `tailgate` says as JSON, or its stderr where it is to refuse. Any exit code will do where it is None."""
    command = [sys.executable, "-m", "loadtests.commands.main", *words]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=500, check=False, env={**os.environ, **environment}
    )
    assert code in (None, ended.returncode), ended.stderr
    return ended.stderr if code == 2 else json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shipped") / "padded.compiled"
    said = tailgate("precompile", *ARM, "--out", str(path))
    assert said["artifact"] == str(path)
    assert (said["graphs"], said["compiles"], said["unkept"]) == (2, 2, 0)
    return path


def test_code_that_was_compiled_although_it_was_shipped_is_counted(tmp_path: Path) -> None:
    kernel = tmp_path / "ab" / "kernel.so"
    kernel.parent.mkdir()
    kernel.touch()
    loaded = Loaded(artifact=artifact_with({}), folder=tmp_path, files=frozenset([kernel]))
    (tmp_path / "ab" / "graph.py").touch()
    assert loaded.compiled_anew() == 0
    for name in ("other.so", "kernel.cubin"):
        (tmp_path / "ab" / name).touch()
    assert loaded.compiled_anew() == 2


def test_a_temporary_folder_is_private_and_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryFolder("of-this-test-") as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        (folder.path / "admin").touch()
    assert not folder.path.exists()
    folder.remove()
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with TemporaryFolder("of-this-test-", for_sockets=True) as folder:
        assert len(str(folder.path / "admin")) <= 107


MAKER = """
import time
from servers.temporary_folder import TemporaryFolder
folder = TemporaryFolder("of-this-test-")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_a_temporary_folder_goes_after_kill_9_of_its_process() -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    path = Path(maker.stdout.readline().strip())
    assert path.is_dir()
    maker.kill()
    maker.communicate()
    wait_for(lambda: not path.exists())
