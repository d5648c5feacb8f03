"""Find what is sure to fail before anything heavy starts: compiler, GPU, Envoy, ports, model path, output folder."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailgate.analysis.wording import counted
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.monitor.gpus import shown_cards
from tailgate.loadtests.traffic.prompts import check_hub
from tailgate.loadtests.trials.environment import count_gpus, sees_gpu
from tailgate.loadtests.workers.channel import channel_token
from tailgate.servers.complaint import ConfigError, check_installed
from tailgate.servers.config import ArmConfig, check_positions, check_quantisation
from tailgate.servers.presets import RANDOM_ENCODERS, RANDOM_PRESETS
from tailgate.servers.security import server_tls
from tailgate.servers.splitter.envoy import envoy_path

_MOST_HEADER = 100_000_008  # bytes of a safetensors file before its tensors, by the format


def check_experiment(experiment: Experiment) -> None:
    """Raise ConfigError where this machine lacks what the experiment needs, as far as is known before a start."""
    check_installed("locust")
    for arm in experiment.managed_arms:
        check_arm(arm.config)
    if experiment.parity.full:
        from tailgate.loadtests.trials.parity_processes import read_texts

        read_texts(experiment)  # refused now and not after the arms were loaded
    for other in experiment.external_arms:
        other.check(f"arms.{other.name}")
    if experiment.traffic.remote_workers:
        channel_token(f"traffic.remote_workers = {experiment.traffic.remote_workers}")
        host, master_port = experiment.traffic.master
        check_port(master_port, key="port of traffic.master_bind", host=host, remedy="or give another of this host")
    experiment.security.check("security")
    if experiment.external_arms:
        return
    splitter = experiment.splitter
    server_tls(splitter.tls_certificate, splitter.tls_key)
    envoy_path()
    for key in ("port", "admin_port"):
        if port := getattr(splitter, key):
            check_port(port, key=f"splitter.{key}")


def check_arm(config: ArmConfig) -> None:
    """Raise ConfigError where the arm's device, compiler or model is missing, as far as is known without torch."""
    check_installed("torch")
    device, _, index = config.model.device.partition(":")
    what = f'arm "{config.name}": model.device is "{config.model.device}"'
    if device == "cuda" and not sees_gpu():
        raise ConfigError(f"{what} but no GPU is visible: use cpu, or run where `tailgate doctor` shows one")
    if index and (gpus := count_gpus()) and int(index) >= gpus:
        last = f" to cuda:{gpus - 1}" if gpus > 1 else ""
        raise ConfigError(f"{what} but {counted(gpus, 'GPU')} can be used: use cuda:0{last}, or cuda for the first")
    on_cpu = device == "cpu" or (device == "auto" and not sees_gpu())
    if on_cpu and config.compile.enabled and config.compile.backend == "inductor":
        check_compiler(f'arm "{config.name}"')
    newest = None if on_cpu else max((card.capability for card in shown_cards() if card.capability), default=None)
    try:
        check_quantisation(config.model, on_gpu=not on_cpu, capability=newest)
    except ConfigError as error:
        raise ConfigError(f"arms.{config.name}.{error}") from None
    check_model(config.model.id)
    if (folder := Path(config.model.id).expanduser()).is_dir() and not config.model.id.startswith("random:"):
        _check_positions(config, folder)


def check_model(name: str, *, key: str = "model.id") -> None:
    """Raise ConfigError unless `key` names random weights, a folder with all files of a model, or one that the hub
    has."""
    if name.startswith("random:"):
        return
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (an unknown home stays as it is)
    remedy = "give a model's folder, a Hugging Face id, or random weights such as random:tiny"
    if name.startswith(("/", "./", "../", "~")) and not path.exists():
        raise ConfigError(f'{key} "{name}" does not exist: {remedy}')
    if path.exists():
        if not (path / "config.json").is_file():
            raise ConfigError(f'{key} "{name}" is not a folder with a config.json: {remedy}')
        for what, names in (
            ("weights", ("*.safetensors", "pytorch_model*.bin")),
            ("tokenizer", ("tokenizer.*", "vocab.*", "spiece.*")),
        ):
            if not any(file for pattern in names for file in path.glob(pattern)):
                raise ConfigError(f'{key} "{name}" has no {what} ({" or ".join(names)}): give the folder of a model')
        for file in path.glob("*.safetensors"):
            if wrong := _damage(file):
                raise ConfigError(f'{key} "{name}": {file.name} {wrong}: copy or download it again')
    elif name in RANDOM_PRESETS or name in RANDOM_ENCODERS:
        raise ConfigError(f'{key} "{name}" is no model: did you mean random:{name}, its shapes with random weights?')
    elif not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name, re.ASCII):
        raise ConfigError(f'{key} "{name}" is neither a folder here nor a Hugging Face id: {remedy}')
    else:
        check_hub(name, "config.json", what=f'{key} "{name}" cannot be loaded')


def _damage(file: Path) -> str:
    """Return what is wrong with the safetensors file: the length of its header, a JSON header, then the tensors."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            begin = 8 + int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(begin - 8 if begin <= min(size, _MOST_HEADER) else 0))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        whole = begin + max(ends, default=0)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return "is cut off in its header, or no safetensors file"
    return f"is cut off: it has {size:,} of {whole:,} bytes" if size < whole else ""


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return how many positions the model of a config.json has; None where that says nothing of it."""
    return config.get("max_position_embeddings") or config.get("n_positions")


def _check_positions(config: ArmConfig, folder: Path) -> None:
    """Raise ConfigError unless the model in the folder has positions for the longest request."""
    try:
        positions = positions_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f'model.id "{config.model.id}": config.json cannot be read ({error}): give the folder of a model'
        ) from None
    if isinstance(positions, int):
        check_positions(config.model, config.engine, positions)


def check_port(port: int, *, key: str, host: str = "127.0.0.1", remedy: str = "or give 0 for a free port") -> None:
    """Raise ConfigError unless the port is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = f"stop what listens there, {remedy}"
            elif error.errno != errno.EACCES:
                remedy = "give an address of this machine as the host"
            raise ConfigError(
                f"{key} is {port}: cannot be used on {host} ({error.strerror}): {remedy.removeprefix('or ')}"
            ) from None


def check_compiler(who: str = "a compiled arm") -> None:
    """Raise ConfigError unless the C++ compiler and Python's header are there, which `who` needs on the CPU."""
    # Inductor writes C++ for the CPU and asks for g++ by name unless CXX says otherwise.
    compiler = os.environ.get("CXX") or ("clang++" if os.uname().sysname == "Darwin" else "g++")
    program = (compiler.split() or ["g++"])[0]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which(program) is None:
        other = next((name for name in ("c++", "clang++", "g++") if shutil.which(name)), None)
        remedy = f"set CXX={other}" if other else "install g++ (or set CXX)"
        missing = f'the C++ compiler "{program}" is missing: {remedy}, or use presets eager and eager-padded'
    elif not header.is_file():
        missing = f"Python's C header {header} is missing: install Python's development package (python3-dev)"
    else:
        return
    raise ConfigError(f"{who} compiles for the CPU but {missing}")
