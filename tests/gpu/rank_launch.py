"""Starts the ranks of a run as processes under torchrun or mpirun; concludes from their records as `launch/` does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from dcp_decode.config import RunConfig
from dcp_decode.forensics.conclusion import conclude_folder
from dcp_decode.launcher import MPI_VARIABLES, TORCHRUN_VARIABLES
from dcp_decode.records import RECORDS_VARIABLE, make_plan
from dcp_decode.results import Conclusion

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = "output.txt"
MPIRUN = shutil.which("mpirun")
PREFIXES = ("TORCHELASTIC", "OMPI_", "PMI", "PRTE")
NO_REMOTE_AGENT = {"OMPI_MCA_plm_rsh_agent": "/bin/true"}  # as in launch/mpirun.sh


def launcher_command(launcher: str, ranks: int) -> list[str]:
    """The command line before `-m module` or a script. launcher: "torchrun" or "mpi"."""
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    flags = ["--oversubscribe", "--bind-to", "none", "--mca", "osc", "^ucx"]
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    return [str(MPIRUN), *flags, "-n", str(ranks), sys.executable]


def run_ranks(launcher: str, config: RunConfig, arguments: list[str], folder: Path, seconds: float) -> Conclusion:
    """Run `arguments` (module or script, and options) as config.parallel.dcp ranks; raises TimeoutExpired.

    What they print is left in OUTPUT of the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Of a launcher that this process may itself run under.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {*TORCHRUN_VARIABLES, *sum(MPI_VARIABLES, ()), "LOCAL_RANK"} and not name.startswith(PREFIXES)
    }
    environment = NO_REMOTE_AGENT | inherited | {RECORDS_VARIABLE: str(folder), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    with (folder / OUTPUT).open("w") as output:
        command = [*launcher_command(launcher, config.parallel.dcp), *arguments]
        subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=seconds, check=False)
    return conclude_folder(make_plan("run", config, launcher, str(folder / "run.json")), folder)
