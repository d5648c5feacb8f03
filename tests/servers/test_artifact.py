"""Compiled code in a file: whole or refused, and refused wherever it does not belong."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servers import artifact
from servers.artifact import Artifact
from servers.config import ArmConfig, EngineConfig, ModelConfig
from servers.fields import ConfigError

ARM = ArmConfig.from_preset("compiled-bucketed", engine=EngineConfig(slots=4))
HERE = "A processor (0123abcd)"


def facts(arm: ArmConfig = ARM, **changes: Any) -> dict[str, Any]:
    return {**artifact.facts_of(arm, device=HERE, threads=2, on_cpu=True), "graphs": 3, **changes}


def cache_in(folder: Path) -> Path:
    """A compile cache as the compiler leaves it, with what only its own process may use."""
    for name, content in {
        "ab/kernel.so": b"\x7fELF" + bytes(range(256)) * 40,
        "fxgraph/xy/graph": b"a pickle",
        "triton/K1/__grp__kernel.json": json.dumps(
            {"child_paths": {"kernel.cubin": f"{folder}/triton/K1/kernel.cubin"}}
        ),
        "locks/kernel.lock": b"",
        "dynamo/profile.pkl.lock": b"",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.fixture
def written(tmp_path: Path) -> Artifact:
    return artifact.write(str(tmp_path / "arm.compiled"), cache_in(tmp_path / "cache"), facts())


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_was_compiled_lies_in_another_folder_as_if_it_had_been_compiled_there(
    written: Artifact, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    artifact.unpack(artifact.read(written.path), elsewhere)
    files = {
        path.relative_to(elsewhere).as_posix(): path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()
    }
    group = json.loads(files.pop("triton/K1/__grp__kernel.json"))
    assert group["child_paths"] == {"kernel.cubin": f"{elsewhere}/triton/K1/kernel.cubin"}
    assert files == {name: (tmp_path / "cache" / name).read_bytes() for name in ("ab/kernel.so", "fxgraph/xy/graph")}, (
        "and no locks"
    )


def test_the_same_cache_is_the_same_file(written: Artifact, tmp_path: Path) -> None:
    again = artifact.write(str(tmp_path / "again"), cache_in(tmp_path / "cache"), facts())
    assert again.checksum == written.checksum
    assert artifact.read(again.path) == again
    assert list(tmp_path.glob("*.part")) == []


def test_a_byte_changed_or_missing_anywhere_is_damage(written: Artifact, tmp_path: Path) -> None:
    whole = Path(written.path).read_bytes()
    begin = whole.index(b"\n") + 1
    for at in (begin, begin + 63, begin + 65, begin + 400, len(whole) // 2, len(whole) - 1):
        path = tmp_path / "damaged"
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert "is damaged" in refused(lambda path=path: artifact.read(str(path))), at
        path.write_bytes(whole[:at])
        assert "is damaged" in refused(lambda path=path: artifact.read(str(path))), at
    path.write_bytes(whole + b"\0")
    assert "is damaged" in refused(lambda: artifact.read(str(path)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no file of compiled code"),
        (b"\0" * 300, "is no file of compiled code"),
        (b"tailgate compiled code 2\nabc\n", "is of another format"),
        (b"tailgate compiled code 1\n", "is damaged"),
    ],
)
def test_what_is_no_artifact_is_one_line(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    line = refused(lambda: artifact.read(str(path)))
    assert words in line
    assert "tailgate precompile" in line


@pytest.mark.parametrize("facts", [b"not json\n", b"[1]\n", b"[" * 5000 + b"\n"])
def test_an_artifact_that_does_not_say_what_it_is_for_is_damaged(facts: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"tailgate compiled code 1\n" + hashlib.sha256(facts).hexdigest().encode() + b"\n" + facts)
    assert "what it was written for is not readable" in refused(lambda: artifact.read(str(path)))


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in refused(lambda: artifact.read(str(tmp_path / "gone")))
    assert "Is a directory" in refused(lambda: artifact.read(str(tmp_path)))
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe" in refused(lambda: artifact.read(str(tmp_path / "pipe")))


def test_a_name_that_leads_out_of_the_cache_is_refused(tmp_path: Path) -> None:
    """Its checksum is right: somebody made it so."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        entry = tarfile.TarInfo("../escaped")
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"bad"))
    body = json.dumps(facts()).encode() + b"\n" + packed.getvalue()
    path = tmp_path / "inner" / "made"
    path.parent.mkdir()
    path.write_bytes(b"tailgate compiled code 1\n" + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    read = artifact.read(str(path))
    assert "../escaped" in refused(lambda: artifact.unpack(read, tmp_path / "inner" / "cache"))
    assert not (tmp_path / "inner" / "escaped").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"versions": {"torch": "2.11.0+cu130"}}, "torch 2.11.0+cu130 and here it is"),
        ({"versions": {"transformers": "4.0.0"}}, "transformers 4.0.0"),
        ({"versions": {"python": "3.9"}}, "python 3.9 and here it is"),
        ({"versions": {"triton": "3.6.0"}}, "triton 3.6.0 and here it is not set"),
        ({"device": "NVIDIA H200"}, f"was written on NVIDIA H200 and this is {HERE}"),
        ({"threads": 64}, "threads 64 and here it is 2"),
        ({"architecture": {"hidden_size": 4096}}, "the model's hidden_size 4096 and here it is 64"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype bfloat16 and here it is float32"),
        ({"engine": {"slots": 8}}, "engine.slots 8 and here it is 4"),
        ({"shapes": {"length_ladder": [64, 256]}}, "shapes.length_ladder [64, 256] and here it is []"),
        ({"compile": {"mode": "max-autotune"}}, "compile.mode max-autotune and here it is default"),
        ({"compile": {"options": {"combo_kernels": False}}}, "compile.options.combo_kernels False and here it is True"),
    ],
)
def test_an_artifact_of_another_place_model_or_policy_is_refused(changed: dict[str, Any], words: str) -> None:
    def merged(base: Any, change: Any) -> Any:
        if not isinstance(change, dict):
            return change
        return {**base, **{key: merged(base.get(key, {}), value) for key, value in change.items()}}

    other = Artifact(path="arm.compiled", checksum="0" * 64, facts=merged(facts(), changed))
    line = refused(lambda: artifact.check(other, ARM, on_cpu=True, devices=(HERE,), threads=2))
    assert words in line
    assert 'arm "compiled-bucketed": compile.artifact "arm.compiled"' in line
    assert "tailgate precompile" in line


