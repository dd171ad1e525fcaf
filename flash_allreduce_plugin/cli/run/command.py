"""`flash-allreduce run`: sets the variables, checks, starts the program, and prints the report of its log."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flash_allreduce_plugin import autoload, environment
from flash_allreduce_plugin.cli import launch
from flash_allreduce_plugin.cli.doctor import quick
from flash_allreduce_plugin.cli.output import Output
from flash_allreduce_plugin.cli.report.command import WIDTH, show
from flash_allreduce_plugin.cli.report.log import LogError, read
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.wording import nearest, variable
from flash_allreduce_plugin.telemetry import run_log

#: Exit status where the quick check finds a problem.
FAILED_CHECK = 1
EVERYTHING = "all"

_OFF = ("0", "false", "no", "off")
# Signals of a user, a terminal or a scheduler.
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_KERNEL = 0x80  # si_code SI_KERNEL: a key on the terminal, which has also sent the signal to the program


@dataclass(frozen=True, slots=True)
class Option:
    """A variable that the command sets. words: the option, as the user wrote it."""

    variable: str
    value: str
    words: str


def options_of(
    bits: str | None, preset: str | None, config: Path | None, attach: str | None, fields: Sequence[str]
) -> list[Option]:
    """Return the options as variables. fields: KEY=VALUE each. Raises ValueError, one sentence, for a bad one."""
    found = []
    for key, value in (("bits", bits), ("preset", preset)):
        if value is not None:
            found.append(Option(variable(key), value, f"--{key} {value}"))
    if config is not None:
        found.append(Option(environment.CONFIG, str(config.resolve()), f"--config {config}"))
    if attach is not None:
        found.append(Option(environment.ATTACH, attach, f"--attach {attach}"))
    for text in fields:
        name, equals, value = text.partition("=")
        key = name.strip().replace("-", "_")
        if not equals:
            raise ValueError(f"--set {text}: expected KEY=VALUE, such as --set min_bytes=65536.")
        if key not in FlashConfig.model_fields:
            closest = nearest(key, FlashConfig.model_fields)
            raise ValueError(f"--set {text}: {key} is not a known field; the nearest is {closest}.")
        found.append(Option(variable(key), value, f"--set {text}"))
    for option in found:
        if not option.value.strip():
            raise ValueError(f"{option.words}: expected a value.")
    return found


def run_run(command: Sequence[str], options: Sequence[Option], report_file: Path | None, check: bool) -> int:
    """Run `command` with the plugin attached, print the report of its log to stderr, and return its exit status.

    The status is 128 + n if signal n ended the command, and FAILED_CHECK if the quick check found a problem: then
    nothing was started. report_file: where the log is kept. Raises ValueError, before anything is started, for a
    missing command and for invalid options or variables.
    """
    output = Output(width=WIDTH, soft_wrap=False)
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(f"{command[0]}: no such program; expected a command to run, such as -- torchrun train.py.")
    _refuse_switched_off()
    settings = _settings(options)
    with _log(report_file) as log:
        os.environ.update({**settings, environment.LOG: log.name})
        FlashConfig.from_env()
        if check:
            with launch.ending_on_signals():
                problems = quick.problems()
            for problem in problems:
                output.note(f"run: {problem.section}, {problem.name}: {problem.text} -> {problem.remedy}")
            if problems:
                output.note("run: the command was not started; --no-check starts it without this check")
                return FAILED_CHECK
        status = _until_its_end(program, command)
        _report(output, log, status)
    return status


def _refuse_switched_off() -> None:
    """Raise ValueError if the environment keeps the plugin from being attached or from quantizing."""
    if environment.is_on(environment.DISABLE):
        raise ValueError(
            f"{environment.DISABLE}={os.environ[environment.DISABLE]}: every call would run in full precision; unset "
            "it, or start the program without `flash-allreduce run`."
        )
    for name in (environment.AUTOLOAD, "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        if os.environ.get(name, "").strip().lower() in _OFF:
            raise ValueError(f"{name}={os.environ[name]}: nothing can be attached; unset it.")


def _settings(options: Sequence[Option]) -> dict[str, str]:
    """Return the variables to set. Raises ValueError for two that contradict each other."""
    settings: dict[str, Option] = {}
    for option in options:
        there = os.environ.get(option.variable, "")
        if there.strip() and _meaning(option.variable, there) != _meaning(option.variable, option.value):
            raise ValueError(f"{option.words} and {option.variable}={there} contradict each other; drop one of them.")
        other = settings.setdefault(option.variable, option)
        if other.value.strip() != option.value.strip():
            raise ValueError(f"{other.words} and {option.words} contradict each other; drop one of them.")
    values = {name: option.value for name, option in settings.items()}
    values.setdefault(environment.ATTACH, os.environ.get(environment.ATTACH, "").strip() or EVERYTHING)
    autoload.attached(values[environment.ATTACH])
    return values


def _meaning(name: str, value: str) -> object:
    """Return the meaning of a variable's value, to compare two values."""
    value = value.strip()
    if name == environment.CONFIG:
        return Path(value).resolve()
    return {word.strip() for word in value.lower().split(",")} if name == environment.ATTACH else value


