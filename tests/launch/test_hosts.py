"""Two hosts with addresses of their own: every way to start a run over both gives the loss of one host, and a network
that is not as it should be is named."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import RECIPE, REPO, TINY, Finished, flags, kill_family, launch, steps_of, tool
from hosts import INTERFACE, Host, names_as_debian_gives_them, sshd, two_hosts

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def loss_of_one_host(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return launch("torchrun", tmp_path_factory.mktemp("alone") / "run", TINY, ranks=2).column("loss")


def printed(*words: str) -> list[str]:
    """The commands of `finetune launch`."""
    done = subprocess.run([tool("finetune"), "launch", *words], cwd=REPO, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if not line.startswith("#")]


def both(hosts: tuple[Host, Host], lines: list[str], **env: str) -> list[subprocess.CompletedProcess[str]]:
    """Each host its line, at once; a single line is that of both."""
    settings = {"PATH": PATH, "HF_HUB_OFFLINE": "1", **env}
    with ThreadPoolExecutor() as threads:
        every = zip(hosts, lines if len(lines) > 1 else lines * 2, strict=True)
        running = [threads.submit(host.run, "bash", "-c", line, **settings) for host, line in every]
        return [future.result() for future in running]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
@pytest.mark.usefixtures("built_ops")
def test_the_printed_commands_train_over_both_as_on_one(
    launcher: str, hosts: tuple[Host, Host], loss_of_one_host: list[float], tmp_path: Path
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    cluster = ["--hostfile", str(hostfile)] + (["--no_ssh"] if launcher == "deepspeed" else [])
    config = ["--deepspeed", "zero2"] if launcher != "torchrun" else []
    run = [RECIPE, *config, *flags({"output_dir": tmp_path / "run", **TINY})]
    lines = printed("--launcher", launcher, *cluster, *run)
    done = both(hosts, lines)
    assert [each.returncode for each in done] == [0, 0], done[0].stdout[-2000:] + done[0].stderr[-3000:]
    first = Finished(0, done[0].stdout, tmp_path / "run")
    assert "run: 2 rank(s)" in done[0].stdout + done[1].stdout
    assert first.column("loss") == pytest.approx(loss_of_one_host, rel=1e-3)


@pytest.mark.nightly
@pytest.mark.usefixtures("built_ops")
def test_the_accelerate_config_for_several_hosts_trains_over_both(
    hosts: tuple[Host, Host], loss_of_one_host: list[float], tmp_path: Path
) -> None:
    config = ["--config_file", "recipes/launch/accelerate_multi_node.yaml", "--num_processes", "2"]
    run = [RECIPE, *flags({"output_dir": tmp_path / "run", **TINY})]
    lines = [
        shlex.join(["accelerate", "launch", *config, "--machine_rank", rank, "--main_process_ip", hosts[0].name, *run])
        for rank in "01"
    ]
    done = both(hosts, lines)
    assert [each.returncode for each in done] == [0, 0], done[0].stdout[-2000:] + done[0].stderr[-3000:]
    assert Finished(0, "", tmp_path / "run").column("loss") == pytest.approx(loss_of_one_host, rel=1e-2)


@pytest.mark.skipif(not (shutil.which("pdsh") and shutil.which("sshd")), reason="apt-get install pdsh openssh-server")
@pytest.mark.usefixtures("built_ops")
def test_deepspeed_reaches_the_other_host_by_ssh(
    hosts: tuple[Host, Host], loss_of_one_host: list[float], tmp_path: Path
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    run = [RECIPE, "--deepspeed", "zero2", *flags({"output_dir": tmp_path / "run", **TINY})]
    (line,) = printed("--hostfile", str(hostfile), *run)
    with sshd(hosts, tmp_path / "ssh"):
        done = hosts[0].run("bash", "-c", line, PATH=PATH)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert Finished(0, "", tmp_path / "run").column("loss") == pytest.approx(loss_of_one_host, rel=1e-3)


def test_hosts_whose_own_name_is_the_loopback_meet_all_the_same(
    hosts: tuple[Host, Host], loss_of_one_host: list[float], tmp_path: Path
) -> None:
    """As Debian sets them up."""
    first = hosts[0].address
    cluster = ["--nodes", "2", "--gpus_per_node", "1", "--master_addr", first, "--interface", INTERFACE]
    lines = printed(*cluster, RECIPE, *flags({"output_dir": tmp_path / "run", **TINY}))
    with names_as_debian_gives_them(hosts):
        doctor = hosts[1].run(sys.executable, "-m", "finetune.cli", "doctor", "--master_addr", first)
        done = both(hosts, lines)
    assert "this host's name is 127.0.1.1: others cannot answer" in doctor.stdout
    assert [each.returncode for each in done] == [0, 0], done[0].stdout[-2000:] + done[0].stderr[-3000:]
    assert Finished(0, "", tmp_path / "run").column("loss") == pytest.approx(loss_of_one_host, rel=1e-3)


def test_a_wrong_interface_ends_the_run_with_what_doctor_says(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    first, second = printed(
        *("--nodes", "2", "--gpus_per_node", "1", "--master_addr", hosts[0].name, "--interface", "eth77"),
        *(RECIPE, *flags({"output_dir": tmp_path / "run", **TINY})),
    )
    settings = {**os.environ, "PATH": PATH, "HF_HUB_OFFLINE": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # Once the first has ended, torchrun on the second waits for it, longer than a test may take.
    other = subprocess.Popen([*hosts[1].inside, "bash", "-c", second], env=settings, **quiet)
    try:
        done = hosts[0].run("bash", "-c", first, PATH=PATH, HF_HUB_OFFLINE="1")
    finally:
        kill_family(other.pid)
        other.wait()
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "GLOO_SOCKET_IFNAME: there is no interface eth77" in said, said[-3000:]
    assert f"This host has lo, {INTERFACE}" in said


def test_doctor_names_a_wrong_network_and_a_blocked_port(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    ask = [sys.executable, "-m", "finetune.cli", "doctor", "--master_addr", first.name, "--master_port", "29511"]
    fine = second.run(*ask)
    assert f"{first.name}:29511 can be reached; nobody listens there yet" in fine.stdout, fine.stdout + fine.stderr
    wrong = second.run(*ask, GLOO_SOCKET_IFNAME="lo")
    assert f"lo, but {first.name} is reached by {INTERFACE}" in wrong.stdout
    assert wrong.returncode == 1
    if not shutil.which("iptables"):
        pytest.skip("apt-get install iptables")
    assert first.run("iptables", "-A", "INPUT", "-p", "tcp", "--dport", "29511", "-j", "DROP").returncode == 0
    blocked = second.run(*ask)
    assert f"{first.name}:29511 cannot be reached" in blocked.stdout
    assert "a firewall blocks it: open TCP 29511" in blocked.stdout
    assert blocked.returncode == 1


def test_a_host_that_is_cut_off_ends_both_and_is_named(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The cable is pulled: no connection is closed, and neither host can look into the other's processes."""
    run = {**TINY, "max_steps": 100_000, "hang_timeout": 8, "output_dir": tmp_path / "run"}
    lines = printed("--nodes", "2", "--gpus_per_node", "1", "--master_addr", hosts[0].name, RECIPE, *flags(run))
    settings = {**os.environ, "PATH": PATH, "HF_HUB_OFFLINE": "1"}
    logs = [tmp_path / host.name for host in hosts]
    running = []
    for host, line, log in zip(hosts, lines, logs, strict=True):
        with log.open("w") as out:
            command = [*host.inside, "bash", "-c", line]
            running.append(subprocess.Popen(command, env=settings, stdout=out, stderr=subprocess.STDOUT))
    try:
        late = time.monotonic() + 150
        while len(steps_of(tmp_path / "run")) < 3:
            assert time.monotonic() < late, logs[0].read_text()[-3000:]
            time.sleep(0.1)
        subprocess.run(["ip", "-n", hosts[0].name, "link", "set", INTERFACE, "down"], check=True)
        began = time.monotonic()
        statuses = [process.wait(60) for process in running]
        seconds = time.monotonic() - began
    finally:
        for process in running:
            kill_family(process.pid)
            process.wait()
        subprocess.run(["ip", "-n", hosts[0].name, "link", "set", INTERFACE, "up"], check=True)
    said = [re.findall(r"^error: (.*)", log.read_text(), re.MULTILINE) for log in logs]
    assert all(statuses), said
    assert seconds < 60
    assert [len(lines) for lines in said] == [1, 1], said
    assert "rank 1 has not responded for" in said[0][0]
    assert "rank 0 has not responded for" in said[1][0]
