"""What `finetune plan` says of a run that has been, on the machine that it ran on."""

from __future__ import annotations

from finetune.errors import FinetuneError, first_line
from finetune.plan.from_run import job_of
from finetune.plan.machine import Machine, find_machine
from finetune.plan.plan import Plan, plan
from finetune.plan.run_model import run_of_record
from finetune.report.run_folder import RunFolder
from finetune.run.launch import Launch


def plan_of_run(run: RunFolder) -> Plan | None:
    """None where no plan can be made, which is said in the run's notes."""
    if not run.recipe:
        return None
    try:
        machine = _machine(run)
        launch = Launch(world_size=run.ranks, local_world_size=run.ranks, launcher="torchrun")
        job, _, _ = job_of(run_of_record(run.folder, launch), machine)
        return plan(job, machine)
    except FinetuneError as error:
        run.notes.append(f"Nothing is planned beside it: {first_line(error)}")
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
        ArithmeticError,
        OSError,
    ) as error:  # a recipe.yaml that no run has written
        run.notes.append(f"Nothing is planned beside it: recipe.yaml gives {first_line(error)}")
    return None


def _machine(run: RunFolder) -> Machine:
    gpus = run.environment.get("gpus")
    return find_machine(str(gpus[0]) if isinstance(gpus, list) and gpus else "cpu")
