"""A mapped file that is truncated ends the process with an error message instead of a bare signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems do not report the file"),
]

START = """
import faulthandler, os, sys
from pathlib import Path

from llamado.engine.options import EngineOptions
from llamado.engine.loaded_model import LoadedModel
# Of the thread alone: what running ones do cannot be read without Python's lock; CPython may end by a signal over it.
if "before" in sys.argv: faulthandler.enable(all_threads=False)
one, two = (LoadedModel.load(path, EngineOptions(n_ctx=64, n_threads=2)) for path in sys.argv[1:3])
if "after" in sys.argv: faulthandler.enable(all_threads=False)
assert one.generate("Hello", n_predict=2, seed=1) == two.generate("Hello", n_predict=2, seed=1)
"""


def run(tmp_path: Path, then: str, *more: str) -> subprocess.CompletedProcess[str]:
    paths = [str(make_llama(tmp_path / f"{name}.gguf", n_embd=256)) for name in ("one", "two\n2")]
    return subprocess.run(
        [sys.executable, "-P", "-c", START + then, *paths, *more], capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
@pytest.mark.parametrize("faulthandler", ["", "before", "after"])
@pytest.mark.parametrize(("number", "name"), [(1, "one.gguf"), (2, r"two\n2.gguf")])
@pytest.mark.full
def test_message_names_the_truncated_file(tmp_path: Path, number: int, name: str, faulthandler: str) -> None:
    then = f"os.truncate(sys.argv[{number}], 8192)\n{('one', 'two')[number - 1]}.generate('Hello', n_predict=2)\n"
    check_message(run(tmp_path, then, faulthandler), name)


def check_message(done: subprocess.CompletedProcess[str], name: str) -> None:
    assert done.returncode == 1, done.stderr
    messages = [line for line in done.stderr.splitlines() if line.startswith("llamado: ")]
    assert (
        len(messages) == 1
        and f"{name} became shorter while it was in use" in messages[0]
        and "--no-mmap" in messages[0]
    )


@pytest.mark.full
def test_closed_file_is_not_named(tmp_path: Path) -> None:
    then = "os.truncate(sys.argv[1], 8192)\none.close()\ntwo.generate('Hello', n_predict=2)\nprint('fine')\n"
    done = run(tmp_path, then)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


@pytest.mark.slow
def test_file_read_into_memory_may_be_truncated_but_no_mapped_one(tmp_path: Path) -> None:
    then = """
three = LoadedModel.load(sys.argv[1], EngineOptions(n_ctx=64, mmap=False))
one.close()
os.truncate(sys.argv[1], 8192)
print(len(three.generate('Hello', n_predict=2)) > 0, flush=True)
os.truncate(sys.argv[2], 8192)
two.generate('Hello', n_predict=2)
"""
    done = run(tmp_path, then)
    assert done.stdout == "True\n", done.stderr
    check_message(done, r"two\n2.gguf")


@pytest.mark.full
@pytest.mark.parametrize("faulthandler", ["", "before", "after"])
def test_faults_in_other_memory_reach_the_default_handler(tmp_path: Path, faulthandler: str) -> None:
    then = """
import mmap
path = Path(sys.argv[1]).with_name("other")
path.write_bytes(bytes(65536))
memory = mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
os.truncate(path, 0)
memory[5000]
"""
    done = run(tmp_path, then, faulthandler)
    assert done.returncode == -signal.SIGBUS and "became shorter" not in done.stderr
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(faulthandler)


@pytest.mark.full
def test_signal_from_another_process_ends_the_process(tmp_path: Path) -> None:
    then = """
import signal, subprocess, time
subprocess.run([sys.executable, "-c", f"import os; os.kill({os.getpid()}, {int(signal.SIGBUS)})"])
time.sleep(60)
"""
    assert run(tmp_path, then).returncode == -signal.SIGBUS
