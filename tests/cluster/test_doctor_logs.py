"""Log explanation for llama.cpp's programs and llamado, and the command `llamado doctor`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_stand_ins import listening
from ports import free_port
from scripted_worker import ScriptedWorker
from tiny_models import make_llama

from llamado.cluster.doctor.logs import PATTERNS, explain_lines
from llamado.cluster.doctor.symptoms import SYMPTOMS
from llamado.commands import cli

LINES = {
    "0.00.042.953 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080": "port-taken",
    "Failed to create server socket": "port-taken",
    "llamado: cannot listen on 127.0.0.1:8080: Address already in use; choose another with --port": "port-taken",
    "ggml-rpc.cpp:547: Failed to connect to 10.0.0.2:50052": "worker-refused",
    "RPC server version mismatch: 6.1.0": "worker-version",
    "HELLO request size mismatch (0 vs 24) — client needs upgrade to protocol v7.x": "worker-version",
    "ggml-rpc.cpp:401: Remote RPC server crashed or returned malformed response": "worker-lost",
    "W worker RPC0[10.0.0.2:50052] is lost: it closed the connection": "worker-lost",
    "E device CUDA0 is lost: it is out of memory: cannot allocate 9 MB; answers wait until it is back": "card-lost",
    "CUDA error: an illegal memory access was encountered": "card-lost",
    "CUDA error: out of memory": "out-of-memory",
    "W CUDA: not used: this machine has no NVIDIA driver": "card-unusable",
    "Cannot resolve host 'worker1'": "unknown-host",
    "Unknown command: 71": "not-a-worker",
    "E gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)": "no-file",
    "E gguf_init_from_file: failed to open GGUF file '/m.gguf' (Permission denied)": "not-readable",
    "gguf_init_from_file_ptr: invalid magic characters: '<!DO', expected 'GGUF'": "not-gguf",
    "llama_model_load: error loading model: tensor 'blk.3.ffn_up.weight' data is not within the file bounds, model is "
    "corrupted or incomplete": "truncated",
    "llama_model_load: error loading model: unknown model architecture: 'glm4moelite'": "architecture",
    "gguf_init_from_file_ptr: tensor 'a' has invalid ggml type 99. should be in [0, 42)": "weight-type",
    "llama_model_load: error loading model: missing tensor 'blk.0.attn_q.weight'": "invalid-model",
    "llama_model_loader: failed to load GGUF split from /m-00002-of-00003.gguf": "missing-part",
    "error loading model vocabulary: unknown pre-tokenizer type: 'new'": "invalid-model",
    "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 9000000000": "out-of-memory",
    "llama_model_load: error loading model: unable to allocate CPU buffer": "out-of-memory",
    "failed to allocate buffer for kv cache": "out-of-memory",
    "out of memory: the model needs 9.0 GiB of memory": "too-large",
    "tensor allocation failed: RPC0 has no room for 9 GB more": "out-of-memory",
    "warning: failed to mlock 919-byte buffer (after previously locking 0 bytes): Cannot allocate memory": "lock-limit",
    "kernel: Out of memory: Killed process 4242 (llama-server)": "killed",
    "fwrite: No space left on device": "disk-full",
    "Failed to create cache directory: /root/.cache/llama.cpp/rpc": "cache-not-writable",
    "W srv  operator(): unauthorized: Invalid API Key": "wrong-key",
    "request (9000 tokens) exceeds the available context size (4096 tokens), try increasing it": "context-full",
    "D slot no slot is available, defer task, id_task = 3": "no-slots",
    "error: invalid argument: --log-format": "wrong-flag",
    "E srv chat template parsing error: unexpected token": "no-template",
    "ggml_blas_graph_compute: unsupported op RMS_NORM": "device-same",
    "Segmentation fault (core dumped)": "crash",
    "GGML_ASSERT(status == GGML_STATUS_SUCCESS) failed": "crash",
    "E srv  llama_server: exiting due to model loading error": "failed-to-load",
    "0.0.0.0 can be reached from other machines, and no key is asked for: anyone can use this": "no-key",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_explained(line: str) -> None:
    (found,) = explain_lines(["all is well\n", line + "\n"], "server.log")
    assert (found.symptom, found.where) == (LINES[line], "server.log:2") and found.found == line


def test_every_line_has_a_pattern() -> None:
    assert {pattern.symptom for pattern in PATTERNS} >= set(LINES.values())
    assert {pattern.symptom for pattern in PATTERNS} <= set(SYMPTOMS)


def test_fields_of_a_line_fill_in_the_remedy() -> None:
    (found,) = explain_lines(["Failed to connect to 10.0.0.2:50055"], "log")
    assert found.command.startswith("llamado worker -H 0.0.0.0 -p 50055   # on 10.0.0.2;")


def test_consequences_are_left_out_and_lines_are_counted() -> None:
    lines = [
        "E gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)",
        "E llama_model_load_from_file_impl: failed to load model",
        "E gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)",
        "E srv  llama_server: exiting due to model loading error",
    ]
    (found,) = explain_lines(lines, "log")
    assert found.symptom == "no-file" and found.where == "log:1" and found.found.endswith("(2 times)")
    (found,) = explain_lines(lines[1:2], "log")
    assert found.symptom == "failed-to-load"


HEALTHY = """\
0.00.004.020 I srv  llama_server: initializing ...
0.00.011.493 I cmn  common_param: common_params_print_info: verbosity = 3 (adjust with the `-lv N` CLI arg)
0.00.011.792 W srv  llama_server: security: no API key is set and CORS allows all origins
0.00.013.523 I srv    load_model: loading model '/m.gguf'
0.00.313.523 I srv  llama_server: model loaded
0.00.313.600 I srv  llama_server: server is listening on http://127.0.0.1:8080
0.01.313.600 I srv  update_slots: all slots are idle
"""


def test_the_log_of_a_healthy_server_has_no_findings() -> None:
    assert explain_lines(HEALTHY.splitlines(), "log") == []


# --- the command ------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main(["doctor", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_healthy_system(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(HEALTHY)
    model = make_llama(tmp_path / "tiny.gguf")
    with listening() as (url, _):
        code, out, err = run(capsys, url, url.removeprefix("http://"), log, model, "-t", 1, "--port", free_port())
    assert (code, err) == (0, "") and out.startswith("No problem found. Checked: ")
    for name in (url, str(log), str(model), "this machine"):
        assert name in out


def test_findings_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("Failed to connect to 10.0.0.2:50052\n")
    port = free_port()
    code, out, _ = run(capsys, f"127.0.0.1:{port}", log, f"tcp://127.0.0.1:{port}")
    assert code == 1
    for title in ("refused", "worker-refused"):
        assert SYMPTOMS[title].title in out
    assert re.search(r"found: .*\n  cause: .*\n  fix: ", out)


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "-m", tmp_path / "none.gguf", "--json")
    found = json.loads(out)
    assert code == 1 and found["healthy"] is False and [one["symptom"] for one in found["findings"]] == ["no-file"]
    assert set(found["findings"][0]) == {"symptom", "title", "where", "found", "cause", "command"}
    code, out, _ = run(capsys, "--json")
    assert code == 0 and json.loads(out) == {"healthy": True, "looked_at": ["this machine"], "findings": []}


@pytest.mark.parametrize(
    "words", [["no-such-file.log"], ["ftp://host"], ["--rpc", "host:port"], ["--rpc", "h:1", "--rpc-ca", "/none.pem"]]
)
def test_unusable_arguments_have_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedWorker() as worker:
        if "h:1" in words:
            words = [f"tls://{worker.endpoint}" if word == "h:1" else word for word in words]
        code, out, err = run(capsys, *words)
    assert code == 2 and not out and err.startswith("llamado: ")


def test_a_flag_out_of_range_has_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--timeout", "0")[0] == 2


def test_speeds_are_measured_and_compared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from llamado.cluster.doctor import workers
    from llamado.devices.split.measure import figures_of

    def measured(devices: list[object]) -> list[object]:
        found = [figures_of(device) for device in devices]  # type: ignore[arg-type]
        return [replace(one, decode=1e10, round_trip=0.07 * i, bandwidth=5e8) for i, one in enumerate(found)]

    monkeypatch.setattr(workers, "measure_all", measured)
    with ScriptedWorker() as near, ScriptedWorker() as far:
        code, out, _ = run(capsys, "--rpc", f"{near.endpoint},{far.endpoint}")
    assert code == 1 and "70.0 ms (the others 0.0 ms)" in out and str(far.endpoint) in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "symptom"),
    [
        (["worker", "-p", "@taken"], "port-taken"),
        (["worker", "-H", "203.0.113.7"], "not-this-machine"),
        (["serve", "-m", "tiny.gguf", "--port", "@taken"], "port-taken"),
        (["serve", "-m", "none.gguf", "--port", "0"], "no-file"),
        (["serve", "-m", "short.gguf", "--port", "0"], "truncated"),
        (["serve", "-m", "page.gguf", "--port", "0"], "not-gguf"),
        (["serve", "-m", "zebra.gguf", "--port", "0"], "architecture"),
        (["serve", "-m", "tiny.gguf", "--no-such-flag"], "wrong-flag"),
        (["plan", "-m", "tiny.gguf", "--rpc", "127.0.0.1:@free"], "worker-refused"),
        (["plan", "-m", "tiny.gguf", "--rpc", "127.0.0.1:@newer"], "worker-version"),
        (["plan", "-m", "tiny.gguf", "--rpc", "tls://127.0.0.1:@plain"], "worker-no-tls"),
    ],
)
def test_logs_of_llamado_are_explained(
    words: list[str], symptom: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files_with_faults(tmp_path)
    log = tmp_path / "ours.log"
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        ScriptedWorker(version=(9, 0, 0)) as newer,
        ScriptedWorker() as older,
        log.open("w") as out,
    ):
        ports = {"@taken": taken.getsockname()[1], "@free": free_port(), "@newer": newer.endpoint.port,
                 "@plain": older.endpoint.port}  # fmt: skip
        for mark, port in ports.items():
            words = [word.replace(mark, str(port)) for word in words]
        monkeypatch.chdir(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", out)
            assert cli.main(words)
    code, text, _ = run(capsys, log, "--json")
    assert code == 1 and symptom in [one["symptom"] for one in json.loads(text)["findings"]], log.read_text()[-3000:]


def files_with_faults(folder: Path) -> None:
    """Write tiny.gguf, and faulty copies of it."""
    data = make_llama(folder / "tiny.gguf").read_bytes()
    files = {"page": b"<!DOCTYPE html>" + data, "short": data[:-2000], "zebra": data.replace(b"llama", b"zebra")}
    for name, content in files.items():
        (folder / f"{name}.gguf").write_bytes(content)


# --- llama.cpp --------------------------------------------------------------------------------------------------------


@pytest.mark.interop
@pytest.mark.parametrize(
    ("program", "flags", "symptom"),
    [
        ("llama-server", ["-m", "none.gguf", "--port", "@free"], "no-file"),
        ("llama-server", ["-m", "page.gguf", "--port", "@free"], "not-gguf"),
        ("llama-server", ["-m", "short.gguf", "--port", "@free"], "truncated"),
        ("llama-server", ["-m", "zebra.gguf", "--port", "@free"], "architecture"),
        ("llama-server", ["-m", "tiny.gguf", "--port", "@taken"], "port-taken"),
        ("llama-server", ["-m", "tiny.gguf", "--port", "@free", "--rpc", "127.0.0.1:@free"], "worker-refused"),
        ("llama-server", ["-m", "tiny.gguf", "--no-such-flag"], "wrong-flag"),
        ("ggml-rpc-server", ["-p", "@taken"], "port-taken"),
    ],
)
def test_logs_of_llama_cpp_are_explained(
    program: str, flags: list[str], symptom: str, peer_bin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files_with_faults(tmp_path)
    log = tmp_path / "real.log"
    with socket.create_server(("127.0.0.1", 0)) as taken, log.open("wb") as out:
        words = [
            flag.replace("@taken", str(taken.getsockname()[1])).replace("@free", str(free_port())) for flag in flags
        ]
        command = [str(peer_bin / program), *words]
        subprocess.run(command, stdout=out, stderr=out, cwd=tmp_path, timeout=120, env=os.environ, check=False)
    code, text, _ = run(capsys, log, "--json")
    assert code == 1 and [one["symptom"] for one in json.loads(text)["findings"]] == [symptom], log.read_text()[-3000:]


@pytest.mark.interop
@pytest.mark.slow
def test_servers_and_workers_of_llama_cpp(peer_bin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy server and a healthy worker; then a busy worker, and different builds."""
    sys.path.append(str(Path(__file__).parents[1] / "interop"))
    from peer_server import llama_server
    from rpc_workers import real_worker

    model = make_llama(tmp_path / "tiny.gguf")
    with llama_server(peer_bin, model, tmp_path / "server.log", "-c", "256") as client:
        url = str(client.base_url)
        printed = f"No problem found. Checked: {url}, {tmp_path / 'server.log'}\n"
        assert run(capsys, url, tmp_path / "server.log")[:2] == (0, printed)
        with listening() as (ours, _):
            code, out, _ = run(capsys, url, ours, "--json")
        assert code == 1 and {one["symptom"] for one in json.loads(out)["findings"]} == {
            "builds-differ", "models-differ",
        }  # fmt: skip
    with real_worker(peer_bin, tmp_path / "worker.log") as worker:
        from llamado.cluster.doctor.workers import examine_workers
        from llamado.devices.split.placement import SplitOptions

        split = SplitOptions(rpc=(worker.endpoint,))
        assert examine_workers(split, measure=False) == []
        host, _, port = worker.endpoint.rpartition(":")
        with socket.create_connection((host, int(port))):
            (found,) = examine_workers(split, timeout=1.0, measure=False)
        assert found.symptom == "worker-silent" and "one client at a time" in found.cause