def test_what_no_graph_depends_on_may_differ() -> None:
    """Weights are a graph's inputs: a model of the same shape under another name uses the same code."""
    mine = replace(
        ARM,
        name="other",
        model=replace(ARM.model, seed=7, device="cpu", dtype="float32"),
        engine=replace(ARM.engine, max_queue=1, drain_grace_s=1.0, decode_per_prefill=3),
        compile=replace(ARM.compile, artifact="arm.compiled"),
    )
    same = Artifact(path="arm.compiled", checksum="0" * 64, facts=facts())
    artifact.check(same, mine, on_cpu=True, devices=(HERE,), threads=2)
    artifact.check(same, mine, on_cpu=True, devices=())  # where devices and threads are not known yet


def test_the_shape_of_a_model_in_a_folder_is_its_configuration_wherever_it_came_from(tmp_path: Path) -> None:
    def config(name: str, **table: Any) -> ArmConfig:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": 64, "_name_or_path": name, **table}))
        return replace(ARM, model=ModelConfig(id=str(tmp_path / name)))

    same = Artifact(path="a", checksum="0" * 64, facts=facts(config("base")))
    artifact.check(same, config("tuned"), on_cpu=True, devices=(HERE,), threads=2)
    wide = config("wide", hidden_size=128)
    assert "hidden_size" in refused(lambda: artifact.check(same, wide, on_cpu=True, devices=(HERE,), threads=2))


def test_a_model_of_the_hub_that_is_not_here_yet_is_not_compared() -> None:
    unknown = replace(ARM, model=ModelConfig(id="nobody/has-this"))
    assert artifact.made_for(unknown, on_cpu=True)["architecture"] is None
    same = Artifact(path="a", checksum="0" * 64, facts=facts())
    artifact.check(same, unknown, on_cpu=True, devices=(HERE,), threads=2)


def test_auto_is_the_dtype_that_it_stands_for() -> None:
    for on_cpu, dtype in ((True, "float32"), (False, "bfloat16")):
        named = replace(ARM, model=replace(ARM.model, dtype=dtype))  # type: ignore[arg-type]
        assert artifact.made_for(named, on_cpu=on_cpu) == artifact.made_for(ARM, on_cpu=on_cpu)
