"""What can be known to fail before anything heavy starts: compiler, GPU, Envoy, ports, model path, output folder."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sysconfig
from pathlib import Path

from loadtests.channel_token import channel_token
from loadtests.environment import sees_gpu
from loadtests.experiment import Experiment
from loadtests.toml_limits import expanded
from servers.config import ArmConfig, ConfigError
from servers.security import server_tls
from servers.splitter import envoy_path


def check_experiment(experiment: Experiment) -> None:
    """This machine has what the experiment needs, as far as can be told without starting it."""
    for arm in experiment.own_arms:
        check_arm(arm.config)
    for arm in experiment.external_arms:
        assert arm.external is not None
        arm.external.check(arm.name)
    if experiment.traffic.remote_workers:
        channel_token(f"traffic.remote_workers = {experiment.traffic.remote_workers}")
        host, master_port = experiment.traffic.master
        check_port(master_port, key="port of traffic.master_bind", host=host, remedy="or give another of this host")
    experiment.security.check()
    if experiment.traffic.direct or experiment.external_arms:
        return
    splitter = experiment.splitter
    server_tls(splitter.tls_certificate, splitter.tls_key, splitter.tls_client_ca)
    envoy_path()
    for key in ("port", "admin_port"):
        port = getattr(experiment.splitter, key)
        if port:
            check_port(port, key=f"splitter.{key}")


def check_arm(config: ArmConfig) -> None:
    """The arm's device, compiler and model files are there, as far as can be told without torch."""
    device = config.model.device.partition(":")[0]
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f'arm "{config.name}": model.device is "{config.model.device}": use auto, cpu, cuda or cuda:N'
        )
    if device == "cuda" and not sees_gpu():
        raise ConfigError(
            f'arm "{config.name}": model.device is "{config.model.device}" but no NVIDIA GPU is to be seen: '
            "use cpu, or run where a GPU is"
        )
    on_cpu = device == "cpu" or (device == "auto" and not sees_gpu())
    if on_cpu and config.compile.enabled and config.compile.backend == "inductor":
        _check_compiler(config.name)
    path = config.model.id
    if path.startswith(("/", "./", "../", "~")) and not expanded(path, "model.id").exists():
        raise ConfigError(f'model.id "{path}" does not exist: give a Hugging Face path or id, or random:NAME')


def check_port(port: int, *, key: str, host: str = "127.0.0.1", remedy: str = "or give 0 for a free port") -> None:
    """The port is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{key} is {port}: cannot be used on {host} ({error.strerror}): stop what listens there, {remedy}"
            ) from None


def check_writable(folder: Path) -> None:
    """The folder is there and can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--out "{folder}" cannot be made ({error.strerror}): give a folder that can') from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f'--out "{folder}" is not writable: give a folder that is')


def _check_compiler(arm: str) -> None:
    # Inductor writes C++ for the CPU and asks for g++ by name unless CXX says otherwise.
    wanted = os.environ.get("CXX") or ("clang++" if os.uname().sysname == "Darwin" else "g++")
    try:
        program = (shlex.split(wanted) or ["g++"])[0]
    except ValueError as error:
        raise ConfigError(f"the environment variable CXX is {wanted!r} ({error}): give the C++ compiler") from None
    if shutil.which(program) is None:
        other = next((name for name in ("c++", "clang++", "g++") if shutil.which(name)), None)
        remedy = f"set CXX={other}" if other else "install g++ (or set CXX)"
        raise ConfigError(
            f'arm "{arm}" compiles for the CPU but the C++ compiler "{program}" is missing: {remedy}, '
            "or use presets eager and eager-padded"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise ConfigError(
            f'arm "{arm}" compiles for the CPU but Python\'s C header {header} is missing: '
            "install Python's development package (python3-dev)"
        )