@dataclass(frozen=True, slots=True)
class _Log:
    """The log. name: value of FLASH_ALLREDUCE_LOG. kept: True if the user wants the file. before: its present bytes."""

    name: str
    kept: bool
    before: int = 0

    def written(self) -> Path | None:
        """Return the log of the lowest rank of this machine, if there is one. Its folder has no other files."""
        path = Path(self.name)
        if "%r" in self.name:
            before, _, after = path.name.partition("%r")
            ranks = [
                (int(number), file)
                for file in path.parent.glob("*")
                if file.name.startswith(before) and file.name.endswith(after)
                if (number := file.name[len(before) : len(file.name) - len(after)]).isdecimal()
            ]
            return min(ranks)[1] if ranks else None
        return path if path.exists() and path.stat().st_size > self.before else None


@contextmanager
def _log(report_file: Path | None) -> Iterator[_Log]:
    """Yield the log: of --report, of the environment, or in a temporary folder.

    Raises ValueError for a file that cannot be written.
    """
    there = os.environ.get(environment.LOG, "")
    if report_file is not None and there.strip() and Path(there).resolve() != report_file.resolve():
        raise ValueError(
            f"--report {report_file} and {environment.LOG}={there} contradict each other; drop one of them."
        )
    if report_file is None and not there.strip():
        with tempfile.TemporaryDirectory(prefix="flash-allreduce-run-") as folder:
            # A log for each rank: rank 0 may run on another machine.
            yield _Log(str(Path(folder, "%r.jsonl")), kept=False)
        return
    path = (report_file or Path(there)).resolve()
    if "%r" not in path.name:
        run_log.refuse_unwritable(str(path))
    elif not path.parent.is_dir():
        raise ValueError(f"{path}: cannot be written; expected a file in a folder that exists.")
    yield _Log(str(path), kept=True, before=path.stat().st_size if path.exists() else 0)


def _until_its_end(program: str, command: Sequence[str]) -> int:
    """Run the command with this process's files, terminal and signals, and return its exit status.

    The command stays in the process group, so that it may read from the terminal. A signal that the terminal has sent
    to the whole group is therefore not forwarded. Raises ValueError if the command cannot be started.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if SIGCHLD is ignored, the exit status is lost
    awaited = {signal.SIGCHLD, *_FORWARDED}
    # From here on signals are queued until sigwait: none is lost between two lines.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        try:
            # As subprocess.Popen does, except for the mask: Python ignores these two signals.
            child = os.posix_spawn(
                program, list(command), os.environ, setsigmask=before, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ)
            )
        except OSError as error:
            raise ValueError(f"{program}: cannot be started ({error.strerror}).") from None
        while True:
            received = signal.sigwaitinfo(awaited)
            if received.si_signo == signal.SIGCHLD:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else 128 - code
            elif received.si_code != _FROM_KERNEL:
                os.kill(child, received.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _report(output: Output, log: _Log, status: int) -> None:
    """Print the report to stderr: stdout belongs to the program."""
    file = log.written()
    if file is None and status:
        output.note(f"run: the command ended with exit status {status} before anything was attached")
    elif file is None:
        output.note(f"run: nothing was attached: {_why_nothing(log)}")
    else:
        try:
            show(output.notes, read(file))
        except LogError as error:
            output.note(f"run: {error}")
        if log.kept:
            output.note(f"kept: {file}")


def _why_nothing(log: _Log) -> str:
    elsewhere = (
        f" (rank 0 writes {log.name}, if it runs on another machine)" if log.kept and "%r" not in log.name else ""
    )
    return (
        "the program built nothing that the plugin supports (DDP, FSDP, Megatron; several ranks), or its ranks run in "
        f"another Python than {sys.executable}, or in another environment: run `flash-allreduce doctor` there"
        f"{elsewhere}"
    )
