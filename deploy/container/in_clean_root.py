#!/usr/bin/env python3
"""Takes the steps of a Containerfile in a clean root, where no container engine is at hand.

    python3 deploy/container/in_clean_root.py --root /var/tmp/tailgate-root -- run demo --help

Makes a root of the distribution that FROM names (mmdebstrap), takes each step in it by chroot with the environment that
the file sets and nothing else, and at last runs the entry point with the arguments given, as the user that the file
names. Needs root on Linux, mmdebstrap and unshare. It knows the instructions that the file uses and refuses others; it
makes no image, and shares the network and the kernel with this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
BARE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


class StepError(Exception):
    """A step that cannot be taken, in one line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Containerfile, such as RUN, and what stands behind it."""

    name: str
    value: str


@dataclass(slots=True)
class Root:
    """A clean root, and what the steps so far have set. `mounts` are (path here, path there), to be read there."""

    path: Path
    arguments: Mapping[str, str]
    mounts: Sequence[tuple[str, str]] = ()
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": BARE_PATH})
    given: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def take(self, step: Instruction) -> None:
        """The step is taken. StepError where it fails, or is none that is known."""
        take = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._env,
            "RUN": lambda value: self.run(["/bin/sh", "-c", value]),
            "COPY": self._copy,
            "WORKDIR": self._workdir,
            "USER": lambda value: setattr(self, "user", value),
            "ENTRYPOINT": lambda value: setattr(self, "entrypoint", json.loads(value)),
            "CMD": lambda value: setattr(self, "command", json.loads(value)),
        }.get(step.name)
        if take is None:
            raise StepError(f"{step.name} is no instruction that this script takes")
        print(f"# {step.name} {step.value}", flush=True)
        take(step.value)

    def run(self, command: Sequence[str]) -> None:
        """The command ended well, in the root, as its user. StepError otherwise."""
        variables = {"HOME": self._home(), **self.environment, **self.given}
        inside = ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), *command]
        lines = [f"mount --rbind /dev {self._at('/dev')}", f"mount -t proc proc {self._at('/proc')}"]
        for source, target in self.mounts:
            there = self._at(target)
            make = f"mkdir -p {there}" if Path(source).is_dir() else f"mkdir -p $(dirname {there}) && touch {there}"
            lines += [make, f"mount --bind -o ro {shlex.quote(source)} {there}"]
        # --userspec takes the user's other groups from the root's own files.
        shell = f"cd {shlex.quote(self.folder)} && exec {shlex.join(inside)}"
        lines.append(
            f"exec chroot --userspec={shlex.quote(self.user)} {shlex.quote(str(self.path))} "
            f"/bin/sh -c {shlex.quote(shell)}"
        )
        script = " && ".join(lines)
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", script],
            env={"PATH": BARE_PATH},
            check=False,
        )
        if done.returncode:
            raise StepError(f"exit code {done.returncode} of {shlex.join(command)}")

    def _home(self) -> str:
        """Where the user lives by the root's own list of users."""
        rows = [line.split(":") for line in (self.path / "etc" / "passwd").read_text(encoding="utf-8").splitlines()]
        return next((row[5] for row in rows if self.user in (row[0], row[2])), "/")

    def _at(self, path: str) -> str:
        return shlex.quote(f"{self.path}/{path.lstrip('/')}")

    def _from(self, value: str) -> None:
        match = re.fullmatch(r"debian:(\w+)-slim", value)
        if match is None:
            raise StepError(f"FROM {value}: this script makes roots of debian:<release>-slim")
        if self.path.exists() and any(self.path.iterdir()):
            raise StepError(f"{self.path} is not empty: name another --root")
        made = subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", match[1], str(self.path)], check=False)
        if made.returncode:
            raise StepError(f"exit code {made.returncode} of mmdebstrap")
        shutil.copy("/etc/resolv.conf", self.path / "etc" / "resolv.conf")

    def _arg(self, value: str) -> None:
        name, _, otherwise = value.partition("=")
        if (given := self.arguments.get(name, otherwise)) != "":
            self.given[name] = given

    def _env(self, value: str) -> None:
        self.environment |= dict(item.split("=", 1) for item in shlex.split(value))

    def _workdir(self, value: str) -> None:
        self.folder = value
        (self.path / value.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, value: str) -> None:
        *sources, target = shlex.split(value)
        into = self.path / str(Path(self.folder) / target).lstrip("/")
        (into if target.endswith("/") else into.parent).mkdir(parents=True, exist_ok=True)
        for source in sources:
            path = PROJECT / source
            if path.is_dir():
                shutil.copytree(path, into, ignore=LEFT_OUT, dirs_exist_ok=True, symlinks=True)
            else:
                shutil.copy(path, into / path.name if target.endswith(("/", ".")) else into)


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions of a Containerfile, with lines that go on put together, and without comments."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, value = line.strip().partition(" ")
            yield Instruction(name.upper(), " ".join(value.split()))


def main(arguments: Sequence[str] | None = None) -> int:
    """The steps were taken; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--file", type=Path, default=HERE / "Containerfile", help="default: the one next to this script"
    )
    parser.add_argument("--root", type=Path, required=True, help="the root that is made; it must be empty or not there")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as of an engine")
    parser.add_argument("--mount", action="append", default=[], metavar="HERE:THERE", help="shown to every step")
    parser.add_argument("command", nargs="*", help="arguments of the entry point; default: CMD")
    options = parser.parse_args(arguments)
    missing = [name for name in ("mmdebstrap", "unshare", "chroot") if shutil.which(name) is None]
    if missing or os.geteuid():
        print(f"in_clean_root: {', '.join(missing) or 'it'} needs to be installed, and root", file=sys.stderr)
        return 2
    root = Root(
        path=options.root.resolve(),
        arguments=dict(item.split("=", 1) for item in options.build_arg),
        mounts=[tuple(item.split(":", 1)) for item in options.mount],
    )
    try:
        for step in instructions(options.file.read_text(encoding="utf-8")):
            root.take(step)
        root.given = {}  # arguments are of the build
        root.run([*root.entrypoint, *(options.command or root.command)])
    except StepError as error:
        print(f"in_clean_root: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
