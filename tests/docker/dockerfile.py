"""The Dockerfile as stages and instructions, and the .dockerignore's verdict on a path. Builds nothing."""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Stage:
    """One FROM and what follows it, in order: (instruction, arguments)."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        """The arguments of every such instruction."""
        return [arguments for name, arguments in self.steps if name == instruction]


def read_stages(text: str) -> dict[str, Stage]:
    """Stages by name, in order, comments dropped and continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    stages: list[Stage] = []
    for line in filter(str.strip, joined.splitlines()):
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            stages.append(Stage(name or str(len(stages)), base))
        else:
            stages[-1].steps.append((instruction, arguments.strip()))
    return {stage.name: stage for stage in stages}


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """The stage and those it is built from, oldest first."""
    stage = stages[name]
    return [*(lineage(stages, stage.base) if stage.base in stages else []), stage]


def user_at_run_time(stages: dict[str, Stage], name: str) -> str:
    """Who the container's process is."""
    users = [user for stage in lineage(stages, name) for user in stage.of("USER")]
    return users[-1] if users else "root"


def environment(stages: dict[str, Stage], name: str) -> dict[str, str]:
    """Every ENV value of the final image."""
    pairs = [arguments for stage in lineage(stages, name) for arguments in stage.of("ENV")]
    return dict(re.findall(r"([A-Z_]+)=(\S+)", " ".join(pairs)))


def copied_sources(stage: Stage) -> list[str]:
    """Paths of the build context that a stage copies; those from other stages are not among them."""
    copies = [arguments.split() for arguments in stage.of("COPY") if not arguments.startswith("--from=")]
    return [source for words in copies for source in words[:-1]]


def health_command(stages: dict[str, Stage], name: str) -> list[str]:
    """The HEALTHCHECK's command as an argument list."""
    checks = [check for stage in lineage(stages, name) for check in stage.of("HEALTHCHECK")]
    command: list[str] = json.loads(checks[-1].partition("CMD ")[2])
    return command


def is_sent(path: str, ignore: str) -> bool:
    """Whether the build context holds a file, by the rules of .dockerignore: the last line that matches decides."""
    sent = True
    parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    for line in filter(None, map(str.strip, ignore.splitlines())):
        if line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        patterns = [pattern, pattern.removeprefix("**/")]
        if any(fnmatch.fnmatch(candidate, each) for candidate in parents for each in patterns):
            sent = line.startswith("!")
    return sent
