"""A Slurm of its own on this machine: a controller and two nodes, as processes of one folder.

with Slurm(folder) as slurm:
    job = slurm.run("sbatch", "--parsable", script).strip()

The nodes are two slurmd at addresses of the loopback, which Slurm allows if it was built with
--enable-multiple-slurmd, as Debian's is. They claim more processors than there are. Jobs of the
partition `urgent` take the nodes of `main` away. Whoever starts it owns it, and need not be root.
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
# Debian: where programs lie that are not for everybody's PATH.
PLACES = f"{os.environ['PATH']}:/usr/sbin:/sbin"
OWNER = pwd.getpwuid(os.getuid()).pw_name
NODES = ("127.0.0.1", "127.0.0.2")
# Slurm kills so long after it has told a job to end (its own default is 30).
KILL_WAIT_S = 20
# A preempted job has so many seconds.
GRACE_S = 30
# Before a job that has run may run again; its own default is 120.
AGAIN_S = 5
START_S, END_S = 30.0, 30.0

CONFIGURATION = """
ClusterName=here
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire={again}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
KillWait={kill_wait}
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes[0]} NodeAddr={nodes[0]} NodeHostname={host} Port={ports[1]} CPUs=4 RealMemory=16000
NodeName={nodes[1]} NodeAddr={nodes[1]} NodeHostname={host} Port={ports[2]} CPUs=4 RealMemory=16000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


def missing() -> list[str]:
    """Programs of Slurm that this machine has not."""
    return [name for name in PROGRAMS if shutil.which(name, path=PLACES) is None]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Slurm:
    """Its daemons, from `with` to its end; RuntimeError where they do not come up.

    `folder` must lie where every user may pass: munged wants everybody to reach its socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": PLACES,
        }

    def __enter__(self) -> "Slurm":
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def run(self, *command: str, **environment: str) -> str:
        """What one of Slurm's commands prints; RuntimeError where it fails."""
        done = subprocess.run(
            command,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """What Slurm says of a job; nothing where it has forgotten it."""
        try:
            shown = self.run("scontrol", "--oneliner", "show", "job", job)
        except RuntimeError:
            return {}
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def nodes(self) -> list[str]:
        return self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t").split()

    def _open(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=self.folder,
                user=OWNER,
                host=socket.gethostname().partition(".")[0],
                nodes=NODES,
                ports=[free_port() for _ in range(3)],
                again=AGAIN_S,
                kill_wait=KILL_WAIT_S,
                grace=GRACE_S,
            )
        )
        own = (("key-file", "munge.key"), ("socket", "munge.sock"), ("pid-file", "munged.pid"))
        more = (("log-file", "munged.log"), ("seed-file", "munged.seed"))
        told = [f"--{option}={self.folder / name}" for option, name in (*own, *more)]
        self._start("munged", "--foreground", *told)
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        deadline = time.monotonic() + START_S
        while self._states() != ["idle"] * len(NODES):
            if time.monotonic() > deadline or any(p.poll() is not None for p in self.running):
                raise RuntimeError(f"Slurm does not come up:\n{self.tails()}")
            time.sleep(0.2)

    def _states(self) -> list[str]:
        try:
            return self.nodes()
        except RuntimeError:
            return []

    def _start(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=PLACES)
        assert program is not None
        number = sum(p.args[0] == program for p in self.running)  # type: ignore[index]
        with (self.folder / f"{name}{number or ''}.log").open("ab") as log:
            self.running.append(
                subprocess.Popen(
                    [program, *arguments], env=self.environment, stdout=log, stderr=log
                )
            )

    def tails(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in logs)

    def _close(self) -> None:
        """Jobs first, so that nothing of them is left; then the daemons, the youngest first."""
        if len(self.running) > 1 and self._states():
            self.run("scancel", "--user", OWNER)
            deadline = time.monotonic() + KILL_WAIT_S + END_S
            while self.run("squeue", "--noheader").strip() and time.monotonic() < deadline:
                time.sleep(0.5)
        for process in reversed(self.running):
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
