"""docs/use/clusters.md: its commands, as written, on two hosts made of network namespaces; needs root."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.benchmarks import netlab

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "use" / "clusters.md").read_text()
BITS = {bits: bits + 0.25 for bits in (4, 8)}  # of an element, with its part of the metadata


def block(heading: str, containing: str) -> str:
    """Return the code block of a section that has this text."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    [found] = [text for text in re.findall(r"```\w*\n(.*?)```", section, flags=re.DOTALL) if containing in text]
    return found


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PATH": path, "PYTHONPATH": python, **variables}


@pytest.fixture(scope="module")
def lab() -> Iterator[netlab.Lab]:
    try:
        with netlab.hosts(2, "1gbit") as hosts:
            yield hosts
    except netlab.NetlabError as error:
        reason = f"no hosts on this machine: {error}"
        print(reason)
        pytest.skip(reason)


def on_each_host(lab: netlab.Lab, folder: Path, script: str, timeout: float = 150, **variables: str) -> list[str]:
    """Return the output of each host, called node0 and node1, that runs the script in a separate shell."""
    addresses = "".join(f"{lab.address(rank)} node{rank}\n" for rank in range(lab.count))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
    (folder / "script").write_text(script)
    # Names and their addresses are this process's own: nothing changes on the machine.
    start = (
        f"mount --bind {folder}/hosts /etc/hosts && hostname node$RANK && export NODE_RANK=$RANK && "
        "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME && "
        f"cd {ROOT} && exec bash -e {folder}/script"
    )
    command = ["unshare", "--mount", "--uts", "bash", "-c", start]
    return lab.run(command, timeout=timeout, env=environment(**variables))


def test_torchrun_as_written(lab: netlab.Lab, tmp_path: Path) -> None:
    script = block("torchrun", "torchrun --nnodes").rstrip()
    first, second = on_each_host(lab, tmp_path, f"{script} --steps 10\n")
    [loss] = re.findall(r"^step 10: loss (\S+)", first, flags=re.MULTILINE)
    assert float(loss) < 5 and "loss" not in second  # log(256) = 5.5 at the start
    counts = re.findall(r"^ddp.gradients: (\d+) of (\d+) calls quantized, (\S+) of (\S+) MB sent", first, re.MULTILINE)
    [(quantized, calls, sent, full)] = counts
    assert quantized == calls != "0"
    # The second export has reached the ranks, and they know their hosts: the bytes of docs/use/clusters.md.
    between, inside = BITS[4] / 2, (BITS[8] + BITS[4]) / 2
    assert float(sent) / float(full) == pytest.approx((between + inside) / (1.5 * 32), rel=0.03)


def test_hosts_with_other_variables_get_an_error(lab: netlab.Lab, tmp_path: Path) -> None:
    script = block("torchrun", "torchrun --nnodes").replace("HIERARCHICAL=auto", "BITS=$((4 + 4 * NODE_RANK))")
    with pytest.raises(netlab.RankError) as caught:
        on_each_host(lab, tmp_path, script)
    assert "MismatchError" in caught.value.stderr
    assert "bits is 4 on ranks 0, 1; 8 on ranks 2, 3" in caught.value.stderr
    assert "bits is 4 on ranks 0, 1; 8 on ranks 2, 3" in block("The same settings on every rank", "bits is")


def test_slurm_script_expands(tmp_path: Path) -> None:
    for name, source in {"scontrol": "printf 'node0\\nnode1\\n'", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{source}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "64",
    }
    done = subprocess.run(
        ["bash", "-eu", "-c", block("Slurm", "#SBATCH")],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    expected = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id 7 --rdzv-backend c10d --rdzv-endpoint node0:29500"
    assert done.stdout.split() == [*expected.split(), "examples/ddp/train.py", "--bits", "4"]


# ssh and pdsh on the hosts of the lab: they run the command in an empty environment, with %n the number of the host.
SSH = """#!/bin/bash
[[ $* == *"hostname -I"* ]] && echo {address} || echo node0
"""
PDSH = """#!/bin/bash
shift 5
for n in 0 1; do
    ip netns exec {prefix}-h$n unshare --mount --uts env -i HOME="$HOME" PATH=/usr/local/bin:/usr/bin:/bin \\
        bash -c "mount --bind {folder}/hosts /etc/hosts && hostname node$n && ${{*//%n/$n}}" &
    started+=($!)
done
for process in "${{started[@]}}"; do wait "$process" || exit; done
"""


@pytest.mark.timeout(600)
@pytest.mark.slow  # DeepSpeed compiles an operator at its first start
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("ssh", [False, True])
def test_deepspeeds_launcher_as_written(lab: netlab.Lab, tmp_path: Path, ssh: bool) -> None:
    (tmp_path / "hostfile").write_text(block("DeepSpeed's launcher", "slots="))
    (tmp_path / "settings").write_text("GLOO_SOCKET_IFNAME=eth0\nFLASH_ALLREDUCE_HIERARCHICAL=auto\n")
    (tmp_path / "bin").mkdir()
    for name, source in {"ssh": SSH, "pdsh": PDSH}.items():
        path = tmp_path / "bin" / name
        path.write_text(source.format(address=lab.address(0), prefix=lab.prefix, folder=tmp_path))
        path.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), environment()["PATH"]])
    variables = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "DS_ENV_FILE": str(tmp_path / "settings"), "PATH": path}
    script = block("DeepSpeed's launcher", "--no_ssh" if not ssh else "hostfile examples").rstrip()
    script = script.replace("--hostfile hostfile", f"--hostfile {tmp_path}/hostfile") + " --steps 10\n"
    if ssh:  # one launcher, which starts the ranks of both hosts; its own variables are not passed on
        script = f'[ "$NODE_RANK" = 0 ] || exit 0\nexport FLASH_ALLREDUCE_CHUNK_BYTES=8192\n{script}'
    first = on_each_host(lab, tmp_path, script, timeout=500, **variables)[0]
    assert re.search(r"deepspeed.stage2.gradients: 10 of 10 calls quantized", first), first
    # Variables of .deepspeed_env reach the ranks, those of the launcher's own environment do not.
    [line] = re.findall(r"flash all-reduce: attached.*", first)
    assert ('hierarchical="auto"' in line) == ssh and "chunk_bytes" not in line
